"""A user's model: a local directory, or one commit of a model on the Hugging Face Hub.

All access goes through huggingface_hub and its cache, so that files are shared with other programs.
Without a network, completely cached models are used. Only safetensors are ever downloaded, and code
only if requested. The dimensions of the models in our presets are shipped, so that planning them
needs no download.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import json
import logging
import re
import shutil
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.errors import MensError, ModelFileError, SetupError
from mens_exp.layout.checkpoint_files import (
    INDEX,
    SINGLE,
    ModelDirectory,
    TensorInfo,
    read_description,
    read_directory,
    with_weights,
)
from mens_exp.layout.hub_errors import DATASET, MODEL, Kind, client_error, translated

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.config.model import HfModel


def local(model_id: str) -> Path | None:
    """Return the directory that an id names; None if it is a Hub id.

    Raises:
        ModelFileError: it is written as a path, but there is no such directory.
    """
    path = Path(model_id).expanduser()
    if path.is_dir():
        return path
    if model_id.startswith((".", "/", "~")) or model_id.count("/") > 1 or path.exists():
        raise ModelFileError(
            "is not a directory",
            where="model.id",
            found=model_id,
            expected="a directory with config.json, safetensors and tokenizer.json, "
            "or an id of the hub",
        )
    return None


def pinned(model: HfModel) -> HfModel:
    """Return the model with its location resolved: an absolute path, or the current commit.

    Raises:
        MensError: there is no such model or revision, or the hub cannot be reached.
    """
    directory = local(model.id)
    if directory is not None:
        return replace(model, id=str(directory.absolute()))
    return replace(model, revision=commit_of(model.id, model.revision))


def describe(model: HfModel) -> ModelDirectory:
    """Return the contents of the model; weights that are not local are known by their headers.

    If the Hub does not answer or requires a login, the shipped dimensions are used for a model of
    our presets. It then has no shards, and can be planned but not trained.

    Raises:
        ModelFileError: files are missing, truncated or inconsistent.
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
    config = read_description(files.directory)
    headers = headers_of(model.id, commit, tuple(sorted(files.weights)))
    kept, coded = with_weights(config, headers, model.id, lambda _: None)
    return ModelDirectory(
        path=files.directory,
        config=config,
        shards=tuple(files.directory / name for name in sorted(files.weights)),
        tensors=kept | {name: info for name, (_, info) in coded.items()},
    )


def bytes_to_download(model: HfModel) -> int:
    """Return the bytes of weights that a run would download first; 0 for a directory."""
    if local(model.id) is not None:
        return 0
    commit = commit_of(model.id, model.revision)
    return sum(files_of(model.id, commit, code=model.trust_remote_code).missing.values())


def download(model: HfModel) -> Path:
    """Download missing files of a model; return its directory in huggingface_hub's cache.

    Raises:
        SetupError: the disk has no room, or the hub cannot be reached.
    """
    commit = commit_of(model.id, model.revision)
    files = files_of(model.id, commit, code=model.trust_remote_code)
    if files.missing:
        fetch(model.id, commit, files)
    return files.directory


def repaired_files(model: HfModel) -> tuple[str, ...]:
    """Return the small files of a model that this process found damaged and downloaded again."""
    commit = commit_of(model.id, model.revision)
    return files_of(model.id, commit, code=model.trust_remote_code).damaged


def download_again(model: HfModel, shards: Sequence[str]) -> None:
    """Download shards again that are damaged in huggingface_hub's cache.

    Raises:
        SetupError: the hub cannot be reached.
    """
    fetch_again(model.id, commit_of(model.id, model.revision), shards)


