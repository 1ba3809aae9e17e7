"""Number of distinct values in a stream, from its smallest hashes (Bar-Yossef et al. 2002)."""

from __future__ import annotations

from typing import Final

import numpy as np

__all__ = ["MOST_EXACT", "Distinct"]

# Counted exactly up to here; beyond, the standard error is one over its root, 0.4 %.
MOST_EXACT: Final = 2**16


class Distinct:
    """Counts distinct 64-bit hashes.

    Attributes:
        total: hashes given, repeated ones too.
    """

    def __init__(self, most: int = MOST_EXACT) -> None:
        """Keep so many of the smallest hashes."""
        self.total = 0
        self._most = most
        self._smallest = np.zeros(0, np.uint64)

    def add(self, hashes: np.ndarray) -> None:
        """Add hashes, spread evenly over 64 bits."""
        self.total += len(hashes)
        self._keep(hashes)

    def join(self, other: Distinct) -> None:
        """Add all hashes of another count."""
        self.total += other.total
        self._keep(other._smallest)

    @property
    def is_exact(self) -> bool:
        """Whether `count` is no estimate."""
        return len(self._smallest) < self._most

    @property
    def count(self) -> int:
        """Distinct hashes: the k-th smallest of n evenly spread ones lies at about k / n."""
        if self.is_exact:
            return len(self._smallest)
        return round((self._most - 1) / (float(self._smallest[-1]) / 2**64))

    def _keep(self, hashes: np.ndarray) -> None:
        if not self.is_exact:
            hashes = hashes[hashes < self._smallest[-1]]
        if len(hashes):
            both = np.concatenate([self._smallest, hashes])
            self._smallest = np.unique(both)[: self._most]
