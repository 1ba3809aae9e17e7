"""A user's model: a directory on this machine, or else a model of the Hugging Face Hub."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.errors import MensError, ModelFileError
from mens_exp.layout.directory import ModelDirectory, read_description, read_directory
from mens_exp.layout.hub_snapshot import commit_of, fetch, fetch_again, files_of, headers_of
from mens_exp.layout.shipped_configs import shipped_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.model import HfModel

__all__ = ["bytes_to_download", "describe", "download", "download_again", "local", "pinned"]


def local(model_id: str) -> Path | None:
    """Return the directory that an id names, or None where it is an id of the hub.

    Raises:
        ModelFileError: it is written as a path, and no directory is there.
    """
    path = Path(model_id).expanduser()
    if path.is_dir():
        return path
    if model_id.startswith((".", "/", "~")) or model_id.count("/") > 1 or path.exists():
        raise ModelFileError(
            "is no directory",
            where="model.id",
            found=model_id,
            expected="a directory with config.json, safetensors and tokenizer.json, "
            "or an id of the hub",
        )
    return None


def pinned(model: HfModel) -> HfModel:
    """Return the model with its place settled: a whole path, or the commit meant right now.

    Raises:
        MensError: there is no such model or revision, or the hub cannot be reached.
    """
    directory = local(model.id)
    if directory is not None:
        return replace(model, id=str(directory.absolute()))
    return replace(model, revision=commit_of(model.id, model.revision))


def describe(model: HfModel) -> ModelDirectory:
    """Return what the model is made of; weights that are not here are known by their headers.

    Where the hub does not answer, or asks for a login, the dimensions that we ship stand in for a
    model that our presets name; it has no shards then, and can be planned for but not trained.

    Raises:
        ModelFileError: files are missing, truncated or contradictory.
        SetupError: the hub cannot be reached.
    """
    directory = local(model.id)
    if directory is not None:
        return read_directory(directory)
    try:
        commit = commit_of(model.id, model.revision)
        files = files_of(model.id, commit, code=model.trust_remote_code)
    except MensError:
        shipped = shipped_config(model.id)
        if shipped is None:
            raise
        return ModelDirectory(path=Path(model.id), config=shipped, shards=(), tensors={})
    if not files.missing:
        return read_directory(files.directory)
    return ModelDirectory(
        path=files.directory,
        config=read_description(files.directory),
        shards=tuple(files.directory / name for name in sorted(files.weights)),
        tensors=headers_of(model.id, commit, tuple(sorted(files.weights))),
    )


def bytes_to_download(model: HfModel) -> int:
    """Count the bytes of weights that a run would fetch first; 0 for a directory."""
    if local(model.id) is not None:
        return 0
    commit = commit_of(model.id, model.revision)
    return sum(files_of(model.id, commit, code=model.trust_remote_code).missing.values())


def download(model: HfModel) -> Path:
    """Fetch what is missing of a model and return its directory in huggingface_hub's cache.

    Raises:
        SetupError: the disk has no room, or the hub cannot be reached.
    """
    commit = commit_of(model.id, model.revision)
    files = files_of(model.id, commit, code=model.trust_remote_code)
    if files.missing:
        fetch(model.id, commit, files)
    return files.directory


def download_again(model: HfModel, shards: Sequence[str]) -> None:
    """Fetch shards that are damaged in huggingface_hub's cache.

    Raises:
        SetupError: the hub cannot be reached.
    """
    fetch_again(model.id, commit_of(model.id, model.revision), shards)
