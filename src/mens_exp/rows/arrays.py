"""Named arrays in a folder: written piece by piece, memory-mapped, and verified before use.

A folder is whole or absent: it is put in place in one step. What happens to it later is found when
it is opened:

- ``meta.json`` carries its own hash; types, shapes and file sizes must be those it names.
- The arrays' content must have the hash it names. Up to 64 MiB the content is read each time it is
  opened. Beyond, it is read once for each state of the files: size, inode and the times of the last
  change to content and to inode are put down after a verification, and while all of these stay,
  nothing was written to the files (the inode's time cannot be set back). What a disk forgets
  without writing is then not found again until the files are copied or touched.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["meta_of", "opened", "released", "store"]

_META, _VERIFIED = "meta.json", "verified.json"
_ALWAYS_READ: Final = 64 * 2**20  # bytes; measured: 0.05 s to hash on one core
_PIECE: Final = 2**20


def store(
    directory: Path,
    arrays: Mapping[str, Sequence[np.ndarray]],
    meta: Callable[[str], Mapping[str, Any]],
) -> None:
    """Write arrays, each from its pieces, and put the folder in place.

    Args:
        directory: the folder; an earlier one is replaced.
        arrays: pieces of each array, one-dimensional and of one type; at least one piece each. They
            are gone through twice, one at a time.
        meta: returns what else to keep, from the SHA-256 of all arrays' content in their order.
    """
    state = hashlib.sha256()
    with atomic.directory(directory) as temporary:
        about = []
        for name, pieces in arrays.items():
            path = temporary / f"{name}.npy"
            dtype, length = _write(path, pieces, state)
            about.append([name, dtype.str, length, path.stat().st_size])
        content = state.hexdigest()
        record = {**meta(content), "arrays": about, "content_sha256": content}
        atomic.write_json(temporary / _META, {**record, "meta_sha256": digest(record)})


def meta_of(directory: Path) -> dict[str, Any] | None:
    """Return what was kept beside the arrays, or None where it is absent or damaged."""
    try:
        record: dict[str, Any] = json.loads((directory / _META).read_text("utf-8"))
        stored = record.pop("meta_sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if digest(record) == stored else None


def opened(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Map the arrays into memory, read-only, once their content is verified.

    Returns:
        The arrays and what was kept beside them; None where the folder is absent or damaged.
    """
    meta = meta_of(directory)
    if meta is None:
        return None
    try:
        arrays = {name: _mapped(directory / f"{name}.npy") for name, *_ in meta["arrays"]}
        states = {name: _state(directory / f"{name}.npy") for name in arrays}
        found = [[name, one.dtype.str, one.size, states[name][0]] for name, one in arrays.items()]
        if found != meta["arrays"]:
            return None
        if not _is_verified(directory, states):
            if _content(directory, arrays) != meta["content_sha256"]:
                return None
            _put_down(directory, states)
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None
    return arrays, meta


def released(*arrays: np.ndarray) -> None:
    """Let go of what was read of arrays that are mapped; it is read again when asked for."""
    for array in arrays:
        if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            array.base.madvise(mmap.MADV_DONTNEED)


def _write(
    path: Path, pieces: Sequence[np.ndarray], state: hashlib._Hash
) -> tuple[np.dtype[Any], int]:
    """Write an array, a piece in memory at a time, and return its type and length."""
    about = [(piece.dtype, piece.ndim, len(piece)) for piece in pieces]
    dtype, length = about[0][0], sum(one for *_, one in about)
    assert {one[:2] for one in about} == {(dtype, 1)}, "of one array"
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (length,)})
        for piece in pieces:
            data = np.ascontiguousarray(piece).data.cast("B") if len(piece) else b""
            file.write(data)
            state.update(data)
    return dtype, length


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    except ValueError:  # there is no map of nothing
        array: np.ndarray = np.load(path)
        if array.size:
            raise
        return array


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _is_verified(directory: Path, states: Mapping[str, list[int]]) -> bool:
    if sum(state[0] for state in states.values()) <= _ALWAYS_READ:
        return False
    try:
        return bool(json.loads((directory / _VERIFIED).read_text("utf-8")) == states)
    except (OSError, ValueError):
        return False


def _put_down(directory: Path, states: Mapping[str, list[int]]) -> None:
    if sum(state[0] for state in states.values()) > _ALWAYS_READ:
        with contextlib.suppress(OSError):  # somebody else's cache: it is verified each time
            atomic.write_json(directory / _VERIFIED, states)


def _content(directory: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Hash the content through the files: pages of a map would count as this process's memory."""
    state = hashlib.sha256()
    for name, array in arrays.items():
        with (directory / f"{name}.npy").open("rb") as file:
            file.seek(-array.nbytes, 2)
            while piece := file.read(_PIECE):
                state.update(piece)
    return state.hexdigest()
