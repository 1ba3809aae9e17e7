"""Measurements of runs in a uniform form: KPI values of items, runs, and cells of a sweep.

The records of a sweep's runs are read once for every rendering.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Condition, Scorecard, read_item_events
from mens_exp.artifacts.sweep import INTERRUPTED, JobState
from mens_exp.errors import DataError, MensError
from mens_exp.evals.kpis import (
    ITEM_VALUES,
    KPIS,
    Direction,
    Kpi,
    KpiGroup,
    Missing,
    item_values,
    kpi_of_field,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mens_exp.artifacts.comparison import Comparison
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.artifacts.sweep import SweepDir, SweepJob, SweepRecord
    from mens_exp.artifacts.telemetry import DocumentLoss

_LABELS = frozenset({"version", "sample"})  # numbers of a line that measure nothing
_SUPERVISED, _TRUNCATED = "supervised_frac", "truncated_frac"
_LOSS = "val_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Values of one item, or of a whole run.

    Attributes:
        arm: whose run it is.
        seed: of the run.
        run: its id; several runs of one arm and seed are reruns.
        item: None for what the run has as a whole.
        values: KPI -> value; None where it is unknown.
        parts: KPI of the whole run -> item -> its value and its weight in the run's.
        declared: the user's metrics among the values that have a direction.
    """

    arm: str
    seed: int
    run: str
    item: str | None
    values: dict[str, float | None] = field(default_factory=dict)
    parts: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)
    declared: dict[str, Kpi] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One KPI of one run.

    Attributes:
        mean: over all items, or over those that have it; None where it is unknown.
        items: item -> value, empty for what the run has as a whole.
        weights: item -> its weight in the mean; empty where all are alike.
        why: it is unknown.
        declared: the KPI as the run declares it, if it is a metric of the user's.
    """

    mean: float | None
    items: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    why: str | None = None
    declared: Kpi | None = None


def observations(
    arm: str,
    manifest: Manifest,
    condition: str,
    scorecard: Scorecard | None,
    events: Iterable[Mapping[str, Any]],
    losses: Iterable[DocumentLoss] = (),
) -> list[Observation]:
    """Return the measurements of one run under one condition.

    Args:
        arm: whose run it is.
        manifest: of the run.
        condition: of the scorecard, such as ``tuned``.
        scorecard: None where there is none.
        events: lines of its events.jsonl; whatever is a boolean or a number is a value.
        losses: of the documents that it validated on, which are the items of the validation loss.
    """
    made = functools.partial(Observation, arm=arm, seed=manifest.seed, run=manifest.run_id)
    own = {} if scorecard is None else _kpis_of(scorecard.declared)
    found = [
        made(item=str(line["item_id"]), values=_values(line), declared=own)
        for line in events
        if str(line.get("condition")) == condition
    ]
    of_items = {name for one in found for name in one.values}
    whole = _of_run(manifest, condition)
    stated = {} if scorecard is None else scorecard.conditions.get(condition, {})
    for kpi in KPIS.values():
        if kpi.name not in of_items and kpi.name not in whole:
            key = next((key for key in kpi.keys if key in stated), None)
            if key is not None:
                whole[kpi.name] = _number(stated[key])
    of_documents = {
        one["item_id"]: (one["loss"] / one["tokens"], float(one["tokens"]))
        for one in losses
        if one["condition"] == condition
    }
    parts = {_LOSS: of_documents} if of_documents and _LOSS in whole else {}
    declared = _declared(manifest)
    return [*found, made(item=None, values=whole, parts=parts, declared=declared)]


def scores(found: Sequence[Observation], items: int | None) -> dict[str, Score]:
    """Sum up the observations of one run.

    Args:
        found: of one run.
        items: how many the suite has; an item without a line counts as one without a value.
    """
    by_item: dict[str, dict[str, list[float]]] = {}
    made: dict[str, Score] = {}
    names: set[str] = set()
    declared: dict[str, Kpi] = {}
    for one in found:
        if one.item is None:
            for name, value in one.values.items():
                why = None if value is not None else "the run's record has no value"
                parts = one.parts.get(name, {})
                made[name] = Score(
                    mean=value,
                    items={item: part for item, (part, _) in parts.items()},
                    weights={item: weight for item, (_, weight) in parts.items()},
                    why=why,
                    declared=one.declared.get(name),
                )
            continue
        values = by_item.setdefault(one.item, {})
        names |= one.values.keys()
        declared |= one.declared
        for name, value in one.values.items():
            if value is not None:  # several answers to one item are one value, their mean
                values.setdefault(name, []).append(value)
    for name in sorted(names):
        valued = {i: _mean(v[name]) for i, v in by_item.items() if name in v}
        score = _score(kpi_named(name), valued, sorted(by_item), items)
        made[name] = replace(score, declared=declared.get(name))
    return made


def kpi_named(name: str) -> Kpi:
    """Return a KPI of the table, or one that only a suite knows, of which neither way is better."""
    return KPIS.get(name) or Kpi(
        name=name,
        group=KpiGroup.OTHER,
        direction=Direction.NONE,
        field=name,
        missing=Missing.ABSENT,
    )


def _declared(manifest: Manifest) -> dict[str, Kpi]:
    """Return the user's metrics of a run for which a direction is declared."""
    return _kpis_of(manifest.facts.get("metrics") or {})


