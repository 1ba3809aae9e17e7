"""Count the tokens that rows have as encoded for training, and what truncation takes.

Lengths go into bins that grow with them: a distribution of any size in a few hundred counts.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from mens_exp.artifacts.corpus_record import Histogram, Tokens
from mens_exp.corpus.large_files import pieces
from mens_exp.rows.encode import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.rows.documents import Encoded, Labelling
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.load import Tokenizer

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


_SEED: Final = 0  # the same rows of the same corpus, whatever the run's seed
_ROWS_AT_ONCE: Final = 1000
_ENDLESS: Final = 2**31


def drawn(pairs: Iterable[TrainingPair], rows: int, most: int | None) -> Iterator[TrainingPair]:
    """Yield so many of the rows, in their order, each set of rows equally likely.

    Args:
        pairs: the rows.
        rows: how many they are.
        most: how many to yield; None yields all.
    """
    if most is None or rows <= most:
        yield from pairs
        return
    chosen = np.random.Generator(np.random.Philox(_SEED)).choice(rows, most, replace=False)
    wanted = np.zeros(rows, bool)
    wanted[chosen] = True
    yield from (pair for row, pair in enumerate(pairs) if wanted[row])


def token_counts(
    pairs: Iterable[TrainingPair], rows: int, tokenizer: Tokenizer, labelling: Labelling
) -> Tokens:
    """Encode rows, and tell what all the rows that they stand for come to.

    Args:
        pairs: all rows, or some of them drawn evenly; at least one.
        rows: how many rows there are in all.
        tokenizer: of the run.
        labelling: what is learned, and how long a document may be.

    Raises:
        DataError: a row cannot be encoded.
        Problems: several cannot.
    """
    whole, left = Counter[str](), Counter[str]()
    lengths, squares = Lengths(), 0.0
    endless = dataclasses.replace(labelling, seq_len=_ENDLESS)
    for piece in pieces(pairs, _ROWS_AT_ONCE):
        full = encode(piece, tokenizer, endless)
        fits = not len(full) or int(full.lengths.max()) <= labelling.seq_len
        cut = full if fits else encode(piece, tokenizer, labelling)
        _add(whole, full, len(piece))
        _add(left, cut, len(piece))
        lengths.add(Counter(full.lengths.tolist()))
        squares += float((full.lengths.astype(float) ** 2).sum())
    scale = rows / whole["rows"]

    def total(count: int) -> int:
        return round(count * scale)

    lost, unlearned = (whole[name] - left[name] for name in ("tokens", "supervised"))
    histogram = lengths.record()
    assert histogram is not None, "a row has tokens"
    return Tokens(
        encoded_rows=whole["rows"],
        exact=whole["rows"] == rows,
        tokenizer_sha256=tokenizer.sha256,
        template_sha256=tokenizer.template_sha256,
        objective=labelling.objective,
        seq_len=labelling.seq_len,
        truncation=labelling.truncation,
        documents=total(whole["documents"]),
        tokens=total(whole["tokens"]),
        tokens_se=_standard_error(whole, squares, scale),
        supervised_tokens=total(whole["supervised"]),
        supervised_share=whole["supervised"] / whole["tokens"],
        truncated_documents=total(left["truncated"]),
        dropped_documents=total(left["dropped"]),
        lost_tokens=total(lost),
        lost_share=lost / whole["tokens"],
        lost_supervised_tokens=total(unlearned),
        lost_supervised_share=unlearned / whole["supervised"],
        lengths=histogram,
    )


def _add(counts: Counter[str], made: Encoded, rows: int) -> None:
    counts.update(
        rows=rows,
        documents=len(made),
        tokens=len(made.ids),
        supervised=int(made.supervised.sum()),
        truncated=made.truncated,
        dropped=made.dropped,
    )


def _standard_error(counts: Counter[str], squares: float, scale: float) -> float:
    """Return the standard error of all tokens: of a sum of documents drawn without replacement."""
    documents = counts["documents"]
    if scale == 1 or documents < 2:  # noqa: PLR2004 - one has no spread
        return 0.0
    mean = counts["tokens"] / documents
    variance = max(0.0, (squares - documents * mean**2) / (documents - 1))
    return scale * math.sqrt(documents * variance * (1 - 1 / scale))
