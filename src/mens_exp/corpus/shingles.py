"""Texts as sets of hashed shingles, and how much of two sets is common.

A token is a run of letters, digits and underscores, a letter of a script that is written without
spaces, or any other single character; white space separates and does not count. A shingle is so
many tokens in a row, and a text shorter than that is one shingle. Shingles are hashed to 32 bits:
in two texts of 250 shingles each, two different ones coincide once in 70,000 pairs of texts.
"""

from __future__ import annotations

import re
from hashlib import blake2b
from typing import Final

import numpy as np

__all__ = ["UNSPACED", "jaccard", "mixed", "runs", "shingles", "token_hashes", "tokens"]

UNSPACED: Final = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
"""Kana and Han, inside a character class: one character is about a word there."""
_TOKEN: Final = re.compile(rf"[^\W{UNSPACED}]+|\S")
_MULTIPLIER: Final = 0x9E3779B97F4A7C15  # the odd number nearest to 2**64 over the golden ratio
_MOST_KNOWN: Final = 2**17  # token hashes kept, some 20 MB
_known: dict[str, int] = {}


def tokens(text: str) -> list[str]:
    """Cut a text into tokens."""
    return _TOKEN.findall(text)


def shingles(text: str, size: int) -> np.ndarray:
    """Return the set of a text's shingles.

    Args:
        text: any text.
        size: tokens of a shingle.

    Returns:
        ``[shingles] uint32``, ascending, none twice, at least one; the same on every machine.
    """
    hashes = token_hashes(text)
    found = runs(hashes, min(size, len(hashes)) or 1)
    if not len(found):  # a text without any token
        found = np.zeros(1, np.uint64)
    return np.unique((found >> np.uint64(32)).astype(np.uint32))


def token_hashes(text: str) -> np.ndarray:
    """Return the 64-bit hash of each token of a text, in order."""
    if len(_known) > _MOST_KNOWN:
        _known.clear()
    hashes = []
    for token in tokens(text):
        value = _known.get(token)
        if value is None:
            raw = token.encode("utf-8", "surrogatepass")
            value = int.from_bytes(blake2b(raw, digest_size=8).digest(), "little")
            _known[token] = value
        hashes.append(value)
    return np.array(hashes, np.uint64)


def runs(hashes: np.ndarray, size: int) -> np.ndarray:
    """Return the 64-bit hash of each run of so many tokens, in order.

    Args:
        hashes: those of the tokens.
        size: tokens of a run, at least 1; runs of two sizes have nothing in common.
    """
    found = np.full(max(len(hashes) - size + 1, 0), size, np.uint64)
    with np.errstate(over="ignore"):
        for place in range(size):
            found *= np.uint64(_MULTIPLIER)
            found += hashes[place : place + len(found)]
    return mixed(found)


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Return the share of all shingles of two sets that both have.

    Args:
        one: as `shingles` returns it.
        other: as `shingles` returns it.
    """
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)


def mixed(values: np.ndarray) -> np.ndarray:
    """Spread the bits of 64-bit values (the finalizer of MurmurHash3, a bijection)."""
    half = np.uint64(33)
    with np.errstate(over="ignore"):
        values = (values ^ (values >> half)) * np.uint64(0xFF51AFD7ED558CCD)
        values = (values ^ (values >> half)) * np.uint64(0xC4CEB9FE1A85EC53)
    spread: np.ndarray = values ^ (values >> half)
    return spread
