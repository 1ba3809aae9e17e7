"""A Hugging Face model directory, as its headers tell it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.plain_yaml import parse_yaml
from mens_exp.errors import DataError, ModelFileError
from mens_exp.layout.safetensors_header import TensorInfo, read_header

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["INDEX", "SINGLE", "ModelDirectory", "license_of", "read_description", "read_directory"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDirectory:
    """The contents of a model directory, without its weights."""

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, TensorInfo]


def read_directory(path: Path) -> ModelDirectory:
    """Read config.json and every shard's header.

    Raises:
        ModelFileError: a file is missing, truncated or contradictory; the message names it.
    """
    if not path.is_dir():
        raise ModelFileError(
            "is no directory",
            where="model.id",
            found=str(path),
            expected="a directory with config.json, safetensors and tokenizer.json",
        )
    config = read_description(path)
    places = _places(path)
    shards = tuple(sorted(set(places.values()))) if places else (path / SINGLE,)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        tensors |= read_header(shard)
    _check_index(path, places, tensors)
    return ModelDirectory(path=path, config=config, shards=shards, tensors=tensors)


def read_description(path: Path) -> dict[str, Any]:
    """Return config.json, and see that a tokenizer stands beside it.

    Raises:
        ModelFileError: a file is missing or unreadable.
    """
    config = _read_json(path / "config.json")
    if not (path / "tokenizer.json").is_file():
        raise ModelFileError("is missing", where=str(path / "tokenizer.json"))
    return config


def license_of(path: Path) -> str | None:
    """Return the licence that the head of a model card states, or None where it states none.

    Format: https://huggingface.co/docs/hub/model-cards#model-card-metadata.
    """
    try:
        _, head, _ = (path / "README.md").read_text(encoding="utf-8").split("---\n", 2)
        stated = parse_yaml(head, "README.md")
    except (OSError, ValueError, DataError):
        return None
    if not isinstance(stated, dict):
        return None
    name = stated.get("license_name" if stated.get("license") == "other" else "license")
    return name if isinstance(name, str) else None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError("is missing or unreadable", where=str(path)) from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError("is not JSON", where=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise ModelFileError("is no JSON object", where=str(path))
    return value


def _places(path: Path) -> dict[str, Path]:
    """Return the shard of each tensor as the index lists it; nothing where one file holds all."""
    if (path / SINGLE).is_file():
        return {}  # beside an index too: transformers loads the single file then
    if not (path / INDEX).is_file():
        raise ModelFileError(
            "holds no safetensors weights",
            where=str(path),
            expected=f"{SINGLE} or {INDEX}",
        )
    weight_map = _read_json(path / INDEX).get("weight_map")
    if not weight_map or not isinstance(weight_map, dict):
        raise ModelFileError(
            "lists no tensors", where=str(path / INDEX), expected="a weight_map of names to files"
        )
    listed = {str(shard) for shard in weight_map.values()}
    missing = sorted(shard for shard in listed if not (path / shard).is_file())
    if missing:
        raise ModelFileError(
            "shards listed in the index are absent",
            where=str(path / INDEX),
            found=", ".join(missing),
            remedy="download the model again",
        )
    return {str(tensor): path / str(shard) for tensor, shard in weight_map.items()}


def _check_index(path: Path, places: dict[str, Path], tensors: dict[str, TensorInfo]) -> None:
    absent = sorted(places.keys() - tensors.keys())
    if absent:
        raise ModelFileError(
            "tensors listed in the index are in no shard",
            where=str(path / INDEX),
            found=f"{absent[0]}, {len(absent)} in all",
            remedy="download the model again",
        )
