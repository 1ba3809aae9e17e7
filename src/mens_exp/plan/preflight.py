"""What can be told to be wrong before a run directory exists or a weight is read; torch-free."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.data import JsonlData
from mens_exp.config.model import BundledModel, DirectoryModel
from mens_exp.config.validate import BLOCK_SIZE, range_problems
from mens_exp.corpus.source import load_rows
from mens_exp.errors import ConfigError, MensError, ModelFileError, Problems
from mens_exp.layout.bundled import locate
from mens_exp.layout.directory import read_directory
from mens_exp.layout.names import PROJECTIONS
from mens_exp.layout.shape import Shape, check_weights, shape_of
from mens_exp.rows.cache import cache_root
from mens_exp.rows.readers import read_jsonl
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["preflight", "writable_cache"]


def preflight(config: RunConfig) -> list[MensError]:
    """List everything wrong with the files and limits that a run would meet."""
    problems: list[MensError] = []
    for check in (_cache, _data, _model, _lora):
        try:
            for problem in check(config):
                problems.append(problem)  # noqa: PERF402  # kept when the check gives up later
        except Problems as several:
            problems += several.problems
        except MensError as error:
            problems.append(error)
    return list({str(problem): problem for problem in problems}.values())


def _cache(config: RunConfig) -> Iterator[MensError]:
    del config
    writable_cache()
    yield from ()


def _data(config: RunConfig) -> Iterator[MensError]:
    data = config.data
    shares_hold = not any(range_problems(data)) and data.val_frac + data.heldout_frac < 1
    if isinstance(data, JsonlData) and data.path:
        if shares_hold:
            load_rows(data, cache_root())
        else:  # told already; the rows can still be judged
            read_jsonl(Path(data.path).expanduser())
    yield from ()


def _model(config: RunConfig) -> Iterator[MensError]:
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


def _lora(config: RunConfig) -> Iterator[MensError]:
    for target in config.lora.targets:
        if target not in PROJECTIONS:
            yield ConfigError(
                "matches no module of the model",
                where="lora.targets",
                found=target,
                expected=expected_name(target, PROJECTIONS),
            )


def writable_cache() -> Path:
    """Return the cache folder, made where it is missing.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(root, os.W_OK) else "no permission to write"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if reason is not None:
        raise ConfigError(
            f"the cache folder cannot be used: {reason}",
            where="MENS_EXP_CACHE",
            found=str(root),
            remedy="set MENS_EXP_CACHE to a folder that can be written",
        )
    return root
