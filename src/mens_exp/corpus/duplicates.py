"""Exact and near-duplicates of any number of rows.

Rows that meet in a band of their signatures are candidates; their Jaccard similarity is then
computed from their shingles, so that nothing is dropped on an estimate. Alike rows form a cluster,
through other rows of it too, of which the first one stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mens_exp.corpus.equal_keys import Met, met
from mens_exp.corpus.fingerprints import KEY_WORDS, Fingerprints, Likeness
from mens_exp.corpus.minhash import bands_for
from mens_exp.corpus.shingles import jaccard

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mens_exp.config.corpus_dedupe import DedupeConfig
    from mens_exp.rows.schema import TrainingPair

__all__ = ["MOST_ANCHORS", "Duplicates", "duplicates"]

MOST_ANCHORS: Final = 64  # rows of one bucket that all others of it are compared with
# An estimate further below the threshold is that of an alike pair once in 30,000 times.
_DEVIATIONS: Final = 4
_PAIRS_AT_ONCE: Final = 2**13  # their signatures are 8 MB
_MOST_REMEMBERED: Final = 2**18  # pairs found unlike, some 20 MB; they meet in several bands


@dataclass(kw_only=True, slots=True)
class Duplicates:
    """The rows that stay.

    Attributes:
        kept: ``[rows] int64``, the row that stays for each; its own number where it does.
        exact: ``[rows] bool``, whether a row that goes is an exact duplicate.
        like: what made rows near-duplicates; None where only exact ones were looked for.
        candidates: pairs that met, and were in no common cluster yet.
        compared: pairs whose Jaccard similarity was computed.
        crowded: rows that came after `MOST_ANCHORS` others in a bucket, and were compared with
            these alone; counted once for each band.
    """

    kept: np.ndarray
    exact: np.ndarray
    like: Likeness | None
    candidates: int = 0
    compared: int = 0
    crowded: int = 0
    _prints: Fingerprints

    def similarity(self, row: int) -> float | None:
        """Return a row's Jaccard similarity to the one that stays; None if nobody compared any."""
        if self.like is None:
            return None
        return jaccard(self._prints.shingles(row), self._prints.shingles(int(self.kept[row])))

    def alike(self, one: int, other: int) -> bool:
        """Tell whether two rows are near-duplicates."""
        assert self.like is not None, "only then is there a threshold"
        sets = self._prints.shingles(one), self._prints.shingles(other)
        return jaccard(*sets) >= self.like.threshold

    def facts(self) -> dict[str, Any]:
        """Return counts and settings, as plain JSON."""
        gone = self.kept != np.arange(len(self.kept))
        sizes = np.bincount(self.kept[gone]) if gone.any() else np.zeros(0, np.int64)
        return {
            "exact": int((gone & self.exact).sum()),
            "near": int((gone & ~self.exact).sum()),
            "clusters": int((sizes > 0).sum()),
            "largest_cluster": int(sizes.max(initial=0)) + 1 if len(self.kept) else 0,
            **self._near_facts(),
        }

    def _near_facts(self) -> dict[str, Any]:
        if self.like is None:
            return {}
        bands = self.like.bands
        return {
            "threshold": self.like.threshold,
            "bands": bands.bands,
            "rows_per_band": bands.rows,
            "missed_at_threshold": bands.missed(self.like.threshold),
            "candidates": self.candidates,
            "compared": self.compared,
            "crowded": self.crowded,
        }


