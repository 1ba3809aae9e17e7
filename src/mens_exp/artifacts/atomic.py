"""Atomic writes: files and directories are either complete or absent, even if the writer is killed.

Everything is written next to its target under a temporary name, flushed to disk, and renamed into
place. A temporary name contains the machine and the process id of its writer, so that leftovers
of a dead writer can be distinguished from a write in progress. The next writer of the same target
deletes what dead writers left of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import time
from typing import TYPE_CHECKING, BinaryIO

import psutil

from mens_exp.errors import MensError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FOREIGN_AGE_S = 24 * 3600  # processes of another machine cannot be checked; no write takes a day
_cleared: set[Path] = set()  # targets where this process has already removed stale files
_START_SLACK_S = 1.0  # file systems and process tables round their clocks differently
_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\.(?P<kind>tmp|old)"
)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; a reader sees either the old or the new file, never a partial one.

    Args:
        path: the target; missing parent directories are created.
        data: the complete content.

    Raises:
        OSError: writing failed; the target is then unchanged.
    """
    with stream(path) as file:
        file.write(data)


@contextlib.contextmanager
def stream(path: Path) -> Iterator[BinaryIO]:
    """Write a file next to `path` and rename it into place if the block ends without an error.

    Args:
        path: the target; missing parent directories are created.

    Yields:
        The open file, empty.

    Raises:
        OSError: writing failed; the target is then unchanged.
    """
    temporary = _temporary_of(path)
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace `path` by `text` in UTF-8, without newline translation."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, obj: object) -> None:
    """Replace `path` by `obj` as JSON: sorted keys, two-space indent, one final newline.

    Raises:
        MensError: a number in `obj` is not finite, or a value has no JSON form.
    """
    write_bytes(path, _dump(obj, str(path), indent=2) + b"\n")


def json_line(obj: object, where: str) -> bytes:
    """Return `obj` as one line of JSON, including the newline.

    Args:
        obj: the object to serialize.
        where: the file it is written to, for error messages.

    Raises:
        MensError: a number in `obj` is not finite, or a value has no JSON form.
    """
    return _dump(obj, where, indent=None) + b"\n"


@contextlib.contextmanager
def directory(path: Path) -> Iterator[Path]:
    """Build a directory next to `path` and rename it into place if the block ends without an error.

    An existing `path` is moved aside, replaced, and deleted. If the block raises, `path` is
    unchanged. A writer killed between the two renames leaves the earlier directory under a
    temporary name, from which `remove_stale` restores it.

    Args:
        path: the target directory; missing parents are created.

    Yields:
        An empty directory to fill.
    """
    temporary = _temporary_of(path)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        _swap(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


@contextlib.contextmanager
def file(path: Path) -> Iterator[Path]:
    """Let a library write a file next to `path`; rename it into place if the block succeeds.

    Args:
        path: the target; missing parents are created.

    Yields:
        The path to write to; it does not exist yet.
    """
    temporary = _temporary_of(path)
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_directory(path.parent)


@contextlib.contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Create a directory under `parent` that is deleted after the block.

    If the process is killed, the directory is deleted when the next one is created there.

    Args:
        parent: the parent directory; missing parents are created.

    Yields:
        The directory, empty.
    """
    _cleared.discard(parent / "scratch")
    temporary = _temporary_of(parent / "scratch")
    temporary.mkdir()
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def remove_stale(parent: Path, name: str | None = None) -> list[Path]:
    """Delete what dead writers left directly under `parent`.

    A directory that a dead writer had moved aside but not yet replaced is moved back.

    Args:
        parent: a directory; if it does not exist, there is nothing to delete.
        name: consider only writers of this target; None considers all.

    Returns:
        The temporary paths that were removed, sorted.
    """
    if not parent.is_dir():
        return []
    gone = []
    for path in sorted(parent.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or not _is_stale(path, match):
            continue
        target = parent / _written(match)
        if name not in (None, target.name):
            continue
        if (match["kind"], match["name"]) == ("old", target.name) and not target.exists():
            path.replace(target)
        else:
            _remove(path)
        gone.append(path)
    return gone


def _dump(obj: object, where: str, *, indent: int | None) -> bytes:
    separators = (",", ": ") if indent else (",", ":")
    try:
        text = json.dumps(
            obj,
            allow_nan=False,
            ensure_ascii=False,
            indent=indent,
            separators=separators,
            sort_keys=True,
        )
    except (TypeError, ValueError) as error:
        raise MensError(
            "a value cannot be written as JSON",
            where=where,
            found=str(error),
            expected="finite numbers, strings, booleans, null, lists and string-keyed objects",
            remedy="record null and the reason instead of a number that is not finite",
        ) from error
    # A lone surrogate (an undecodable argument) is the only thing that UTF-8 cannot encode. Its
    # backslash form is also its JSON escape, so it is read back unchanged.
    return text.encode("utf-8", "backslashreplace")


def _machine() -> str:
    return hashlib.sha256(platform.node().encode("utf-8", "replace")).hexdigest()[:8]


def _temporary_of(path: Path) -> Path:
    """Return a temporary path, after creating its directory and deleting files of dead writers."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path not in _cleared:  # once per target: a directory may hold very many files
        remove_stale(path.parent, path.name)
        _cleared.add(path)
    return _sibling(path, "tmp")


def _sibling(path: Path, kind: str) -> Path:
    token = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.{token}.{kind}")


def _swap(new: Path, path: Path) -> None:
    if not os.path.lexists(path):
        new.replace(path)
    else:
        old = _sibling(path, "old")
        path.replace(old)
        try:
            new.replace(path)
        except BaseException:
            old.replace(path)
            raise
        _remove(old)
    _sync_directory(path.parent)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _written(match: re.Match[str]) -> str:
    """Return the target's name for a temporary name, including one nested in another write."""
    inner = _TEMPORARY.fullmatch(match["name"])
    return match["name"] if inner is None else _written(inner)


def _is_stale(path: Path, match: re.Match[str]) -> bool:
    try:
        modified_s = path.lstat().st_mtime
    except FileNotFoundError:  # its writer finished in the meantime
        return False
    if match["machine"] != _machine():
        return time.time() - modified_s > _FOREIGN_AGE_S
    try:
        started_s = psutil.Process(int(match["pid"])).create_time()
    except psutil.NoSuchProcess:
        return True
    # The process id was reused: in a container, the first process always has id 1.
    return started_s > modified_s + _START_SLACK_S


def _sync_tree(root: Path) -> None:
    for path in sorted(root.rglob("*")):
        if path.is_file() and not path.is_symlink():
            with path.open("rb+") as file:
                os.fsync(file.fileno())
        elif path.is_dir():
            _sync_directory(path)
    _sync_directory(root)


def _sync_directory(path: Path) -> None:
    # Windows has no such call, and some network file systems reject it; the rename itself is
    # still atomic there.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
