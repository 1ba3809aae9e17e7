"""How many planted near-duplicates the step dedupe finds, and how many distinct rows it drops.

    python benchmarks/dedupe.py [pairs at each similarity, 1000 by default]

Rows are 60 to 300 words drawn from 20,000. Each planted one is an earlier row, cut, continued, or
with a stretch of it written anew, so far that the two have a certain Jaccard similarity, counted
here over Python sets of 5-word tuples. Distinct rows are of two kinds: drawn on their own, and ones
that share a stretch with one another so that pairs have 0.5 to 0.75. One that goes although no
other row is like it by the count here was dropped falsely. Ends with the time and the memory.
"""

from __future__ import annotations

import random
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.corpus_dedupe import DedupeConfig
from mens_exp.corpus.duplicates import duplicates
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections.abc import Iterator

SIMILARITIES = (0.7, 0.75, 0.79, 0.8, 0.85, 0.9, 0.95)
SHINGLE = 5
WORDS = 20_000


def counted(one: list[str], other: list[str]) -> float:
    """Count the Jaccard similarity of two texts."""
    first, second = (
        {tuple(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1)}
        for words in (one, other)
    )
    return len(first & second) / len(first | second)


def drawn(rng: random.Random, count: int) -> list[str]:
    """Draw words."""
    return [f"w{rng.randrange(WORDS)}" for _ in range(count)]


def planted(rng: random.Random, words: list[str], similarity: float) -> list[str]:
    """Change a text until a step more would bring it under a similarity."""
    new, place = drawn(rng, 2 * len(words)), rng.randrange(SHINGLE, len(words) // 2)
    edits = {
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
    """Yield texts of which pairs share a half to three quarters of their shingles."""
    while count:
        shared = drawn(rng, rng.randrange(60, 200))
        for _ in range(min(4, count)):
            yield shared + drawn(rng, round(len(shared) * rng.uniform(0.2, 0.45)))
            count -= 1


def main(pairs: int) -> None:
    """Plant, look, print."""
    rng = random.Random(0)  # noqa: S311 - no secret
    rows: list[list[str]] = [*families(rng, 5 * pairs)]
    rows += [drawn(rng, rng.randrange(60, 300)) for _ in range(5 * pairs)]
    distinct = len(rows)
    origins: list[tuple[float, int, float]] = []
    for similarity in SIMILARITIES:
        for _ in range(pairs):
            words = drawn(rng, rng.randrange(60, 300))
            other = planted(rng, words, similarity)
            rows += [words, other]
            origins.append((similarity, len(rows) - 1, counted(words, other)))
    stream = (TrainingPair(prompt="p", response=" ".join(words)) for words in rows)
    with tempfile.TemporaryDirectory() as scratch:
        began = time.perf_counter()
        found = duplicates(stream, DedupeConfig(), Path(scratch))
        took = time.perf_counter() - began
    print(f"{len(rows):,} rows in {took:.1f} s, {len(rows) / took:,.0f} rows/s; {found.facts()}")
    for similarity in SIMILARITIES:
        mine = [(row, exact) for wanted, row, exact in origins if wanted == similarity]
        gone = sum(int(found.kept[row]) == row - 1 for row, _ in mine)
        mean = sum(exact for _, exact in mine) / len(mine)
        at_least = [row for row, exact in mine if exact >= DedupeConfig().threshold]
        hit = sum(int(found.kept[row]) != row for row in at_least)
        recall = (
            f"; of {len(at_least)} at 0.8 or more {hit / len(at_least):.2%}" if at_least else ""
        )
        print(f"planted at {similarity}: mean {mean:.4f}, {gone / len(mine):.2%} gone{recall}")
    dropped = [row for row in range(distinct) if found.kept[row] != row]
    false = [row for row in dropped if not _has_like(rows, row, distinct)]
    print(f"{distinct:,} distinct rows: {len(dropped)} gone, {len(false)} of them falsely")
    own, children = (
        resource.getrusage(who).ru_maxrss / 1000
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )
    print(f"peak {own:.0f} MB, the largest of its processes {children:.0f} MB")


def _has_like(rows: list[list[str]], row: int, count: int) -> bool:
    return any(
        counted(rows[row], rows[other]) >= DedupeConfig().threshold
        for other in range(count)
        if other != row
    )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1000)
