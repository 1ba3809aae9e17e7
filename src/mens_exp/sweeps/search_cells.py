"""From a search's space to a cell: what is drawn, what would do nothing, what cannot run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mens_exp.config.override_values import NO_KEY
from mens_exp.config.overrides import Checked, check
from mens_exp.config.search_space import written
from mens_exp.tasks.settle import settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.search import Dimension
    from mens_exp.config.overrides import Cell
    from mens_exp.errors import MensError

__all__ = ["Cells", "Drawn", "bare", "first_value"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """One trial's cell.

    Attributes:
        params: key -> override, of what was drawn and does something.
        cell: composed and settled; None where it cannot run.
        problems: why it cannot.
    """

    params: dict[str, str]
    cell: Cell | None
    problems: tuple[MensError, ...]


@dataclass(kw_only=True, slots=True)
class Cells:
    """Makes the cells of a search.

    Attributes:
        space: what is drawn, groups first.
        fixed: the overrides that all trials share.
    """

    space: Sequence[Dimension]
    fixed: Sequence[str]
    _filled: dict[tuple[str, ...], tuple[Checked, frozenset[str]]] = field(default_factory=dict)

    def draw(self, number: int, suggest: Callable[[Dimension], str | float]) -> Drawn:
        """Draw a cell: the options first, then what does something beside them."""
        params: dict[str, str] = {}
        for those in self._phases():
            idle = self.filled(params)[1] if params else frozenset()
            for one in those:
                if bare(one["key"]) not in idle:
                    params[one["key"]] = written(one, suggest(one))
        checked, _ = self.judge(list(params.values()), first=number)
        cell = checked.cells[0] if checked.cells else None
        problems = checked.problems
        if cell is not None:
            params = {key: text for key, text in params.items() if text not in cell.dropped}
            problems = problems or tuple(settled(cell))
        return Drawn(params=params, cell=None if problems else cell, problems=problems)

    def judge(self, texts: Sequence[str], *, first: int = 0) -> tuple[Checked, frozenset[str]]:
        """Check one cell, without the drawn keys that do nothing in it.

        Returns:
            What was found, and those keys: some that other options have and its own do not, and
            some that its other values leave without effect.
        """
        keys = frozenset(bare(one["key"]) for one in self.space)
        checked = check([*self.fixed, *texts], multirun=True, drawn=keys, first=first)
        groups = {bare(one["key"]) for one in self.space if one["kind"] == "group"}
        absent = {
            key
            for key in keys
            for problem in checked.general
            if problem.where == key and problem.what == f"{NO_KEY} {key.partition('.')[0]}"
            if key.partition(".")[0] in groups
        }
        if absent:
            texts = [text for text in texts if bare(text) not in absent]
            checked = check([*self.fixed, *texts], multirun=True, drawn=keys, first=first)
        dropped = {bare(text) for cell in checked.cells for text in cell.dropped}
        return checked, frozenset(absent | dropped)

    def filled(self, chosen: Mapping[str, str]) -> tuple[Checked, frozenset[str]]:
        """Check, once, a cell of those values and of the first of everything else."""
        known = tuple(sorted(chosen.values()))
        if known not in self._filled:
            rest = [one for one in self.space if one["key"] not in chosen]
            texts = [*chosen.values(), *(written(one, first_value(one)) for one in rest)]
            self._filled[known] = self.judge(texts)
        return self._filled[known]

    def _phases(self) -> Iterator[list[Dimension]]:
        """Yield what is drawn together: each group alone, as it decides on what comes after."""
        yield from ([one] for one in self.space if one["kind"] == "group")
        yield [one for one in self.space if one["kind"] == "choice"]
        yield [one for one in self.space if one["kind"] in {"int", "float"}]


def first_value(dimension: Dimension) -> str | float:
    """Return the first choice, or the lower end."""
    if dimension["values"]:
        return dimension["values"][0]
    low = dimension["low"]
    assert low is not None, "a number has two ends"
    return int(low) if dimension["kind"] == "int" else low


def bare(text: str) -> str:
    """Return the key of an override, or a key itself, without what says how it is set."""
    return text.partition("=")[0].lstrip("+~").partition("@")[0]
