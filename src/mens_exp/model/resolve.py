"""Every source of a base model ends as a model directory with content hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.outputs import refuse_changed_outputs
from mens_exp.artifacts.wait_lock import waiting
from mens_exp.config.model import BundledModel, HfModel, ModelConfig, RandomModel
from mens_exp.errors import ModelFileError
from mens_exp.layout import hub, hub_snapshot
from mens_exp.layout.cached import (
    damaged_files,
    hash_shards,
    hash_weights,
    mark,
    marked_weights,
    place_of,
)
from mens_exp.layout.directory import license_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
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
        made_again: files that were damaged in the cache, for which it was made or fetched again.
        stamps: size, modification time and inode of each shard, from before it was hashed.
    """

    directory: Path
    name: str
    source: str
    weights_sha256: str
    license: str | None
    revision: str | None = None
    trust_remote_code: bool = False
    made_again: tuple[str, ...] = field(default=(), compare=False)
    stamps: dict[str, tuple[int, int, int]] = field(default_factory=dict, compare=False)

    def refuse_changed(self) -> None:
        """Refuse weights that were written to since they were hashed.

        Raises:
            ModelFileError: they are others; the same bytes written again are no change.
        """
        now = _stamps(self.directory) if self.stamps else {}
        others = [name for name, stamp in self.stamps.items() if now.get(name) != stamp]
        if others and hash_weights(self.directory) != self.weights_sha256:
            raise ModelFileError(
                "was written to while it was read",
                where=str(self.directory / others[0]),
                expected="weights that stay as they are while a run loads them",
                remedy="run it again",
            )


def resolve(model: ModelConfig, cache: Path) -> BaseModel:
    """Return the directory of a base model, making it in the cache where that is needed.

    A cached directory is written beside its place and renamed. Every file is read and hashed here:
    where one is not what was written, the directory is made again. So a run records the hash of
    the bytes that it reads, and not one that a file states.

    Raises:
        MensError: the source is missing, damaged, or not the pinned one.
    """
    if isinstance(model, HfModel):
        return _from_hub(model)
    assert isinstance(model, BundledModel | RandomModel)
    directory = place_of(model, cache)
    stamps = _stamps(directory)
    damaged = damaged_files(directory)
    if damaged:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with waiting(directory.parent / f".{directory.name}.lock"):
            damaged = damaged_files(directory)  # somebody may have made it meanwhile
            if damaged:
                existed = directory.is_dir()
                _make(model, directory)
                damaged = damaged if existed else []
            stamps = _stamps(directory)
    return BaseModel(
        directory=directory,
        name=model.name,
        source=model.source,
        weights_sha256=marked_weights(directory),
        license=model.license if isinstance(model, BundledModel) else None,
        made_again=tuple(damaged),
        stamps=stamps,
    )


def _make(model: BundledModel | RandomModel, directory: Path) -> None:
    with atomic.directory(directory) as temporary:
        _writer(model)(temporary)
        mark(temporary)


def _stamps(directory: Path) -> dict[str, tuple[int, int, int]]:
    """Return what changes when somebody writes to a shard, by its name."""
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        state = shard.stat()
        found[shard.name] = (state.st_size, state.st_mtime_ns, state.st_ino)
    return found


def _from_hub(model: HfModel) -> BaseModel:
    """Take a directory as it is, or the files of one commit from huggingface_hub's cache."""
    directory = hub.local(model.id)
    if directory is not None:
        directory = directory.resolve()
        stamps = _stamps(directory)
        refuse_changed_outputs(directory / "config.json", *(directory / name for name in stamps))
        return BaseModel(
            stamps=stamps,
            directory=directory,
            name=directory.name,
            source="directory",
            weights_sha256=hash_weights(directory),
            license=license_of(directory),
            trust_remote_code=model.trust_remote_code,
        )
    directory = hub.download(model)
    stamps = _stamps(directory)
    hashes = hash_shards(directory)
    damaged = hub_snapshot.damaged_shards(directory, hashes)
    if damaged:
        hub.download_again(model, damaged)
        stamps = _stamps(directory)
        hashes = hash_shards(directory)
        _refuse_damaged(directory, hub_snapshot.damaged_shards(directory, hashes))
    return BaseModel(
        directory=directory,
        name=model.id,
        source="hub",
        stamps=stamps,
        weights_sha256=digest(hashes),
        made_again=tuple(damaged),
        license=license_of(directory),
        revision=hub_snapshot.commit_of(model.id, model.revision),
        trust_remote_code=model.trust_remote_code,
    )


def _refuse_damaged(directory: Path, damaged: Sequence[str]) -> None:
    """Refuse shards that are not what the hub lists, though they were just fetched."""
    if damaged:
        raise ModelFileError(
            "is not what the hub has, by its hash",
            where=str(directory / damaged[0]),
            remedy="check the disk, and what answers in the place of the hub",
        )


def _writer(model: BundledModel | RandomModel) -> Callable[[Path], None]:
    if isinstance(model, BundledModel):
        from mens_exp.model.bundled import write_bundled

        return lambda directory: write_bundled(model, directory)
    from mens_exp.model.random_weights import write_random

    return lambda directory: write_random(model, directory)
