"""What can be told to be wrong before a run directory exists or a weight is read; torch-free."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.data import JsonlData
from mens_exp.config.model import BundledModel, DirectoryModel
from mens_exp.config.validate import BLOCK_SIZE
from mens_exp.errors import ConfigError, MensError, ModelFileError, Problems
from mens_exp.layout.bundled import locate
from mens_exp.layout.directory import read_directory
from mens_exp.layout.names import PROJECTIONS
from mens_exp.layout.shape import shape_of
from mens_exp.rows.cache import cache_root
from mens_exp.rows.readers import read_jsonl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["preflight"]


def preflight(config: RunConfig) -> list[MensError]:
    """List everything wrong with the files and limits that a run would meet."""
    problems: list[MensError] = []
    for check in (_data, _model, _lora):
        try:
            problems += check(config)
        except Problems as several:
            problems += several.problems
        except MensError as error:
            problems.append(error)
    return list({str(problem): problem for problem in problems}.values())


def _data(config: RunConfig) -> Iterator[MensError]:
    if isinstance(config.data, JsonlData):
        read_jsonl(Path(config.data.path).expanduser())
    yield from ()


def _model(config: RunConfig) -> Iterator[MensError]:
    model = config.model
    if isinstance(model, BundledModel):
        locate(model)
    shape = shape_of(model)
    if config.data.seq_len > shape.max_position_embeddings:
        yield ConfigError(
            "longer than the model's positions reach",
            where="data.seq_len",
            found=config.data.seq_len,
            expected=f"at most {shape.max_position_embeddings} for {model.name}",
        )
    if isinstance(model, DirectoryModel):
        yield from _blocks(config)


def _blocks(config: RunConfig) -> Iterator[MensError]:
    """Refuse widths that 4-bit blocks do not divide, which bitsandbytes gets wrong in silence."""
    assert isinstance(config.model, DirectoryModel)
    directory = read_directory(Path(config.model.id).expanduser())
    for name, (_, width) in shape_of(config.model).projections().items():
        if width % BLOCK_SIZE:
            yield ModelFileError(
                "4-bit blocks would straddle the rows of a projection",
                where=f"{directory.path}: {name}",
                found=f"width {width}",
                expected=f"a multiple of {BLOCK_SIZE}",
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
    except OSError as error:
        raise ConfigError(
            "the cache folder cannot be made",
            where="MENS_EXP_CACHE",
            found=str(root),
            remedy="set MENS_EXP_CACHE to a folder that can be written",
        ) from error
    return root
