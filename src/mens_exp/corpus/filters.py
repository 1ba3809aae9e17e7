"""Filters that select rows of a corpus by their labels and texts."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mens_exp.config.data import FilterConfig
    from mens_exp.rows.schema import TrainingPair

__all__ = ["asked", "filtered", "first_failed", "refuse_nothing_left"]

# The first word after an opening fence; rustdoc puts more behind a comma.
_FENCE: Final = re.compile(r"^ {0,3}(?:`{3,}|~{3,})[ \t]*([^\s,`~{]+)", re.MULTILINE)


def asked(config: FilterConfig) -> dict[str, Any]:
    """Return the filters that are set, by name, in the order in which rows pass them."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    return {name: value for name, value in values.items() if value is not None}


def filtered(
    pairs: Sequence[TrainingPair], config: FilterConfig
) -> tuple[list[TrainingPair], Counter[str]]:
    """Take the rows that pass every filter.

    Args:
        pairs: the rows.
        config: the filters.

    Returns:
        The rows that pass, in their order, and how many each filter refused; a row counts for the
        first filter that it fails, so that the counts add up to the rows that are gone.
    """
    wanted = asked(config)
    refused: Counter[str] = Counter()
    kept = []
    for pair in pairs:
        failed = first_failed(pair, wanted)
        if failed is None:
            kept.append(pair)
        else:
            refused[failed] += 1
    return kept, refused


def first_failed(pair: TrainingPair, wanted: Mapping[str, Any]) -> str | None:
    """Return the first of the filters, as `asked` has them, that a row fails; None for none."""
    return next((name for name, value in wanted.items() if not _PASSES[name](pair, value)), None)


def refuse_nothing_left(before: int, refused: Counter[str]) -> None:
    """Refuse filters that no row passes.

    Args:
        before: how many rows there were.
        refused: how many each filter refused.

    Raises:
        DataError: all of them.
    """
    if before and sum(refused.values()) == before:
        counts = ", ".join(f"{name} refused {count}" for name, count in refused.items())
        raise DataError(
            "no row passes the filters",
            where="data.filter",
            found=f"{before} rows: {counts}",
            expected="at least one row",
            remedy="loosen a filter, or drop it",
        )


def _category(pair: TrainingPair, value: str) -> bool:
    return pair.category is not None and value.casefold() in pair.category.casefold()


def _language(pair: TrainingPair, value: str) -> bool:
    """Hold a row's language against the one asked for; without one its answers' fences tell."""
    if pair.language is not None:
        return pair.language.casefold() == value.casefold()
    fences = (name for _, said in pair.exchanges for name in _FENCE.findall(said))
    return any(name.casefold() == value.casefold() for name in fences)


def _chars(pair: TrainingPair) -> int:
    return sum(len(user) + len(said) for user, said in pair.exchanges)


_PASSES: Final[dict[str, Callable[[TrainingPair, Any], bool]]] = {
    "min_rating": lambda pair, value: pair.rating is None or pair.rating >= value,
    "category": _category,
    "exclude_category": lambda pair, value: not _category(pair, value),
    "min_chars": lambda pair, value: _chars(pair) >= value,
    "max_chars": lambda pair, value: _chars(pair) <= value,
    "language": _language,
}
