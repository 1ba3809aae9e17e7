"""The files and limits of the base model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.config.model import BundledModel, HfModel
from mens_exp.config.rules.model import BLOCK_SIZE
from mens_exp.config.validate import range_problems
from mens_exp.errors import ConfigError, ModelFileError
from mens_exp.layout import hub
from mens_exp.layout.bundled import locate
from mens_exp.layout.shape import Shape, check_weights, shape_of
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the files and limits of the base model."""
    model = config.model
    if isinstance(model, BundledModel):
        locate(model)
    if any(range_problems(model)):
        return  # told already, and nothing can be computed from such dimensions
    shape = shape_of(model)
    if config.data.seq_len > shape.max_position_embeddings:
        yield ConfigError(
            "longer than the model's positions reach",
            where="data.seq_len",
            found=config.data.seq_len,
            expected=f"at most {shape.max_position_embeddings} for {model.name}",
        )
    if isinstance(model, HfModel):
        directory = hub.describe(model)
        yield from _without_effect(model)
        yield from _remote_code(model, directory.config)
        yield from _widths(directory.path, shape)
        yield from _vocabulary(directory.path, shape)
        check_weights(directory)


def _without_effect(model: HfModel) -> Iterator[MensError]:
    if model.revision is not None and hub.local(model.id) is not None:
        yield ConfigError(
            "has no effect on a directory",
            where="model.revision",
            found=model.revision,
            expected=f"null, because model.id is the directory {model.id}",
        )


def _remote_code(model: HfModel, config: dict[str, Any]) -> Iterator[MensError]:
    """Refuse a permission that is not needed, and code that no commit pins."""
    if not model.trust_remote_code:
        return
    code = (config.get("auto_map") or {}).get("AutoModelForCausalLM")
    if code is None:
        yield ConfigError(
            "has no effect: the model brings no code of its own",
            where="model.trust_remote_code",
            found=True,
            expected="false",
        )
    elif "--" in str(code):
        yield ModelFileError(
            "the model's code is in another repository, which no revision pins",
            where=f"model.id={model.id}: auto_map",
            found=str(code),
            expected="code beside the weights",
            remedy="download both into a directory and give that as model.id",
        )


def _widths(directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse widths that 4-bit blocks do not divide, which bitsandbytes gets wrong in silence."""
    for name, (_, width) in shape.projections().items():
        if width % BLOCK_SIZE:
            yield ModelFileError(
                "4-bit blocks would straddle the rows of a projection",
                where=f"{directory}: {name}",
                found=f"width {width}",
                expected=f"a multiple of {BLOCK_SIZE}",
            )


def _vocabulary(directory: Path, shape: Shape) -> Iterator[MensError]:
    """Refuse a tokenizer whose ids reach past the embedding table."""
    last = HfTokenizer.from_directory(directory).last_id
    if last >= shape.vocab_size:
        yield ModelFileError(
            "the tokenizer has ids that the model has no embedding for",
            where=str(directory / "tokenizer.json"),
            found=f"id {last}",
            expected=f"less than vocab_size ({shape.vocab_size})",
        )