def duplicates(pairs: Iterable[TrainingPair], config: DedupeConfig, scratch: Path) -> Duplicates:
    """Find the duplicates among rows.

    Args:
        pairs: the rows; they are gone through once.
        config: what a duplicate is.
        scratch: an empty directory for files of about the size of the rows; it has to stay for
            `Duplicates.similarity`.

    Returns:
        What stays. In memory are some 50 bytes a row, and a fixed amount.

    Raises:
        MissingExtra: datasketch is needed, and is not installed.
    """
    like = _likeness(config)
    prints = Fingerprints(scratch, like)
    prints.make(pairs, config.by, config.processes)
    kept = np.arange(prints.rows)
    for group in met(prints.keys, KEY_WORDS, scratch):
        kept[group.rows] = group.rows[group.starts]
    exact = kept != np.arange(prints.rows)
    found = Duplicates(kept=kept, exact=exact, like=like, _prints=prints)
    if like is not None and prints.rows:
        _join(found, prints, scratch)
    return found


def _likeness(config: DedupeConfig) -> Likeness | None:
    if config.threshold is None:
        return None
    return Likeness(
        threshold=config.threshold,
        shingle_tokens=config.shingle_tokens,
        permutations=config.permutations,
        bands=bands_for(config.threshold, config.permutations),
    )


def _join(found: Duplicates, prints: Fingerprints, scratch: Path) -> None:
    """Join the clusters of alike rows, the exact duplicates left out, into ``found.kept``."""
    parents = np.arange(prints.rows)
    unlike: set[tuple[int, int]] = set()
    for path in prints.bands:
        signatures = prints.signatures()
        for group in met(path, 1, scratch):
            for pair in _candidates(found, _without(group, found.exact), signatures, parents):
                if pair in unlike or _root(parents, pair[0]) == _root(parents, pair[1]):
                    continue
                found.compared += 1
                if found.alike(*pair):
                    _unite(parents, *pair)
                elif len(unlike) < _MOST_REMEMBERED:
                    unlike.add(pair)
        del signatures
    alone = ~found.exact
    found.kept[alone] = _roots(parents, np.flatnonzero(alone))
    found.kept = found.kept[found.kept]


def _candidates(
    found: Duplicates, group: Met, signatures: np.ndarray, parents: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yield the pairs that met, are in no common cluster, and may be alike by their signatures."""
    assert found.like is not None, "somebody asked for near-duplicates"
    threshold = found.like.threshold
    deviation = (threshold * (1 - threshold) / found.like.permutations) ** 0.5
    place = np.arange(len(group.rows)) - group.starts
    found.crowded += int((place > MOST_ANCHORS).sum())
    for one, other in _pairs(group):
        apart = _roots(parents, one) != _roots(parents, other)
        first, second = one[apart], other[apart]
        found.candidates += len(first)
        estimated = (signatures[first] == signatures[second]).mean(axis=1)
        close = estimated >= threshold - _DEVIATIONS * deviation
        yield from zip(first[close].tolist(), second[close].tolist(), strict=True)


def _unite(parents: np.ndarray, one: int, other: int) -> None:
    first, second = _root(parents, one), _root(parents, other)
    parents[max(first, second)] = min(first, second)  # the first row is the root


def _without(group: Met, left_out: np.ndarray) -> Met:
    stays = ~left_out[group.rows]
    _, first, sizes = np.unique(group.starts[stays], return_index=True, return_counts=True)
    return Met(rows=group.rows[stays], starts=np.repeat(first, sizes))


def _pairs(group: Met) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pairs of rows that met, some at a time: each row with the first ones of its group."""
    place = np.arange(len(group.rows)) - group.starts
    for anchor in range(min(MOST_ANCHORS, int(place.max(initial=0)))):
        behind = np.flatnonzero(place > anchor)
        for start in range(0, len(behind), _PAIRS_AT_ONCE):
            some = behind[start : start + _PAIRS_AT_ONCE]
            yield group.rows[group.starts[some] + anchor], group.rows[some]


def _root(parents: np.ndarray, row: int) -> int:
    while parents[row] != row:
        parents[row] = parents[parents[row]]
        row = int(parents[row])
    return row


def _roots(parents: np.ndarray, rows: np.ndarray) -> np.ndarray:
    while True:
        above = parents[rows]
        if np.array_equal(above, rows):
            return rows
        parents[rows] = parents[above]
        rows = above
