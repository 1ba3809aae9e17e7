"""Rows of several sources by weight: of any number of rows, each source has its exact share.

Weights are taken as the fractions that are written, and of all rows each source has its share to
the row. The next row is always of the source that is furthest behind, so that this nearly holds of
any first rows, too. Nothing is left to chance: the seed decides which rows of a source come first,
not how many.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mens_exp.config.data import MixStop
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mens_exp.config.data import MixData
    from mens_exp.rows.schema import TrainingPair

__all__ = ["CHARS_PER_TOKEN", "Drawing", "draw", "estimated_tokens", "mixed", "record_of"]

CHARS_PER_TOKEN: Final = 3.4  # measured: the stdlib rows under SmolLM2's tokenizer
TEMPLATE_TOKENS: Final = 40  # of an exchange: a chat template's own
MOST_PASSES: Final = 100  # over one source; more is a slip in a weight (unverified guess)


def estimated_tokens(pair: TrainingPair) -> float:
    """Estimate the tokens of a row from its characters."""
    return sum(
        (len(user) + len(said)) / CHARS_PER_TOKEN + TEMPLATE_TOKENS for user, said in pair.exchanges
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The way rows are drawn.

    Attributes:
        weights: the weight of each source, by its name, above zero; only their ratios count.
        stop: when to stop.
        budget_tokens: estimated tokens to draw under stop=budget.
        seed: which rows of a source come first.
        settings: the node of these settings, and the one of the weights, for messages.
    """

    weights: Mapping[str, float]
    stop: MixStop
    budget_tokens: int | None
    seed: int
    settings: tuple[str, str] = ("data", "data.sources")


def mixed(
    corpora: Mapping[str, Sequence[TrainingPair]], weights: Mapping[str, float], config: MixData
) -> tuple[list[TrainingPair], dict[str, Any]]:
    """Draw rows of several sources by weight.

    Args:
        corpora: the rows of each source, by its name; none empty.
        weights: the weight of each, above zero; only their ratios count.
        config: when to stop, and the seed.

    Returns:
        The rows as drawn, and the record: for each source the share asked for and had, its rows,
        and how often it was gone through.

    Raises:
        DataError: a source has no rows, or would be repeated over `MOST_PASSES` times.
    """
    how = Drawing(
        weights=weights,
        stop=config.stop,
        budget_tokens=config.budget_tokens,
        seed=config.mix_seed,
    )
    counts: Counter[str] = Counter()
    rows = list(draw(corpora, how, counts))
    return rows, record_of(corpora, how, counts)


def draw(
    corpora: Mapping[str, Sequence[TrainingPair]], how: Drawing, counts: Counter[str]
) -> Iterator[TrainingPair]:
    """Yield rows of several sources by weight, one at a time.

    Args:
        corpora: the rows of each source, by its name; none empty. Each row is asked for when it is
            drawn, so that they need not be in memory.
        how: the weights, when to stop, and the seed.
        counts: counts the rows of each source; added to.

    Raises:
        DataError: a source has no rows, or would be repeated over `MOST_PASSES` times.
    """
    for name, pairs in corpora.items():
        if not pairs:
            raise DataError(
                "a source has no row to train on",
                where=how.settings[1],
                found=name,
                expected="at least one, filters and split passed",
                remedy="drop the source, or loosen its filter",
            )
    names = list(corpora)
    budget = float(how.budget_tokens or 0)
    sizes = [len(pairs) for pairs in corpora.values()]
    queues = [_shuffled(pairs, how.seed, number) for number, pairs in enumerate(corpora.values())]
    shares = _shares(how.weights, names)
    for source in _order(shares, _counts(shares, sizes, how.stop)):
        name = names[source]
        if counts[name] == MOST_PASSES * sizes[source]:
            raise _repeated(name, how)
        row = next(queues[source])
        counts[name] += 1
        yield row
        if how.stop is MixStop.budget:
            budget -= estimated_tokens(row)
            if budget <= 0:
                break


def record_of(
    corpora: Mapping[str, Sequence[TrainingPair]], how: Drawing, counts: Counter[str]
) -> dict[str, Any]:
    """Return the record of a draw.

    Returns:
        For each source the share asked for and had, its rows, and how often it was gone through.
    """
    shares = _shares(how.weights, list(corpora))
    drawn = counts.total()
    return {
        name: {
            "weight": how.weights[name],
            "share_asked": round(float(share), 6),
            "share": round(counts[name] / drawn, 6),
            "rows": counts[name],
            "of": len(pairs),
            "passes": round(counts[name] / len(pairs), 4),
        }
        for (name, pairs), share in zip(corpora.items(), shares, strict=True)
    }


def _shares(weights: Mapping[str, float], names: Sequence[str]) -> list[Fraction]:
    exact = [Fraction(repr(weights[name])) for name in names]  # 0.1 is a tenth
    return [weight / sum(exact) for weight in exact]


def _counts(shares: Sequence[Fraction], sizes: Sequence[int], stop: MixStop) -> list[int] | None:
    """Return how many rows of each source there will be; None where tokens decide.

    The rows are as few as go through every source, or as many as repeat none; each source has its
    share of them rounded down, and the largest remainders what is left.
    """
    if stop is MixStop.budget:
        return None
    reached = [size / share for size, share in zip(sizes, shares, strict=True)]
    rows = math.ceil(max(reached)) if stop is MixStop.all_exhausted else math.floor(min(reached))
    counts = [math.floor(share * rows) for share in shares]
    remainders = [share * rows - count for share, count in zip(shares, counts, strict=True)]
    largest = sorted(range(len(shares)), key=remainders.__getitem__, reverse=True)
    for source in largest[: rows - sum(counts)]:
        counts[source] += 1
    return counts


def _order(shares: Sequence[Fraction], counts: Sequence[int] | None) -> Iterator[int]:
    """Yield the source of each row: of those that are not done the one furthest behind its share.

    Without counts none is ever done.
    """
    wanted = [float(share) for share in shares]
    behind = wanted.copy()
    left = list(counts) if counts is not None else [1] * len(wanted)
    while any(left):
        source = max((i for i, rest in enumerate(left) if rest), key=behind.__getitem__)
        yield source
        behind[source] -= 1
        behind = [one + share for one, share in zip(behind, wanted, strict=True)]
        if counts is not None:
            left[source] -= 1


def _shuffled(pairs: Sequence[TrainingPair], seed: int, number: int) -> Iterator[TrainingPair]:
    """Yield the rows of a source for ever, each pass whole and in an order of its own."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))
    while True:
        yield from (pairs[index] for index in generator.permutation(len(pairs)))


def _repeated(name: str, how: Drawing) -> DataError:
    return DataError(
        f"the rows of a source would be repeated over {MOST_PASSES} times",
        where=how.settings[1],
        found=name,
        expected="weights nearer to the numbers of rows",
        remedy=f"lower its weight, or choose another {how.settings[0]}.stop than {how.stop.value}",
    )
