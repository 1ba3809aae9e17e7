"""The cells of a sweep with what each run's records say of it, read once for every rendering."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Condition, Scorecard, read_item_events
from mens_exp.errors import MensError
from mens_exp.evals.kpi_table import ITEM_VALUES, KPIS, KpiGroup, item_values
from mens_exp.evals.observations import observations, scores

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mens_exp.artifacts.comparison import Comparison
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.artifacts.sweep import SweepJob, SweepRecord
    from mens_exp.artifacts.sweep_dir import SweepDir

__all__ = [
    "Cell",
    "Column",
    "Prediction",
    "SweepReview",
    "cells_of",
    "columns_of",
    "predictions_of",
]

SEED = "seed"
_WALL = "wall_s"
_FIRST = (
    *("val_loss", "task_success", "parse_rate", "pass_at_1"),
    *("train_s", "peak_bytes", "tokens", "tokens_per_s", _WALL),
)
_ITEM_KPIS = ("parses", "compile_pass_1", "canonical_pass", "strictness", "task_success")


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One cell that ran, or was to run.

    Attributes:
        number: its place in the sweep.
        directory: of its run, relative to the sweep's.
        factors: what differs between cells, setting -> value as typed.
        state: how far it got, as a plain word.
        reason: why it did not succeed; None where it did.
        has_report: whether its run has a page to open.
        values: KPI or cost -> value of the tuned model; None where it is unknown.
        why_unknown: why there are no values, or not all; None where nothing is amiss.
    """

    number: int
    directory: str
    factors: dict[str, str]
    state: str
    reason: str | None
    has_report: bool
    values: dict[str, float | None] = field(default_factory=dict)
    why_unknown: str | None = None

    @property
    def arm(self) -> str:
        """The factors shared by the cells that differ from it in the seed alone."""
        parts = [f"{name}={value}" for name, value in self.factors.items() if name != SEED]
        return ", ".join(parts) or "all cells"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A KPI or a cost that some cell has a value for, and its unit (``1`` for a share)."""

    name: str
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The answers of one cell's base and tuned model to one item.

    Attributes:
        cell: number of the cell.
        arm: of the cell.
        item: the suite's name for it.
        prompt: what was asked.
        base: the answer of the base model; None where it was not asked.
        tuned: that of the tuned model, likewise.
        reference: the suite's own answer.
        kpis: KPI -> (of the base model, of the tuned one); None where unknown.
        values: likewise, all that is known of the answers, under the names of `ITEM_VALUES`.
    """

    cell: int
    arm: str
    item: str
    prompt: str
    base: str | None
    tuned: str | None
    reference: str
    kpis: dict[str, tuple[bool | None, bool | None]]
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepReview:
    """A sweep, ready to be shown.

    Attributes:
        record: of the sweep.
        cells: in their order.
        kpis: that some cell has, the usual ones first.
        costs: likewise.
        predictions: of its runs, the first items of each.
        more_predictions: how many are left out.
        comparison: of its arms; None where there is none.
        why_not_compared: why there is none; empty where there is one.
    """

    record: SweepRecord
    cells: list[Cell]
    kpis: list[Column]
    costs: list[Column]
    predictions: list[Prediction] = field(default_factory=list)
    more_predictions: int = 0
    comparison: Comparison | None = None
    why_not_compared: str = ""

    @property
    def factors(self) -> list[str]:
        """The names of the factors that differ between the cells, the seed last."""
        names = dict.fromkeys(name for cell in self.cells for name in cell.factors)
        return sorted(names, key=lambda name: name == SEED)


def cells_of(directory: SweepDir, record: SweepRecord) -> list[Cell]:
    """Read what each job's run left; a record that cannot be read is said to be so."""
    return [_cell(directory, job) for job in record.jobs]


def columns_of(cells: Iterable[Cell]) -> tuple[list[Column], list[Column]]:
    """Return the KPIs that some cell has a value for, and the costs, the usual ones first."""
    known = {name for cell in cells for name, value in cell.values.items() if value is not None}
    order = [name for name in dict.fromkeys([*_FIRST, *KPIS]) if name in known]
    costs = [name for name in order if name == _WALL or KPIS[name].group is KpiGroup.COST]
    kpis = [name for name in order if name not in costs]
    return [_column(name) for name in kpis], [_column(name) for name in costs]


def predictions_of(
    directory: SweepDir, cells: Sequence[Cell], *, items: int
) -> tuple[list[Prediction], int]:
    """Return the first items of every cell, and how many more there are.

    Args:
        directory: of the sweep.
        cells: those to read.
        items: of each cell.
    """
    found = [_predictions(RunDir(directory.path / cell.directory), cell) for cell in cells]
    left = sum(max(0, len(some) - items) for some in found)
    return [one for some in found for one in some[:items]], left


def _column(name: str) -> Column:
    return Column(name=name, unit="s" if name == _WALL else KPIS[name].unit)


def _cell(directory: SweepDir, job: SweepJob) -> Cell:
    run = RunDir(directory.path / job["directory"])
    values: dict[str, float | None] = {}
    why: str | None = None
    try:
        if run.manifest.is_file():
            values = _values(run)
    except MensError as error:
        why = str(error)
    return Cell(
        number=job["number"],
        directory=job["directory"],
        factors=_factors(job["differs"]),
        state=str(job["state"]),
        reason=job["reason"],
        has_report=run.report.is_file(),
        values=values,
        why_unknown=why,
    )


def _factors(differs: Sequence[str]) -> dict[str, str]:
    parts = (text.lstrip("+").partition("=") for text in differs)
    return {key: value if equals else key for key, equals, value in parts}


def _values(run: RunDir) -> dict[str, float | None]:
    manifest = Manifest.read(run.manifest)
    card = Scorecard.read(run.scorecard) if run.scorecard.is_file() else None
    lines: Any = read_item_events(run.events) if run.events.is_file() else ()
    seen = observations("", manifest, Condition.TUNED.value, card, lines)
    found = {
        name: one.mean for name, one in scores(seen, None if card is None else card.items).items()
    }
    wall = manifest.results.get(_WALL)
    return {**found, _WALL: float(wall) if isinstance(wall, int | float) else None}


def _predictions(run: RunDir, cell: Cell) -> list[Prediction]:
    try:
        events = read_item_events(run.events) if run.events.is_file() else []
    except MensError:
        return []  # the cell says that its records cannot be read
    items: dict[str, dict[str, ItemEvent]] = {}
    for event in events:
        if event["sample"] == 0:
            items.setdefault(event["item_id"], {})[event["condition"]] = event
    return [_prediction(cell, name, sides) for name, sides in items.items()]


def _prediction(cell: Cell, item: str, sides: dict[str, ItemEvent]) -> Prediction:
    base, tuned = (sides.get(one.value) for one in (Condition.BASE, Condition.TUNED))
    any_side = next(iter(sides.values()))
    kpis = {
        name: (base and base.get(name), tuned and tuned.get(name))
        for name in _ITEM_KPIS
        if any(side.get(name) is not None for side in sides.values())
    }
    known = [{} if side is None else item_values(side) for side in (base, tuned)]
    return Prediction(
        cell=cell.number,
        arm=cell.arm,
        item=item,
        prompt=any_side["prompt"],
        base=None if base is None else base["completion"],
        tuned=None if tuned is None else tuned["completion"],
        reference=any_side["reference"],
        kpis=kpis,  # type: ignore[arg-type]  # the fields named are booleans or null
        values={name: (known[0].get(name), known[1].get(name)) for name in ITEM_VALUES},
    )