_SMALL = (
    "README.md",  # its head states the licence
    "config.json",
    "generation_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_CODE = ("*.py",)
_SHA256, _GIT_SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")
_PATIENCE_S = 10.0  # huggingface_hub's own timeout, where it has one
_AT_ONCE = 8  # shards whose headers are read in parallel; as in huggingface_hub


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFiles:
    """One commit of a model.

    Attributes:
        directory: directory of its files.
        weights: size of each shard.
        missing: size of each shard that is not in the cache.
        damaged: small files that were damaged in the cache, and downloaded again.
    """

    directory: Path
    weights: dict[str, int]
    missing: dict[str, int]
    damaged: tuple[str, ...]


def commit_of(repo_id: str, revision: str | None, kind: Kind = MODEL) -> str:
    """Return the commit that a branch, a tag or None (main) refers to.

    Queried once per process, so that every cell of a sweep gets the same answer.

    Raises:
        MensError: there is no such repository or revision, or the hub cannot be reached.
    """
    outcome = _outcome(repo_id, revision, kind)
    if isinstance(outcome, MensError):
        raise outcome
    return outcome


@functools.cache
def _outcome(repo_id: str, revision: str | None, kind: Kind) -> str | MensError:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionResolutionError

    try:
        with translated(repo_id, revision, kind), _silent():
            away = _away(repo_id, kind)
            try:
                resolved = HfApi().resolve_revision(
                    repo_id,
                    repo_type=kind.name,
                    revision=revision,
                    local_files_only=away is not None,
                )
            except RevisionResolutionError as error:
                raise error from away
            return str(resolved.resolved)
    except MensError as error:
        return error


@functools.cache
def _away(repo_id: str, kind: Kind = MODEL) -> Exception | None:
    """Return the reason why the Hub does not answer; None if it does.

    Queried once per process and with a timeout, which huggingface_hub's own requests lack: a
    network that drops packets would otherwise block a command forever.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

    try:
        HfApi().repo_info(repo_id, repo_type=kind.name, timeout=_PATIENCE_S)
    except HfHubHTTPError as error:
        if error.response.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise
        return error
    except (client_error(), OfflineModeIsEnabled) as error:
        return error
    return None


def forget() -> None:
    """Clear the cached answers, so that the Hub is queried again."""
    for remembered in (_outcome, _away, files_of, headers_of):
        remembered.cache_clear()


@functools.cache
def files_of(model_id: str, commit: str, *, code: bool) -> HubFiles:
    """Download the small files of a commit, and find its shards.

    Small files that are damaged in the cache are downloaded again.

    Raises:
        ModelFileError: there are no safetensors, or a small file stays damaged.
        SetupError: the hub cannot be reached, and the cache does not hold all of it.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL, *(_CODE if code else ())]
    with translated(model_id, commit), _silent():
        away = _away(model_id) is not None
        directory = Path(
            snapshot_download(
                model_id, revision=commit, allow_patterns=patterns, local_files_only=away
            )
        )
        small = [file.name for one in patterns for file in sorted(directory.glob(one))]
        damaged = damaged_files(directory, small)
        if damaged and not away:
            snapshot_download(
                model_id,
                revision=commit,
                allow_patterns=list(map(glob.escape, damaged)),
                force_download=True,
            )
    refuse_damaged(directory, damaged_files(directory, damaged))
    names = _whole(directory)
    if names is not None:
        sizes = {name: (directory / name).stat().st_size for name in names}
        return HubFiles(directory=directory, weights=sizes, missing={}, damaged=tuple(damaged))
    listed = _listed(model_id, commit)
    sizes = {name: listed.get(name, 0) for name in _shards(model_id, directory, listed)}
    absent = {name: size for name, size in sizes.items() if not (directory / name).is_file()}
    return HubFiles(directory=directory, weights=sizes, missing=absent, damaged=tuple(damaged))