def _kpis_of(declared: Mapping[str, Mapping[str, Any]]) -> dict[str, Kpi]:
    for name, about in declared.items():
        if about.get("direction") not in set(Direction) or "unit" not in about:
            raise DataError(
                "is not a declaration of a metric",
                where=name,
                found=str(dict(about)),
                expected=f"a unit, and one of the directions {', '.join(Direction)}",
                remedy="restore the record, or run it again",
            )
    return {
        name: Kpi(
            name=name,
            group=KpiGroup.OTHER,
            direction=Direction(about["direction"]),
            unit=about["unit"],
            missing=Missing.ABSENT,
        )
        for name, about in declared.items()
        if about["direction"] != Direction.NONE
    }


def undirected_metrics(manifest: Manifest) -> set[str]:
    """Return the user's metrics of a run for which no direction is declared."""
    declared = manifest.facts.get("metrics") or {}
    return {name for name, about in declared.items() if about["direction"] == Direction.NONE}


def _score(kpi: Kpi, valued: dict[str, float], every: Sequence[str], items: int | None) -> Score:
    if not valued:
        return Score(mean=None, why="no item has a value")
    if kpi.missing is Missing.ABSENT:
        return Score(mean=_mean(list(valued.values())), items=valued)
    whole = {item: valued.get(item, 0.0) for item in every}
    return Score(mean=math.fsum(whole.values()) / max(len(whole), items or 0), items=whole)


def _values(line: Mapping[str, Any]) -> dict[str, float | None]:
    found: dict[str, float | None] = {}
    for name, value in line.items():
        if name in _LABELS:
            continue
        if name == "values":
            found |= {own: _number(one) for own, one in value.items()}
            continue
        kpi = kpi_of_field(name)
        if kpi is not None and value is None:
            found[kpi.name] = None
        elif isinstance(value, bool | int | float):
            found[kpi.name if kpi is not None else name] = _number(value)
    return found


def _of_run(manifest: Manifest, condition: str) -> dict[str, float | None]:
    """Return what the manifest tells; training's own figures are not those of the base model."""
    places = {"results": manifest.results, "facts": manifest.facts}
    found: dict[str, float | None] = {}
    is_base = condition == "base"
    for kpi in KPIS.values():
        for dotted in kpi.results:
            part, _, name = dotted.partition(".")
            if is_base and not name.startswith("tuned_"):
                break
            value = places[part].get(name.replace("tuned_", "base_") if is_base else name)
            found[kpi.name] = _number(value)
            if value is not None:
                break
    if not is_base:
        values = manifest.results.get("metrics") or {}
        declared = _declared(manifest).keys() & values.keys()
        found |= _of_data(manifest) | {name: _number(values[name]) for name in declared}
    return found


def _of_data(manifest: Manifest) -> dict[str, float | None]:
    data, results = manifest.inputs.get("data") or {}, manifest.results
    supervised, tokens = results.get("supervised_tokens"), results.get("tokens")
    cut, rows = data.get("train_truncated"), data.get("train_rows")
    return {
        _SUPERVISED: supervised / tokens if supervised is not None and tokens else None,
        _TRUNCATED: cut / rows if cut is not None and rows else None,
    }


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, bool | int | float) else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


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
        declared: the user's metrics among them.
        why_unknown: why there are no values, or not all; None where nothing is amiss.
    """

    number: int
    directory: str
    factors: dict[str, str]
    state: str
    reason: str | None
    has_report: bool
    values: dict[str, float | None] = field(default_factory=dict)
    declared: dict[str, Kpi] = field(default_factory=dict)
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


_KILLED = "its process was killed; sweep.resume continues it"


def cells_of(directory: SweepDir, record: SweepRecord) -> list[Cell]:
    """Read the results of each job's run, and mark unreadable records."""
    return [_cell(directory, job) for job in record.jobs]


def columns_of(cells: Sequence[Cell]) -> tuple[list[Column], list[Column]]:
    """Return the KPIs that some cell has a value for, and the costs, the usual ones first."""
    known = {name for cell in cells for name, value in cell.values.items() if value is not None}
    declared = {name: kpi for cell in cells for name, kpi in cell.declared.items()}
    every = dict.fromkeys([*_FIRST, *KPIS, *sorted(declared)])
    order = [name for name in every if name in known]
    costs = [name for name in order if name == _WALL or kpi_named(name).group is KpiGroup.COST]
    kpis = [name for name in order if name not in costs]
    units = {name: kpi.unit for name, kpi in declared.items()}
    return _columns(kpis, units), _columns(costs, {_WALL: "s"})


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


def _columns(names: Iterable[str], units: Mapping[str, str]) -> list[Column]:
    return [Column(name=name, unit=units.get(name) or kpi_named(name).unit) for name in names]


def _cell(directory: SweepDir, job: SweepJob) -> Cell:
    run = RunDir(directory.path / job["directory"])
    values: dict[str, float | None] = {}
    declared: dict[str, Kpi] = {}
    why: str | None = None
    is_interrupted = job["state"] == JobState.RUNNING and run.is_interrupted
    try:
        if run.manifest.is_file():
            manifest = Manifest.read(run.manifest)
            values, declared = _cell_values(run, manifest), _declared(manifest)
    except MensError as error:
        why = str(error)
    return Cell(
        number=job["number"],
        directory=job["directory"],
        factors=_factors(job["differs"]),
        state=INTERRUPTED if is_interrupted else str(job["state"]),
        reason=job["reason"] or (_KILLED if is_interrupted else None),
        has_report=run.report.is_file(),
        values=values,
        declared=declared,
        why_unknown=why,
    )


def _factors(differs: Sequence[str]) -> dict[str, str]:
    parts = (text.lstrip("+").partition("=") for text in differs)
    return {key: value if equals else key for key, equals, value in parts}


def _cell_values(run: RunDir, manifest: Manifest) -> dict[str, float | None]:
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
