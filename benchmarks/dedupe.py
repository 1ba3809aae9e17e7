"""Near-duplicates that the step dedupe finds, and distinct rows that it drops.

    python benchmarks/dedupe.py [pairs at each similarity]

Rows are 60 to 300 words drawn from 20,000. Each planted one is an earlier row, cut, continued, or
with a stretch of it written anew, so far that the two have a certain Jaccard similarity, counted
here over Python sets of 5-word tuples. Distinct rows are of two kinds: drawn on their own, and ones
that share a stretch with one another so that pairs have 0.5 to 0.75. A distinct row is dropped
falsely if no other row is as similar to it by the count here. The reference of the time is to look
for exact duplicates alone in the same rows.
"""

from __future__ import annotations

import dataclasses
import random
import resource
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import record

from mens_exp.config.corpus import DedupeConfig
from mens_exp.corpus.steps.dedupe import duplicates
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.corpus.steps.dedupe import Duplicates

QUESTION = "How many near-duplicates does the step dedupe find, and how fast?"
PAIRS = 1000
SIMILARITIES = (0.7, 0.75, 0.79, 0.8, 0.85, 0.9, 0.95)
THRESHOLD = DedupeConfig().threshold or 0.0
SHINGLE = 5
WORDS = 20_000
Planted = list[tuple[float, int, float]]  # target similarity, row, actual similarity


def main() -> None:
    """Plant near-duplicates, search for them, and count."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("pairs", type=int, nargs="?", help=f"default: {PAIRS}")
    given = record.begin(parser)
    pairs = given.pairs or (3 if given.smallest else PAIRS)
    rng = random.Random(0)  # noqa: S311 - no secret
    rows: list[list[str]] = [*families(rng, 5 * pairs)]
    rows += [drawn(rng, rng.randrange(60, 300)) for _ in range(5 * pairs)]
    distinct = len(rows)
    origins = planted_pairs(rng, rows, pairs)
    exact, _ = searched(rows, dataclasses.replace(DedupeConfig(), threshold=None))
    seconds, found = searched(rows, DedupeConfig())
    beside = ("exact duplicates alone", len(rows) / exact)
    figures = [
        record.figure("rows", len(rows) / seconds, "rows/s", record.Better.HIGHER, beside),
        *found_figures(found, origins),
    ]
    dropped = [row for row in range(distinct) if found.kept[row] != row]
    falsely = sum(not _has_like(rows, row, distinct) for row in dropped)
    figures.append(
        record.figure("distinct rows dropped falsely", falsely, "rows", record.Better.LOWER)
    )
    for who, kind in (
        ("this process", resource.RUSAGE_SELF),
        ("a child", resource.RUSAGE_CHILDREN),
    ):
        peak = resource.getrusage(kind).ru_maxrss / 1000
        figures.append(record.figure(f"peak of {who}", peak, "MB", record.Better.LOWER))
    record.finish(QUESTION, figures, given)


def planted_pairs(rng: random.Random, rows: list[list[str]], pairs: int) -> Planted:
    """Add pairs of similar rows, `pairs` for each similarity."""
    origins: Planted = []
    for similarity in SIMILARITIES:
        for _ in range(pairs):
            words = drawn(rng, rng.randrange(60, 300))
            other = planted(rng, words, similarity)
            rows += [words, other]
            origins.append((similarity, len(rows) - 1, counted(words, other)))
    return origins


def searched(rows: list[list[str]], config: DedupeConfig) -> tuple[float, Duplicates]:
    """Search for duplicates; return the seconds and the result."""
    stream = (TrainingPair(prompt="p", response=" ".join(words)) for words in rows)
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        found = duplicates(stream, config, Path(scratch))
        return time.perf_counter() - began, found


def found_figures(found: Duplicates, origins: Planted) -> Iterator[record.Figure]:
    """Yield the fraction of planted rows dropped, per similarity and above the threshold."""
    for similarity in SIMILARITIES:
        mine = [row for wanted, row, _ in origins if wanted == similarity]
        gone = sum(int(found.kept[row]) == row - 1 for row in mine) / len(mine)
        better = record.Better.HIGHER if similarity >= THRESHOLD else record.Better.LOWER
        yield record.figure(f"dropped of those planted at {similarity}", gone, "frac", better)
    alike = [row for _, row, exact in origins if exact >= THRESHOLD]
    hit = sum(int(found.kept[row]) != row for row in alike) / len(alike)
    name = f"dropped of all at {THRESHOLD} or more"
    yield record.figure(name, hit, "frac", record.Better.HIGHER)


def counted(one: list[str], other: list[str]) -> float:
    """Return the exact Jaccard similarity of two texts."""
    first, second = (
        {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
        for words in (one, other)
    )
    return len(first & second) / len(first | second)


def drawn(rng: random.Random, count: int) -> list[str]:
    """Draw random words."""
    return [f"w{rng.randrange(WORDS)}" for _ in range(count)]


def planted(rng: random.Random, words: list[str], similarity: float) -> list[str]:
    """Change a text as far as possible without falling below a similarity."""
    new, place = drawn(rng, 2 * len(words)), rng.randrange(SHINGLE, len(words) // 2)
    edits: dict[str, Callable[[int], list[str]]] = {
        "cut": lambda n: words[: len(words) - n],
        "continued": lambda n: words + new[:n],
        "written anew": lambda n: words[:place] + new[:n] + words[place + n :],
    }
    edit = edits[rng.choice(list(edits))]
    amount = 1
    while amount < len(words) // 2 and counted(words, edit(amount + 1)) >= similarity:
        amount += 1
    return edit(amount)


def families(rng: random.Random, count: int) -> Iterator[list[str]]:
    """Yield texts in pairs that share a half to three quarters of their shingles."""
    while count:
        shared = drawn(rng, rng.randrange(60, 200))
        for _ in range(min(4, count)):
            yield shared + drawn(rng, round(len(shared) * rng.uniform(0.2, 0.45)))
            count -= 1


def _has_like(rows: list[list[str]], row: int, count: int) -> bool:
    return any(
        counted(rows[row], rows[other]) >= THRESHOLD for other in range(count) if other != row
    )


if __name__ == "__main__":
    main()
