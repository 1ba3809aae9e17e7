"""A trained model as a Hugging Face directory of its own, tokenizer files beside it."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import torch

__all__ = ["copy_tokenizer", "write_model"]

_TOKENIZER = ("tokenizer*", "special_tokens_map.json", "chat_template.jinja", "vocab.*", "merges.*")


def write_model(
    model: Any,
    weights: Mapping[str, torch.Tensor],
    tokenizer: Path | None,
    directory: Path,
    *,
    config: Any = None,
) -> None:
    """Write weights under a model's configuration; the directory appears whole or not at all.

    Args:
        model: transformers' model, for its class.
        weights: by transformers' names.
        tokenizer: a directory whose tokenizer files are copied; None where the model was trained
            on another tokenizer's ids.
        directory: where to write.
        config: transformers' configuration to write; None is the model's.
    """
    with atomic.directory(directory) as temporary, quiet():
        plain = type(model)(
            config or model.config
        )  # without PEFT's layers, whose names would be saved
        plain.load_state_dict(dict(weights), strict=False)  # a tied head is named once
        plain.save_pretrained(temporary)
        if tokenizer is not None:
            copy_tokenizer(tokenizer, temporary)


def copy_tokenizer(source: Path, directory: Path) -> None:
    """Copy a tokenizer's files, its chat template among them, from one directory to another."""
    for pattern in _TOKENIZER:
        for file in source.glob(pattern):
            shutil.copyfile(file, directory / file.name)