def fetch(model_id: str, commit: str, files: HubFiles) -> None:
    """Download the missing shards.

    Raises:
        SetupError: the disk has no room, or the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    needed, free = sum(files.missing.values()), shutil.disk_usage(files.directory).free
    if needed > free:
        raise SetupError(
            "the disk has no room for the weights",
            where=str(files.directory),
            found=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            remedy="free space, or set HF_HOME to a folder on another disk",
        )
    exactly = [glob.escape(name) for name in files.missing]
    with translated(model_id, commit):
        snapshot_download(model_id, revision=commit, allow_patterns=exactly)
    files_of.cache_clear()


def damaged_files(
    directory: Path, names: Iterable[str], hashes: Mapping[str, str] | None = None
) -> list[str]:
    """Return the files of a snapshot whose content differs from the Hub's.

    huggingface_hub names the file behind each one by the hash listed on the Hub: SHA-256 for large
    files, Git's SHA-1 for others. A file with another kind of name, such as a plain copy, is not
    considered damaged.

    Args:
        directory: directory of the snapshot.
        names: the files' names.
        hashes: SHA-256 hashes that have been computed already, by name.
    """
    known = hashes or {}
    return sorted(name for name in names if _is_damaged(directory / name, known.get(name)))


def _is_damaged(file: Path, sha256: str | None) -> bool:
    listed = file.resolve().name
    if _SHA256.fullmatch(listed):
        return listed != (sha256 or sha256_file(file))
    if _GIT_SHA1.fullmatch(listed):
        data = file.read_bytes()
        state = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False)
        return listed != state.hexdigest()
    return False


def refuse_damaged(directory: Path, damaged: Sequence[str]) -> None:
    """Refuse files that differ from the Hub's and could not be downloaded again.

    Raises:
        ModelFileError: there are some.
    """
    if damaged:
        raise ModelFileError(
            "differs from the hub's file by its hash",
            where=str(directory / damaged[0]),
            remedy="connect to the hub to download it again; if you are connected, check the disk "
            "and what answers in the place of the hub",
        )


def fetch_again(model_id: str, commit: str, shards: Sequence[str]) -> None:
    """Download damaged shards again.

    Raises:
        SetupError: the hub cannot be reached.
    """
    from huggingface_hub import snapshot_download

    exactly = [glob.escape(name) for name in shards]
    with translated(model_id, commit):
        away = _away(model_id)
        if away is not None:
            raise away
        snapshot_download(model_id, revision=commit, allow_patterns=exactly, force_download=True)
    files_of.cache_clear()


def dataset_files(dataset_id: str, commit: str) -> Path:
    """Return the directory of a dataset's commit, downloading missing files.

    Every file of the repository is downloaded, whichever split is requested, because only
    `datasets` knows which files make up a split, and it reads a directory.

    Raises:
        SetupError: the hub cannot be reached and the cache does not hold all of it.
    """
    from huggingface_hub import snapshot_download

    with translated(dataset_id, commit, DATASET):
        away = _away(dataset_id, DATASET) is not None
        directory = snapshot_download(
            dataset_id, repo_type="dataset", revision=commit, local_files_only=away
        )
    return Path(directory)


def _whole(directory: Path) -> list[str] | None:
    """Return the shards of a complete snapshot, so that the Hub need not be queried."""
    names = [SINGLE] if (directory / SINGLE).is_file() else _indexed(directory)
    return names if names and all((directory / name).is_file() for name in names) else None


def _indexed(directory: Path) -> list[str]:
    """Return the shards listed in the index; empty without a usable index."""
    index = directory / INDEX
    try:
        weight_map = json.loads(index.read_text("utf-8"))["weight_map"]
        return sorted({str(name) for name in weight_map.values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []


def _listed(model_id: str, commit: str) -> dict[str, int]:
    """List the files of a commit with their sizes in bytes."""
    from huggingface_hub import HfApi, RepoFile

    with translated(model_id, commit), _silent():
        away = _away(model_id)
        if away is not None:
            raise away
        tree = HfApi().list_repo_tree(model_id, recursive=True, revision=commit)
        return {file.path: file.size for file in tree if isinstance(file, RepoFile)}


def _shards(model_id: str, directory: Path, listed: Iterable[str]) -> list[str]:
    """Return the files that hold the weights; copies in other formats or folders are ignored."""
    names = [SINGLE] if SINGLE in listed else _indexed(directory)
    if not names:
        weights = (".bin", ".gguf", ".h5", ".msgpack", ".pt", ".pth", ".safetensors")
        raise ModelFileError(
            "contains no safetensors weights",
            where=f"model.id={model_id}",
            found=", ".join(sorted(n for n in listed if n.endswith(weights))[:4]) or "no weights",
            expected=f"{SINGLE} or {INDEX}; other formats can carry code and are never loaded",
            remedy="choose a revision that has them, or convert the model into a directory",
        )
    return names


@functools.cache
def headers_of(model_id: str, commit: str, names: tuple[str, ...]) -> dict[str, TensorInfo]:
    """Read the headers of shards on the Hub, a few kilobytes each.

    Raises:
        ModelFileError: a header is damaged.
        SetupError: the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import SafetensorsParsingError

    api = HfApi()

    def one(name: str) -> dict[str, TensorInfo]:
        header = api.parse_safetensors_file_metadata(model_id, name, revision=commit)
        return {
            tensor: TensorInfo(info.dtype, tuple(info.shape), *info.data_offsets)
            for tensor, info in header.tensors.items()
        }

    try:
        with translated(model_id, commit), ThreadPoolExecutor(_AT_ONCE) as pool:
            return {k: v for tensors in pool.map(one, names) for k, v in tensors.items()}
    except SafetensorsParsingError as error:
        raise ModelFileError(
            "the header of a shard is not a safetensors header",
            where=f"model.id={model_id}",
            found=str(error),
        ) from error


@contextmanager
def _silent() -> Iterator[None]:
    """Hide the progress of small files; that of weights is still shown."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    logger, shown = logging.getLogger("huggingface_hub"), not are_progress_bars_disabled()
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about progress bars
            disable_progress_bars()
            yield
    finally:
        logger.setLevel(level)
        if shown:
            enable_progress_bars()


def shipped_config(model_id: str) -> dict[str, Any] | None:
    """Return the shipped dimensions from a Hub model's config.json; None if not shipped."""
    return _all().get(model_id)


@functools.cache
def _all() -> dict[str, dict[str, Any]]:
    folder = resources.files("mens_exp.layout").joinpath("shipped")
    records = (
        json.loads(file.read_text("utf-8"))
        for file in folder.iterdir()
        if file.name.endswith(".json")
    )
    return {record["id"]: record["config"] for record in records}
