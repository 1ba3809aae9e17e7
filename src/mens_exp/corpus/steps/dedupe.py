"""Steps that drop rows: dedupe, exact and near-duplicates, and decontaminate, benchmark overlap.

Rows whose signatures share a band are candidates. Their Jaccard similarity is then computed from
their shingles, so that no row is dropped because of an estimate. Rows that are similar, directly or
through other rows, form a cluster, of which the first row is kept. Rows with equal keys are found
on disk, to limit memory use. Every dropped row is listed with its match.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from mens_exp.artifacts.atomic import json_line
from mens_exp.corpus.benchmarks import OverlapIndex, benchmark_texts, searched_texts, texts_of
from mens_exp.corpus.minhash import KEY_WORDS, Fingerprints, Likeness, bands_for, jaccard
from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_rows, read_sides
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mens_exp.config.corpus import DecontaminateConfig, DedupeConfig
    from mens_exp.rows.schema import TrainingPair

MOST_AT_ONCE: Final = 2_000_000  # keys per in-memory sort: 50 MB with 16 bytes each and their order
_READ: Final = 2**18


class EqualKeys(NamedTuple):
    """Concatenated groups of rows with equal keys, each group in row order.

    Attributes:
        rows: ``[n] int64``, row numbers.
        starts: ``[n] int64``, index in ``rows`` at which each row's group begins.
    """

    rows: np.ndarray
    starts: np.ndarray


def equal_keys(
    path: Path, words: int, scratch: Path, most: int = MOST_AT_ONCE
) -> Iterator[EqualKeys]:
    """Yield the rows that share a key.

    Args:
        path: the keys in row order, each of `words` little-endian 64-bit words, the first of
            which is uniform.
        words: words per key.
        scratch: a directory for parts that are sorted separately.
        most: maximum keys per in-memory sort.

    Yields:
        Groups of at least two rows, one part at a time, in key order.
    """
    count = path.stat().st_size // (8 * words)
    parts = max(1, -(-count // most))
    if parts == 1:
        keys = np.fromfile(path, "<u8").reshape(-1, words)
        yield _equal(keys, np.arange(len(keys)))
        return
    names = [scratch / f"{path.name}.{part}" for part in range(parts)]
    _part(path, words, names)
    for name in names:
        records = np.fromfile(name, "<u8").reshape(-1, words + 1)
        name.unlink()
        yield _equal(records[:, :-1], records[:, -1].astype(np.int64))


def _part(path: Path, words: int, names: list[Path]) -> None:
    """Write each key with its row number to the part for its range."""
    files = [name.open("wb") for name in names]
    try:
        with path.open("rb") as file:
            first = 0
            while True:
                read = np.fromfile(file, "<u8", _READ * words)
                if not len(read):
                    return
                keys = read.reshape(-1, words)
                rows = np.arange(first, first + len(keys), dtype=np.uint64)
                records = np.column_stack([keys, rows])
                # Equal ranges of the upper 32 bits, as uniform as the keys.
                part = ((keys[:, 0] >> np.uint64(32)) * np.uint64(len(files))) >> np.uint64(32)
                for number, target in enumerate(files):
                    records[part == number].tofile(target)
                first += len(keys)
    finally:
        for target in files:
            target.close()


def _equal(keys: np.ndarray, rows: np.ndarray) -> EqualKeys:
    order = np.lexsort(keys.T)  # stable: equal keys stay in row order
    keys, rows = keys[order], rows[order]
    begins = np.ones(len(rows), bool)
    begins[1:] = (keys[1:] != keys[:-1]).any(axis=1)
    first = np.flatnonzero(begins)
    sizes = np.diff(first, append=len(rows))
    wanted = np.repeat(sizes > 1, sizes)
    sizes = sizes[sizes > 1]
    starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
    return EqualKeys(rows=rows[wanted], starts=starts)


MOST_ANCHORS: Final = 64  # rows of a bucket that all its other rows are compared with
# A similar pair's estimate is further below the threshold once in 30,000 times.
_DEVIATIONS: Final = 4
_PAIRS_AT_ONCE: Final = 2**13  # their signatures are 8 MB
_MOST_REMEMBERED: Final = 2**18  # dissimilar pairs, some 20 MB; they can meet in several bands


@dataclass(kw_only=True, slots=True)
class Duplicates:
    """The result of deduplication.

    Attributes:
        kept: ``[rows] int64``, the kept row for each row; a kept row has its own number.
        exact: ``[rows] bool``, whether a dropped row is an exact duplicate.
        like: the criterion for near-duplicates; None if only exact ones were searched.
        candidates: pairs that share a bucket and were not yet in the same cluster.
        compared: pairs whose Jaccard similarity was computed.
        crowded: rows after the first `MOST_ANCHORS` of a bucket, which were compared only with
            those; counted once per band.
    """

    kept: np.ndarray
    exact: np.ndarray
    like: Likeness | None
    candidates: int = 0
    compared: int = 0
    crowded: int = 0
    _prints: Fingerprints

    def similarity(self, row: int) -> float | None:
        """Return a row's Jaccard similarity to its kept row; None after an exact search only."""
        if self.like is None:
            return None
        return jaccard(self._prints.shingles(row), self._prints.shingles(int(self.kept[row])))

    def alike(self, one: int, other: int) -> bool:
        """Return whether two rows are near-duplicates."""
        assert self.like is not None, "only then is there a threshold"
        sets = self._prints.shingles(one), self._prints.shingles(other)
        return jaccard(*sets) >= self.like.threshold

    def facts(self) -> dict[str, Any]:
        """Return counts and settings as plain JSON."""
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
        pairs: the rows, which are read once.
        config: the criteria for duplicates.
        scratch: an empty directory for files of about the size of the rows, which
            `Duplicates.similarity` also needs.

    Returns:
        The kept rows. Memory use is some 50 bytes per row plus a constant.

    Raises:
        MissingExtra: datasketch is required and not installed.
    """
    like = _likeness(config)
    prints = Fingerprints(scratch, like)
    prints.make(pairs, config.by, config.processes)
    kept = np.arange(prints.rows)
    for group in equal_keys(prints.keys, KEY_WORDS, scratch):
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
    """Merge clusters of similar rows into ``found.kept``, without exact duplicates."""
    parents = np.arange(prints.rows)
    unlike: set[tuple[int, int]] = set()
    for path in prints.bands:
        signatures = prints.signatures()
        for group in equal_keys(path, 1, scratch):
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
    found: Duplicates, group: EqualKeys, signatures: np.ndarray, parents: np.ndarray
) -> Iterator[tuple[int, int]]:
    """Yield candidate pairs that are in different clusters and have similar signatures."""
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


def _without(group: EqualKeys, left_out: np.ndarray) -> EqualKeys:
    stays = ~left_out[group.rows]
    _, first, sizes = np.unique(group.starts[stays], return_index=True, return_counts=True)
    return EqualKeys(rows=group.rows[stays], starts=np.repeat(first, sizes))


def _pairs(group: EqualKeys) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of candidate pairs: each row with the first rows of its group."""
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


