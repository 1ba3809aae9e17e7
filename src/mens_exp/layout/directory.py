"""A Hugging Face model directory, as its headers tell it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.errors import ModelFileError
from mens_exp.layout.safetensors_header import TensorInfo, read_header

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ModelDirectory", "read_directory"]

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDirectory:
    """What a model directory holds, without its weights."""

    path: Path
    config: dict[str, Any]
    shards: tuple[Path, ...]
    tensors: dict[str, TensorInfo]

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest sequence the model was made for, in tokens, where the config says."""
        value = self.config.get("max_position_embeddings")
        return int(value) if value is not None else None

    def linear_names(self) -> set[str]:
        """Return the last names of the modules inside the layers that hold a weight matrix."""
        matrices = (n for n, t in self.tensors.items() if len(t.shape) == 2)  # noqa: PLR2004
        return {
            name.split(".")[-2] for name in matrices if ".layers." in name and "norm" not in name
        }


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
    config = _read_json(path / "config.json")
    for needed in ("tokenizer.json",):
        if not (path / needed).is_file():
            raise ModelFileError("is missing", where=str(path / needed))
    shards = _shards(path)
    tensors: dict[str, TensorInfo] = {}
    for shard in shards:
        tensors |= read_header(shard)
    return ModelDirectory(path=path, config=config, shards=shards, tensors=tensors)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError("is missing or unreadable", where=str(path)) from error
    except ValueError as error:
        raise ModelFileError("is not JSON", where=str(path), found=str(error)) from error
    if not isinstance(value, dict):
        raise ModelFileError("is no JSON object", where=str(path))
    return value


def _shards(path: Path) -> tuple[Path, ...]:
    if (path / _INDEX).is_file():
        listed = set(_read_json(path / _INDEX).get("weight_map", {}).values())
        missing = sorted(name for name in listed if not (path / name).is_file())
        if missing:
            raise ModelFileError(
                "shards listed in the index are absent",
                where=str(path / _INDEX),
                found=", ".join(missing),
                remedy="download the model again",
            )
        return tuple(path / name for name in sorted(listed))
    if (path / _SINGLE).is_file():
        return (path / _SINGLE,)
    raise ModelFileError(
        "holds no safetensors weights",
        where=str(path),
        expected=f"{_SINGLE} or {_INDEX}",
    )
