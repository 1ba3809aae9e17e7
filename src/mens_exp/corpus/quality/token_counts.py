"""Token counts of rows as encoded for training, and the tokens that truncation takes."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import TYPE_CHECKING, Final

import numpy as np

from mens_exp.artifacts.corpus_report import Tokens
from mens_exp.corpus.quality.lengths import Lengths
from mens_exp.corpus.side_by_side import pieces
from mens_exp.rows.encode import encode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.rows.encode import Encoded, Labelling
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["drawn", "token_counts"]

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
