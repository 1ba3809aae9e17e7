"""Where a base model that has to be made lies in the cache, and whether it is whole."""

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

__all__ = ["hash_weights", "is_whole", "mark", "marked_weights", "place_of", "ready"]

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
    shards = read_directory(directory).shards
    return digest({shard.name: sha256_file(shard) for shard in shards})


def mark(directory: Path) -> None:
    """Record the sizes and the weights' hash of a directory that has just been made."""
    sizes = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
    record = {"weights_sha256": hash_weights(directory), "sizes": sizes}
    atomic.write_json(directory / _MARK, record)


def marked_weights(directory: Path) -> str:
    """Return the weights' hash that :func:`mark` recorded."""
    return str(json.loads((directory / _MARK).read_text("utf-8"))["weights_sha256"])


def is_whole(directory: Path) -> bool:
    """Tell whether every file still has its recorded size."""
    try:
        record: dict[str, Any] = json.loads((directory / _MARK).read_text("utf-8"))
        return all(
            (directory / name).stat().st_size == size for name, size in record["sizes"].items()
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
