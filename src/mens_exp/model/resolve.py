"""Every source of a base model ends as a model directory with content hashes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.config.model import BundledModel, HfModel, ModelConfig, RandomModel
from mens_exp.layout import hub, hub_snapshot
from mens_exp.layout.cached import hash_weights, is_whole, mark, marked_weights, place_of
from mens_exp.layout.directory import license_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["BaseModel", "resolve"]


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseModel:
    """A base model on disk.

    Attributes:
        directory: config.json, safetensors and tokenizer.json.
        name: shown in records; the hub's id where there is one.
        source: bundled, random, directory or hub.
        weights_sha256: hash over the names and contents of the shards.
        license: as the weights' publisher names it, where that is known.
        revision: the hub's commit, where there is one.
        trust_remote_code: whether code that comes with the model is run.
    """

    directory: Path
    name: str
    source: str
    weights_sha256: str
    license: str | None
    revision: str | None = None
    trust_remote_code: bool = False


def resolve(model: ModelConfig, cache: Path) -> BaseModel:
    """Return the directory of a base model, making it in the cache where that is needed.

    A cached directory is whole or absent: it is written beside its place and renamed, and one
    whose files no longer have their recorded sizes is made again.

    Raises:
        MensError: the source is missing, damaged, or not the pinned one.
    """
    if isinstance(model, HfModel):
        return _from_hub(model)
    assert isinstance(model, BundledModel | RandomModel)
    directory = place_of(model, cache)
    if not is_whole(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with atomic.directory(directory) as temporary:
            _writer(model)(temporary)
            mark(temporary)
    return BaseModel(
        directory=directory,
        name=model.name,
        source=model.source,
        weights_sha256=marked_weights(directory),
        license=model.license if isinstance(model, BundledModel) else None,
    )


def _from_hub(model: HfModel) -> BaseModel:
    """Take a directory as it is, or the files of one commit from huggingface_hub's cache."""
    directory = hub.local(model.id)
    if directory is not None:
        directory = directory.resolve()
        return BaseModel(
            directory=directory,
            name=directory.name,
            source="directory",
            weights_sha256=hash_weights(directory),
            license=license_of(directory),
            trust_remote_code=model.trust_remote_code,
        )
    directory = hub.download(model)
    return BaseModel(
        directory=directory,
        name=model.id,
        source="hub",
        weights_sha256=hash_weights(directory),
        license=license_of(directory),
        revision=hub_snapshot.commit_of(model.id, model.revision),
        trust_remote_code=model.trust_remote_code,
    )


def _writer(model: BundledModel | RandomModel) -> Callable[[Path], None]:
    if isinstance(model, BundledModel):
        from mens_exp.model.bundled import write_bundled

        return lambda directory: write_bundled(model, directory)
    from mens_exp.model.random_weights import write_random

    return lambda directory: write_random(model, directory)
