"""Rows with equal keys, found on disk: what is in memory does not grow with the rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["MOST_AT_ONCE", "Met", "met"]

MOST_AT_ONCE: Final = 2_000_000  # keys sorted at a time; 16 bytes and their order make 50 MB
_READ: Final = 2**18


class Met(NamedTuple):
    """Rows that share their key with others, groups one after the other, each in order.

    Attributes:
        rows: ``[n] int64``, row numbers.
        starts: ``[n] int64``, where in ``rows`` the group of each begins.
    """

    rows: np.ndarray
    starts: np.ndarray


def met(path: Path, words: int, scratch: Path, most: int = MOST_AT_ONCE) -> Iterator[Met]:
    """Yield the rows that share a key.

    Args:
        path: the keys in the order of the rows, each so many little-endian 64-bit words, the
            first of them evenly spread.
        words: of a key.
        scratch: a directory for parts that are sorted on their own.
        most: keys to sort at a time.

    Yields:
        Groups of at least two, a part of them at a time, in the order of the keys.
    """
    count = path.stat().st_size // (8 * words)
    parts = max(1, -(-count // most))
    if parts == 1:
        keys = np.fromfile(path, "<u8").reshape(-1, words)
        yield _equal(keys, np.arange(len(keys)))
        return
    names = [scratch / f"{path.name}.{part}" for part in range(parts)]
    _part(path, words, names)
    for name in names:
        records = np.fromfile(name, "<u8").reshape(-1, words + 1)
        name.unlink()
        yield _equal(records[:, :-1], records[:, -1].astype(np.int64))


def _part(path: Path, words: int, names: list[Path]) -> None:
    """Write each key and its row into the part of its range."""
    files = [name.open("wb") for name in names]
    try:
        with path.open("rb") as file:
            first = 0
            while True:
                read = np.fromfile(file, "<u8", _READ * words)
                if not len(read):
                    return
                keys = read.reshape(-1, words)
                rows = np.arange(first, first + len(keys), dtype=np.uint64)
                records = np.column_stack([keys, rows])
                # A range of the upper half's values each, as even as the keys are.
                part = ((keys[:, 0] >> np.uint64(32)) * np.uint64(len(files))) >> np.uint64(32)
                for number, target in enumerate(files):
                    records[part == number].tofile(target)
                first += len(keys)
    finally:
        for target in files:
            target.close()


def _equal(keys: np.ndarray, rows: np.ndarray) -> Met:
    order = np.lexsort(keys.T)  # stable: equal keys stay in the order of their rows
    keys, rows = keys[order], rows[order]
    begins = np.ones(len(rows), bool)
    begins[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    first = np.flatnonzero(begins)
    sizes = np.diff(first, append=len(rows))
    wanted = np.repeat(sizes > 1, sizes)
    sizes = sizes[sizes > 1]
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return Met(rows=rows[wanted], starts=starts)
