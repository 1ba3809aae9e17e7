"""Encoded documents on disk, keyed by the content of everything that shaped them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.wait_lock import waiting
from mens_exp.errors import SetupError
from mens_exp.rows import arrays
from mens_exp.rows.encode import ENCODING_VERSION, Encoded, Labelling

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CacheKey", "TokenCounts", "cache_root", "encoded", "encoded_parts", "peek"]

_ARRAYS = ("ids", "supervised", "offsets")
_OF_PARTS = ("truncated", "dropped", "unrolled", "short")
_COUNTS = ("documents", "tokens", "supervised_tokens", *_OF_PARTS)


def cache_root() -> Path:
    """Return the cache folder: MENS_EXP_CACHE, else XDG_CACHE_HOME/mens_exp, else ~/.cache."""
    named = os.environ.get("MENS_EXP_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mens_exp"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheKey:
    """Everything the ids and masks depend on."""

    rows_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    special_tokens_sha256: str
    date: str | None
    allow_control_text: bool
    labelling: Labelling

    def directory(self, root: Path) -> Path:
        """Return the folder of this key."""
        name = digest({**asdict(self), "version": ENCODING_VERSION})
        return root / "encoded" / name[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """A cache's counts of its documents, known without opening them."""

    documents: int
    tokens: int
    supervised_tokens: int
    truncated: int
    dropped: int
    unrolled: int
    short: int
    sha256: str


def peek(root: Path, key: CacheKey) -> TokenCounts | None:
    """Return the counts of a cached encoding, or None when it is not there or not whole."""
    meta = arrays.meta_of(key.directory(root))
    return None if meta is None else _counts_in(meta)


def encoded(root: Path, key: CacheKey, build: Callable[[], Encoded]) -> tuple[Encoded, TokenCounts]:
    """Open the cached documents of a key; build and store them when absent or damaged."""
    return encoded_parts(root, key, lambda _: [build()])


def encoded_parts(
    root: Path, key: CacheKey, build: Callable[[Path], Sequence[Encoded]]
) -> tuple[Encoded, TokenCounts]:
    """Open the cached documents of a key, memory-mapped; build them when absent or damaged.

    One process builds and the others wait for what it stores.

    Args:
        root: the cache folder.
        key: what the documents depend on.
        build: returns the documents in parts; it may keep finished parts in the folder it is
            given, which is cleared when all of them are stored.

    Raises:
        SetupError: what was stored cannot be read back.
    """
    directory = key.directory(root)
    found = _open(directory)
    if found is not None:
        return found
    with waiting(root / f".{directory.name}.lock"):
        atomic.remove_stale(directory.parent)  # nobody else writes there now
        found = _open(directory)  # somebody may have built it meanwhile
        if found is None:
            kept = directory.with_suffix(".parts")
            _store(directory, key, build(kept))
            shutil.rmtree(kept, ignore_errors=True)
            found = _open(directory)
    if found is None:
        raise SetupError(
            "encoded documents cannot be read back as they were written",
            where=str(directory),
            remedy="check the disk, or give another one with MENS_EXP_CACHE=<folder>",
        )
    return found


def _open(directory: Path) -> tuple[Encoded, TokenCounts] | None:
    found = arrays.opened(directory)
    counts = None if found is None else _counts_in(found[1])
    if found is None or counts is None:
        return None
    documents = Encoded(
        **{name: found[0][name] for name in _ARRAYS},
        truncated=counts.truncated,
        dropped=counts.dropped,
        unrolled=counts.unrolled,
        short=counts.short,
    )
    return documents, counts


def _counts_in(meta: dict[str, Any]) -> TokenCounts | None:
    try:
        return TokenCounts(**meta["counts"])
    except (KeyError, TypeError):
        return None


def _store(directory: Path, key: CacheKey, parts: Sequence[Encoded]) -> None:
    offsets, counts = _summed(parts)
    pieces = {
        "ids": _Pieces(parts, "ids"),
        "supervised": _Pieces(parts, "supervised"),
        "offsets": offsets,
    }
    arrays.store(
        directory,
        pieces,
        lambda sha256: {"key": asdict(key), "counts": asdict(replace(counts, sha256=sha256))},
    )


class _Pieces(Sequence[np.ndarray]):
    """One array of each part; the part may be opened for it."""

    def __init__(self, parts: Sequence[Encoded], name: str) -> None:
        self._parts, self._name = parts, name

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> _Pieces: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | _Pieces:
        if isinstance(index, slice):
            return _Pieces(self._parts[index], self._name)
        array: np.ndarray = getattr(self._parts[index], self._name)
        return array


def _summed(parts: Sequence[Encoded]) -> tuple[list[np.ndarray], TokenCounts]:
    """Return where documents begin in all parts together, a piece for each, and their counts."""
    offsets = [np.zeros(1, np.int64)]
    counts = dict.fromkeys(_COUNTS, 0)
    for part in parts:
        offsets.append(part.offsets[1:] + counts["tokens"])
        counts["documents"] += len(part)
        counts["tokens"] += len(part.ids)
        counts["supervised_tokens"] += int(part.supervised.sum())
        for name in _OF_PARTS:
            counts[name] += getattr(part, name)
    return offsets, TokenCounts(**counts, sha256="")
