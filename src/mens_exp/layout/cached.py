"""The place in the cache of a base model that has to be made, and checks that it is whole."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.config.model import BundledModel, HfModel, ModelConfig, RandomModel
from mens_exp.layout import hub
from mens_exp.layout.directory import read_directory
from mens_exp.layout.random_config import config_of

if TYPE_CHECKING:
    from pathlib import Path

__all__ = [
    "damaged_files",
    "hash_shards",
    "hash_weights",
    "is_whole",
    "mark",
    "marked_weights",
    "place_of",
    "ready",
]

_MARK = "mens_exp_base.json"
_VERSIONS = {"bundled": 1, "random": 2}  # raise one when the same source becomes other files


def place_of(model: BundledModel | RandomModel, cache: Path) -> Path:
    """Return the folder of a model that is made from its source."""
    if isinstance(model, BundledModel):
        made_of: dict[str, Any] = {"sha256": model.sha256}
    else:
        made_of = {**config_of(model), "init_seed": model.init_seed}
    identity = digest({"version": _VERSIONS[model.source], **made_of})
    return cache / "models" / f"{model.name}-{identity[:12]}"


def ready(model: ModelConfig, cache: Path) -> Path | None:
    """Return a model's directory when it can be read at once, else None."""
    if isinstance(model, HfModel):
        described = hub.describe(model)
        return described.path if described.shards else None
    assert isinstance(model, BundledModel | RandomModel)
    place = place_of(model, cache)
    return place if is_whole(place) else None


def hash_weights(directory: Path) -> str:
    """Hash the names and contents of a directory's shards."""
    return digest(hash_shards(directory))


def hash_shards(directory: Path) -> dict[str, str]:
    """Return the SHA-256 of every shard of a directory, by its name."""
    return {shard.name: sha256_file(shard) for shard in read_directory(directory).shards}


def mark(directory: Path) -> None:
    """Record the sizes and hashes of all files of a directory that has just been made."""
    files = [file for file in sorted(directory.iterdir()) if file.name != _MARK]
    hashes = {file.name: sha256_file(file) for file in files}
    record = {
        "weights_sha256": _weights_of(directory, hashes),
        "sizes": {file.name: file.stat().st_size for file in files},
        "sha256": hashes,
    }
    atomic.write_json(directory / _MARK, record)


def marked_weights(directory: Path) -> str:
    """Return the weights' hash that :func:`mark` recorded.

    It says nothing of the bytes that are there now; `damaged_files` reads them.
    """
    return str(json.loads((directory / _MARK).read_text("utf-8"))["weights_sha256"])


def is_whole(directory: Path) -> bool:
    """Tell whether every file still has its recorded size: enough for a plan, not for a run."""
    try:
        record: dict[str, Any] = json.loads((directory / _MARK).read_text("utf-8"))
        return all(
            (directory / name).stat().st_size == size for name, size in record["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def damaged_files(directory: Path) -> list[str]:
    """Read a made directory, and name the files that are not what was written; none if it is whole.

    Measured on SmolLM2-135M (272 MB): 0.35 s on one core.
    """
    try:
        record: dict[str, Any] = json.loads((directory / _MARK).read_text("utf-8"))
        hashes = dict(record["sha256"])
        if record["sizes"].keys() != hashes.keys():
            return [_MARK]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [_MARK]
    found = []
    for name, sha256 in sorted(hashes.items()):
        file = directory / name
        if not file.is_file() or sha256_file(file) != sha256:
            found.append(name)
    if not found and _weights_of(directory, hashes) != record.get("weights_sha256"):
        return [_MARK]
    return found


def _weights_of(directory: Path, hashes: dict[str, str]) -> str:
    """Return what `hash_weights` does, of hashes that are known already."""
    return digest({shard.name: hashes[shard.name] for shard in read_directory(directory).shards})
