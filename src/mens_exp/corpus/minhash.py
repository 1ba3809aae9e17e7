"""MinHash signatures, and the bands by which alike ones meet.

The probability that two signatures agree at a place is the Jaccard similarity of the two sets; that
they agree in all rows of at least one band is ``1 - (1 - j**rows)**bands`` (Leskovec, Rajaraman and
Ullman, Mining of Massive Datasets, 3.4).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from mens_exp.corpus.shingles import mixed
from mens_exp.errors import MissingExtra

if TYPE_CHECKING:
    from datasketch import MinHash

__all__ = ["MOST_MISSED", "Bands", "Signer", "band_keys", "bands_for"]

MOST_MISSED: Final = 0.005  # of the pairs at the threshold, as long as the permutations allow it
_MULTIPLIER: Final = 0x9E3779B97F4A7C15


class Bands(NamedTuple):
    """The bands of a signature: ``bands`` of ``rows`` values each."""

    bands: int
    rows: int

    def missed(self, similarity: float) -> float:
        """Return the probability that two sets of a Jaccard similarity meet in no band."""
        return float((1 - similarity**self.rows) ** self.bands)


def bands_for(threshold: float, permutations: int) -> Bands:
    """Return the bands that bring the fewest unlike rows together and lose few alike ones.

    Args:
        threshold: Jaccard similarity from which rows are near-duplicates.
        permutations: values of a signature.

    Returns:
        As many rows a band as miss at most `MOST_MISSED` of the pairs at the threshold; one
        where even that misses more.
    """
    for rows in range(permutations, 1, -1):
        bands = Bands(bands=permutations // rows, rows=rows)
        if bands.missed(threshold) <= MOST_MISSED:
            return bands
    return Bands(bands=permutations, rows=1)


class Signer:
    """Signs sets of shingles.

    ``datasketch`` draws and applies the permutations. `rensa` signs nine times as fast (measured,
    250 shingles: 5 against 43 microseconds), which is a tenth of what a row takes here; its
    signatures change with its versions, and it is not needed for anything else.
    """

    def __init__(self, permutations: int) -> None:
        """Draw the permutations.

        Args:
            permutations: values of a signature.

        Raises:
            MissingExtra: datasketch is not installed.
        """
        self._empty = _empty(permutations)

    def sign(self, shingles: np.ndarray) -> np.ndarray:
        """Return the signature of a set, ``[permutations] uint32``."""
        made = self._empty.copy()
        made.update_batch(shingles)
        return np.asarray(made.hashvalues, np.uint32)


def band_keys(signatures: np.ndarray, bands: Bands) -> np.ndarray:
    """Hash each band of each signature.

    Args:
        signatures: ``[rows, permutations] uint32``.
        bands: how they are cut; values behind the last band count in none.

    Returns:
        ``[bands, rows] uint64``; equal bands have equal keys, others hardly ever.
    """
    used = signatures[:, : bands.bands * bands.rows].astype(np.uint64)
    keys = np.zeros((len(used), bands.bands), np.uint64)
    with np.errstate(over="ignore"):
        for place in range(bands.rows):
            keys = mixed(keys * np.uint64(_MULTIPLIER) + used[:, place :: bands.rows])
    return np.ascontiguousarray(keys.T)


def _empty(permutations: int) -> MinHash:
    try:
        from datasketch import MinHash
    except ImportError as error:
        raise MissingExtra(
            "datasketch is needed to find near-duplicates",
            where="corpus.dedupe.threshold",
            remedy="run: pip install 'mens-exp[corpus]', or look for exact duplicates alone with "
            "corpus.dedupe.threshold=null",
        ) from error
    return MinHash(num_perm=permutations, hashfunc=_as_it_is)


def _as_it_is(value: int) -> int:
    """Return a shingle: it is a hash already."""
    return value
