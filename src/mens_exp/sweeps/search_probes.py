"""A search before its first draw: which options go together, and which values can never run."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mens_exp.config.search_space import written
from mens_exp.errors import ConfigError, MensError, NoEffectError
from mens_exp.sweeps.search_cells import bare
from mens_exp.tasks.settle import settled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.search import Dimension
    from mens_exp.config.overrides import Cell
    from mens_exp.sweeps.search_cells import Cells

__all__ = ["Probed", "probe"]

_MOST = 32  # combinations of options that are composed; of more, those that change one at a time


@dataclass(kw_only=True, slots=True)
class Probed:
    """The facts about a space that are known before the first draw.

    Attributes:
        general: problems of the command itself.
        cells: one for each combination of options that can run.
        ends: one for each other choice and upper end that can, beside the first such combination.
        bad: number of a probe -> why it cannot run.
        names: number of a probe -> its values.
    """

    general: list[MensError] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    ends: list[Cell] = field(default_factory=list)
    bad: dict[int, tuple[MensError, ...]] = field(default_factory=dict)
    names: dict[int, tuple[str, ...]] = field(default_factory=dict)


def probe(cells: Cells) -> Probed:
    """Compose each combination of options, and each other choice and upper end beside one."""
    found = Probed()
    places = [(chosen, *_take(cells, chosen, found)) for chosen in _combinations(cells.space)]
    for one in cells.space:
        if found.general or not found.cells:
            break
        counts = [chosen for chosen, good, idle in places if good and bare(one["key"]) not in idle]
        if not counts:
            found.general.append(_idle_everywhere(one["key"]))
            continue
        for value in _others(one):
            _take(cells, {**counts[0], one["key"]: written(one, value)}, found, settle=False)
    return found


def _take(
    cells: Cells, chosen: dict[str, str], found: Probed, *, settle: bool = True
) -> tuple[bool, frozenset[str]]:
    """Judge one cell; tell whether it can run, and what does nothing in it."""
    number = len(found.names)
    found.names[number] = tuple(chosen.values())
    checked, idle = cells.filled(chosen)
    found.general += [one for one in checked.general if str(one) not in map(str, found.general)]
    problems = tuple(one for faulty in checked.faulty.values() for one in faulty.problems)
    if settle and checked.cells and not (problems or checked.general):
        problems = tuple(settled(checked.cells[0]))
    if problems:
        found.bad[number] = problems
    is_good = bool(checked.cells) and not (problems or checked.general)
    if is_good:
        (found.cells if settle else found.ends).append(checked.cells[0])
    return is_good, idle


def _combinations(space: Sequence[Dimension]) -> Iterator[dict[str, str]]:
    groups = [one for one in space if one["kind"] == "group"]
    texts = [[written(one, value) for value in one["values"]] for one in groups]
    keys = [one["key"] for one in groups]
    if math.prod(map(len, texts)) <= _MOST:
        yield from (dict(zip(keys, each, strict=True)) for each in itertools.product(*texts))
        return
    first = {key: some[0] for key, some in zip(keys, texts, strict=True)}
    yield first
    for key, some in zip(keys, texts, strict=True):
        yield from ({**first, key: text} for text in some[1:])


def _others(dimension: Dimension) -> list[str | float]:
    if dimension["kind"] == "group":
        return []  # all of them have been
    if dimension["values"]:
        return list(dimension["values"][1:])
    high = dimension["high"]
    assert high is not None, "a number has two ends"
    return [int(high) if dimension["kind"] == "int" else high]


def _idle_everywhere(key: str) -> ConfigError:
    return NoEffectError(
        "in any trial",
        where=bare(key),
        expected="a key that does something beside one of the options at least",
        remedy=f"drop {key}",
    )