DUPLICATES = "duplicates.jsonl"


def dedupe(step: StepInput) -> StepResult:
    """Keep the first row of each cluster of duplicates.

    A line of ``duplicates.jsonl`` has the id and location of a dropped row, the id of the kept one,
    their Jaccard similarity, and whether they are exact duplicates. After a split, the sides are
    one corpus with train first, so that validation and held-out rows do not duplicate training
    rows.

    Args:
        step: the input and output of the step.

    Raises:
        DataError: a file cannot be read, or a row in it is invalid.
        MissingExtra: datasketch is required and not installed.
    """
    config = step.config.dedupe
    found = duplicates(read_rows(step.files), config, step.scratch)
    ids = np.zeros(len(found.kept), np.uint64)
    chained = 0
    with RowWriter(step.directory) as writer, (step.directory / DUPLICATES).open("xb") as gone:
        for row, (side, pair) in enumerate(read_sides(step.files)):
            ids[row] = int(pair.id, 16)
            first = int(found.kept[row])
            if first == row:
                writer.write(pair, side)
                continue
            similarity, exact = found.similarity(row), bool(found.exact[row])
            if config.threshold is not None and similarity is not None and not exact:
                chained += similarity < config.threshold
            line = {
                "row": pair.id,
                "place": pair.place,
                "kept": f"{int(ids[first]):016x}",
                "jaccard": similarity,
                "exact": exact,
            }
            gone.write(json_line(line, DUPLICATES))
    facts = found.facts()
    if config.threshold is not None:
        facts["chained"] = int(chained)
    return StepResult(
        rows_in=len(found.kept),
        rows_out=writer.total,
        dropped={"exact duplicate": facts["exact"], "near-duplicate": facts["near"]},
        facts=facts,
    )


CONTAMINATED: Final = "contaminated.jsonl"
_HELDOUT: Final = "heldout"


def decontaminate(step: StepInput) -> StepResult:
    """Drop the rows that share n-grams with a benchmark item; held-out rows are kept.

    `contaminated.jsonl` lists each dropped row with the item of the largest overlap.

    Raises:
        DataError: a file cannot be read, a row in it is invalid, or a benchmark has no items.
        MissingExtra: a benchmark's package is not installed.
    """
    config = step.config.decontaminate
    items: Counter[str] = Counter()
    index = OverlapIndex(_items(step, config, items), config.ngram_words)
    rows = 0
    dropped: Counter[str] = Counter()
    found: set[str] = set()
    with RowWriter(step.directory) as writer, (step.directory / CONTAMINATED).open("xb") as gone:
        for side, pair in read_sides(step.files):
            rows += 1
            overlaps = [] if side is Side.HELDOUT else index.overlaps(searched_texts(pair))
            found.update(one.item for one in overlaps)
            if not overlaps or overlaps[0].share < config.min_share_frac:
                writer.write(pair, side)
                continue
            worst = overlaps[0]
            dropped[f"in {worst.item.partition(' ')[0]}"] += 1
            line = {
                "row": pair.id,
                "place": pair.place,
                "item": worst.item,
                "shared_ngrams": worst.shared,
                "share": round(worst.share, 6),
                "items": len(overlaps),
            }
            gone.write(json_line(line, CONTAMINATED))
        total = writer.total
    return StepResult(
        rows_in=rows,
        rows_out=total,
        dropped=dict(sorted(dropped.items())),
        facts={"items": dict(sorted(items.items())), "items_found": len(found)},
    )


def _items(
    step: StepInput, config: DecontaminateConfig, items: Counter[str]
) -> Iterator[tuple[str, str]]:
    """Yield the items of all benchmarks, with the benchmark's name in the id, and count them."""
    for name in config.against:
        texts = (
            _held_out(step)
            if name == _HELDOUT
            else benchmark_texts(name, synthetic_items=config.synthetic_items)
        )
        for item, text in texts:
            items[name] += 1
            yield f"{name} {item}", text
        if not items[name]:
            raise DataError(
                "a benchmark has no items",
                where="corpus.decontaminate.against",
                found=name,
                expected="held-out rows, after the step split"
                if name == _HELDOUT
                else "at least one item",
                remedy=f"take {name} out of the list, or split before",
            )


def _held_out(step: StepInput) -> Iterator[tuple[str, str]]:
    for side, pair in read_sides(step.files):
        if side is Side.HELDOUT:
            yield pair.id, "\n".join(texts_of(pair))
