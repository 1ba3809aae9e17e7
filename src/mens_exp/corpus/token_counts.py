"""Count the tokens of rows as encoded for training, and the tokens lost to truncation.

Lengths are counted in logarithmic bins, so any distribution takes a few hundred counts.
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

_FINE: Final = 16  # bins per octave for quantiles, whose error is at most 2.2 %
_SHOWN: Final = 2  # bins per octave in the record


@dataclass(kw_only=True, slots=True)
class Lengths:
    """A histogram of non-negative integers.

    Attributes:
        count: number of values.
        total: sum of the values.
        smallest: None without values.
        largest: None without values.
        bins: number of values by bin.
    """

    count: int = 0
    total: int = 0
    smallest: int | None = None
    largest: int | None = None
    bins: dict[int, int] = field(default_factory=dict)

    def add(self, values: Counter[int]) -> None:
        """Add values with their multiplicities."""
        for value, times in values.items():
            self._widen(value)
            self.count += times
            self.total += value * times
            place = _bin(value)
            self.bins[place] = self.bins.get(place, 0) + times

    def join(self, other: Lengths) -> None:
        """Add all values of another histogram."""
        if other.smallest is not None and other.largest is not None:
            self._widen(other.smallest)
            self._widen(other.largest)
        self.count += other.count
        self.total += other.total
        for place, times in other.bins.items():
            self.bins[place] = self.bins.get(place, 0) + times

    def record(self) -> Histogram | None:
        """Return the histogram for the record; None without values."""
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
        """Return the middle of a quantile's bin, clipped to the observed range."""
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
    """Return the bin b of a value in [2**(b/16), 2**((b+1)/16)); -1 for 0."""
    return math.floor(math.log2(value) * _FINE) if value else -1


_SEED: Final = 0  # fixed, so that every run seed draws the same rows of a corpus
_ROWS_AT_ONCE: Final = 1000
_ENDLESS: Final = 2**31


def drawn(pairs: Iterable[TrainingPair], rows: int, most: int | None) -> Iterator[TrainingPair]:
    """Yield a uniform random sample of the rows, in order.

    Args:
        pairs: the rows.
        rows: number of rows.
        most: size of the sample; None yields all rows.
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
    """Encode rows, and estimate the totals of the corpus from which they were drawn.

    Args:
        pairs: all rows, or a uniform sample of them; at least one.
        rows: number of rows in the corpus.
        tokenizer: the tokenizer of the run.
        labelling: the labelling, which includes the sequence length.

    Raises:
        DataError: a row cannot be encoded.
        Problems: several cannot.
    """
    whole, left = Counter[str](), Counter[str]()
    lengths, squares = Lengths(), 0.0
    endless = dataclasses.replace(labelling, seq_len=_ENDLESS)
    for piece in pieces(pairs, _ROWS_AT_ONCE):
        full = encode(piece, tokenizer, endless)
        fits = not len(full) or int(full.lengths.max()) <= labelling.document_tokens
        cut = full if fits else encode(piece, tokenizer, labelling)
        _add(whole, full, len(piece))
        _add(left, cut, len(piece))
        lengths.add(Counter(full.lengths.tolist()))
        squares += float((full.lengths.astype(float) ** 2).sum())
    scale = rows / whole["rows"]

    def total(count: int) -> int:
        return round(count * scale)

    lost, unlearned = (whole[name] - left[name] for name in ("tokens", "supervised"))
    # Each further part of a text that is too long repeats a token of the part before it.
    lost += sum(left[name] - whole[name] for name in ("documents", "dropped"))
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
    """Return the standard error of the token total, for sampling without replacement."""
    documents = counts["documents"]
    if scale == 1 or documents < 2:  # noqa: PLR2004 - no variance of one
        return 0.0
    mean = counts["tokens"] / documents
    variance = max(0.0, (squares - documents * mean**2) / (documents - 1))
    return scale * math.sqrt(documents * variance * (1 - 1 / scale))
