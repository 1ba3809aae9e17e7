"""Every source of a base model ends as a model directory with content hashes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.config.model import BundledModel, DirectoryModel, ModelConfig, RandomModel
from mens_exp.layout.cached import hash_weights, is_whole, mark, marked_weights, place_of

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BaseModel", "resolve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """A base model on disk."""

    directory: Path
    name: str
    source: str
    weights_sha256: str
    license: str | None


def resolve(model: ModelConfig, cache: Path) -> BaseModel:
    """Return the directory of a base model, making it in the cache where that is needed.

    A cached directory is whole or absent: it is written beside its place and renamed, and one
    whose files no longer have their recorded sizes is made again.

    Raises:
        MensError: the source is missing, damaged, or not the pinned one.
    """
    if isinstance(model, DirectoryModel):
        directory = Path(model.id).expanduser().resolve()
        return _described(model, directory, hash_weights(directory))
    assert isinstance(model, BundledModel | RandomModel)
    directory = place_of(model, cache)
    if not is_whole(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with atomic.directory(directory) as temporary:
            _writer(model)(temporary)
            mark(temporary)
    return _described(model, directory, marked_weights(directory))


def _described(model: ModelConfig, directory: Path, weights_sha256: str) -> BaseModel:
    name = directory.name if isinstance(model, DirectoryModel) else model.name
    return BaseModel(
        directory=directory,
        name=name,
        source=model.source,
        weights_sha256=weights_sha256,
        license=model.license if isinstance(model, BundledModel) else None,
    )


def _writer(model: BundledModel | RandomModel) -> Callable[[Path], None]:
    if isinstance(model, BundledModel):
        from mens_exp.model.bundled import write_bundled

        return lambda directory: write_bundled(model, directory)
    from mens_exp.model.random_weights import write_random

    return lambda directory: write_random(model, directory)
