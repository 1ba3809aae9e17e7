"""The files and limits of the base model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.model import BundledModel, DirectoryModel
from mens_exp.config.rules.model import BLOCK_SIZE
from mens_exp.config.validate import range_problems
from mens_exp.errors import ConfigError, ModelFileError
from mens_exp.layout.bundled import locate
from mens_exp.layout.directory import read_directory
from mens_exp.layout.shape import Shape, check_weights, shape_of
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

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
    if isinstance(model, DirectoryModel):
        directory = Path(model.id).expanduser()
        yield from _widths(directory, shape)
        yield from _vocabulary(directory, shape)
        check_weights(read_directory(directory))


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
