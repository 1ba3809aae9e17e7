"""Files and directories that are whole or absent, whatever kills the writer.

Everything is written beside its target under a temporary name, flushed to the disk, and
moved into place in one step. A temporary name carries its writer's machine and process, so
that what a dead writer left behind can be told from what a live one is still writing. The next
writer of the same target clears away what dead ones left of it.
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

_FOREIGN_AGE_S = 24 * 3600  # another machine's processes cannot be asked; no write lasts a day
_cleared: set[Path] = set()  # targets whose dead writers this process has cleared away
_START_SLACK_S = 1.0  # file systems and process tables round their clocks differently
_TEMPORARY = re.compile(
    r"\.(?P<name>.+)\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\.(?P<kind>tmp|old)"
)


def write_bytes(path: Path, data: bytes) -> None:
    """Replace `path` by `data`; a reader sees the old file or the new one, never a part.

    Args:
        path: the target; missing parent directories are made.
        data: the whole content.

    Raises:
        OSError: the disk refused; the target is then as it was.
    """
    with stream(path) as file:
        file.write(data)


@contextlib.contextmanager
def stream(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside `path` and put it in place when the block ends well.

    Args:
        path: the target; missing parent directories are made.

    Yields:
        The open file, empty.

    Raises:
        OSError: the disk refused; the target is then as it was.
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
    """Replace `path` by `text` in UTF-8, newlines as given."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, obj: object) -> None:
    """Replace `path` by `obj` as JSON: sorted keys, two spaces, one final newline.

    Raises:
        MensError: a number in `obj` is not finite, or a value has no JSON form.
    """
    write_bytes(path, _dump(obj, str(path), indent=2) + b"\n")


def json_line(obj: object, where: str) -> bytes:
    """Return `obj` as one line of JSON, its newline included.

    Args:
        obj: what to write.
        where: the file it is for, for the error.

    Raises:
        MensError: a number in `obj` is not finite, or a value has no JSON form.
    """
    return _dump(obj, where, indent=None) + b"\n"


@contextlib.contextmanager
def directory(path: Path) -> Iterator[Path]:
    """Build a directory beside `path` and put it in place when the block ends well.

    An earlier `path` is moved aside, replaced and removed. When the block raises, it stays
    as it was. A writer killed between the two moves leaves the earlier directory under a
    temporary name, from which `remove_stale` restores it.

    Args:
        path: the target directory; missing parents are made.

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
    """Let a library write a file beside `path`, and put it in place when the block ends well.

    Args:
        path: the target; missing parents are made.

    Yields:
        Where to write it; nothing is there yet.
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
    """Make a directory under `parent` that is gone after the block.

    One whose process was killed goes when the next one is made there.

    Args:
        parent: where; missing parents are made.

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
    """Clear what dead writers left directly under `parent`.

    A directory that a dead writer had moved aside and not yet replaced is moved back.

    Args:
        parent: a directory; one that does not exist holds nothing stale.
        name: of the target whose writers are meant; by default those of any.

    Returns:
        The temporary paths that are gone, sorted.
    """
    if not parent.is_dir():
        return []
    gone = []
    for path in sorted(parent.iterdir()):
        match = _TEMPORARY.fullmatch(path.name)
        if match is None or name not in (None, match["name"]) or not _is_stale(path, match):
            continue
        target = parent / match["name"]
        if match["kind"] == "old" and not target.exists():
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
    # A lone surrogate (an undecodable argument) is the one thing UTF-8 cannot hold; its
    # backslash form is also its JSON escape, so it reads back as it was.
    return text.encode("utf-8", "backslashreplace")


def _machine() -> str:
    return hashlib.sha256(platform.node().encode("utf-8", "replace")).hexdigest()[:8]


def _temporary_of(path: Path) -> Path:
    """Return a name to write under; the directory is there, and dead writers' files are not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path not in _cleared:  # once for each target: a directory may hold very many
        remove_stale(path.parent, path.name)
        _cleared.add(path)
    return _beside(path, "tmp")


def _beside(path: Path, kind: str) -> Path:
    token = f"{_machine()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.{token}.{kind}")


def _swap(new: Path, path: Path) -> None:
    if not os.path.lexists(path):
        new.replace(path)
    else:
        old = _beside(path, "old")
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


def _is_stale(path: Path, match: re.Match[str]) -> bool:
    try:
        modified_s = path.lstat().st_mtime
    except FileNotFoundError:  # its writer finished while we looked
        return False
    if match["machine"] != _machine():
        return time.time() - modified_s > _FOREIGN_AGE_S
    try:
        started_s = psutil.Process(int(match["pid"])).create_time()
    except psutil.NoSuchProcess:
        return True
    # The number was given out again: containers start every first process as 1.
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
    # Windows has no such call and some network file systems refuse it; the rename itself
    # is still atomic there.
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
