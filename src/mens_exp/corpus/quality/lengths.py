"""Lengths in bins that grow with them: a distribution of any size in a few hundred counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.corpus_report import Histogram

if TYPE_CHECKING:
    from collections import Counter

__all__ = ["Lengths"]

_FINE: Final = 16  # bins an octave for quantiles, which are off by 2.2 % at most
_SHOWN: Final = 2  # of them in the record


@dataclass(kw_only=True, slots=True)
class Lengths:
    """Counts of whole numbers from 0 on.

    Attributes:
        count: how many.
        total: their sum.
        smallest: None without any.
        largest: None without any.
        bins: numbers by the bin that they are in.
    """

    count: int = 0
    total: int = 0
    smallest: int | None = None
    largest: int | None = None
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, values: Counter[int]) -> None:
        """Add numbers, each as often as it is counted."""
        for value, times in values.items():
            self._widen(value)
            self.count += times
            self.total += value * times
            place = _bin(value)
            self.bins[place] = self.bins.get(place, 0) + times

    def join(self, other: Lengths) -> None:
        """Add all numbers of another distribution."""
        if other.smallest is not None and other.largest is not None:
            self._widen(other.smallest)
            self._widen(other.largest)
        self.count += other.count
        self.total += other.total
        for place, times in other.bins.items():
            self.bins[place] = self.bins.get(place, 0) + times

    def record(self) -> Histogram | None:
        """Return the distribution as a record has it; None without any number."""
        if self.smallest is None or self.largest is None:
            return None
        coarse: dict[int, int] = {}
        for place, times in self.bins.items():
            where = -1 if place < 0 else place // (_FINE // _SHOWN)
            coarse[where] = coarse.get(where, 0) + times
        places = range(min(coarse), max(coarse) + 1)
        return Histogram(
            count=self.count,
            mean=self.total / self.count,
            smallest=self.smallest,
            largest=self.largest,
            p50=self._quantile(0.5),
            p90=self._quantile(0.9),
            p99=self._quantile(0.99),
            edges=[0 if place < 0 else 2 ** (place / _SHOWN) for place in [*places, places.stop]],
            counts=[coarse.get(place, 0) for place in places],
        )

    def _widen(self, value: int) -> None:
        self.smallest = value if self.smallest is None else min(value, self.smallest)
        self.largest = value if self.largest is None else max(value, self.largest)

    def _quantile(self, share: float) -> float:
        """Return the middle of the bin that holds a quantile, within what there is."""
        assert self.smallest is not None, "somebody counted"
        assert self.largest is not None, "as above"
        rank, seen = math.ceil(share * self.count), 0
        for place in sorted(self.bins):
            seen += self.bins[place]
            if seen >= rank:
                middle = 0.0 if place < 0 else 2 ** ((place + 0.5) / _FINE)
                return float(min(max(middle, self.smallest), self.largest))
        return float(self.largest)


def _bin(value: int) -> int:
    """Return the bin of a number: [2**(b/16), 2**((b+1)/16)); of 0 it is -1."""
    return math.floor(math.log2(value) * _FINE) if value else -1
