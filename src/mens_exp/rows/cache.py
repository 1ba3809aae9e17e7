"""Encoded documents on disk, keyed by the content of everything that shaped them."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest, sha256_bytes
from mens_exp.rows.encode import ENCODING_VERSION, Encoded, Labelling

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CacheKey", "TokenCounts", "cache_root", "encoded", "peek"]

_ARRAYS = ("ids", "supervised", "offsets")


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
    allow_control_text: bool
    labelling: Labelling

    def directory(self, root: Path) -> Path:
        """Return the folder of this key."""
        name = digest({**asdict(self), "version": ENCODING_VERSION})
        return root / "encoded" / name[:32]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """What a cache says of its documents without opening them."""

    documents: int
    tokens: int
    supervised_tokens: int
    truncated: int
    dropped: int
    unrolled: int
    sha256: str


def peek(root: Path, key: CacheKey) -> TokenCounts | None:
    """Return the counts of a cached encoding, or None when it is not there or not whole."""
    try:
        meta: dict[str, Any] = json.loads((key.directory(root) / "meta.json").read_text("utf-8"))
        return TokenCounts(**meta["counts"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def encoded(root: Path, key: CacheKey, build: Callable[[], Encoded]) -> tuple[Encoded, TokenCounts]:
    """Open the cached documents of a key; build and store them when absent or damaged."""
    directory = key.directory(root)
    found = _open(directory, peek(root, key))
    if found is not None:
        return found
    documents = build()
    counts = _counts(documents)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with atomic.directory(directory) as temporary:
        for name in _ARRAYS:
            np.save(temporary / f"{name}.npy", getattr(documents, name))
        atomic.write_json(temporary / "meta.json", {"key": asdict(key), "counts": asdict(counts)})
    return documents, counts


def _open(directory: Path, counts: TokenCounts | None) -> tuple[Encoded, TokenCounts] | None:
    if counts is None:
        return None
    try:
        arrays = {name: np.load(directory / f"{name}.npy") for name in _ARRAYS}
    except (OSError, ValueError, EOFError):
        return None
    documents = Encoded(
        **arrays, truncated=counts.truncated, dropped=counts.dropped, unrolled=counts.unrolled
    )
    return (documents, counts) if _content(documents) == counts.sha256 else None


def _content(documents: Encoded) -> str:
    return sha256_bytes(b"".join(getattr(documents, name).tobytes() for name in _ARRAYS))


def _counts(documents: Encoded) -> TokenCounts:
    return TokenCounts(
        documents=len(documents),
        tokens=len(documents.ids),
        supervised_tokens=int(documents.supervised.sum()),
        truncated=documents.truncated,
        dropped=documents.dropped,
        unrolled=documents.unrolled,
        sha256=_content(documents),
    )
