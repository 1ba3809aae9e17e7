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

_LABELS = frozenset({"version", "sample"})  # numeric fields of a line that are not measurements
_SUPERVISED, _TRUNCATED = "supervised_frac", "truncated_frac"
_LOSS = "val_loss"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observation:
    """Values of one item, or of a whole run.

    Attributes:
        arm: arm of the run.
        seed: seed of the run.
        run: id of the run; several runs of one arm and seed are reruns.
        item: id of the item; None for values of a whole run.
        values: KPI -> value; None if unknown.
        parts: KPI of the whole run -> item -> value and weight of the item in it.
        declared: the user's metrics among the values, if they have a direction.
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
        mean: mean over all items, or over those that have a value; None if unknown.
        items: item -> value; empty for a KPI of a whole run.
        weights: item -> weight in the mean; empty for equal weights.
        why: the reason why it is unknown.
        declared: the KPI as declared by the run, if it is a user's metric.
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
        arm: arm of the run.
        manifest: manifest of the run.
        condition: condition of the scorecard, such as ``tuned``.
        scorecard: scorecard of the run; None if there is none.
        events: lines of its events.jsonl; all their boolean and numeric fields are values.
        losses: losses of its validation documents, which are the items of the validation loss.
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
    """Aggregate the observations of one run.

    Args:
        found: observations of one run.
        items: number of items of the suite; an item without a line counts as one without a value.
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
            if value is not None:  # an item's value is the mean over its answers
                values.setdefault(name, []).append(value)
    for name in sorted(names):
        valued = {i: _mean(v[name]) for i, v in by_item.items() if name in v}
        score = _score(kpi_named(name), valued, sorted(by_item), items)
        made[name] = replace(score, declared=declared.get(name))
    return made


def kpi_named(name: str) -> Kpi:
    """Return a KPI of the table, or for any other name a KPI without a direction."""
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
    """Return the KPIs in a manifest; only ``tuned_`` results have a value for the base model."""
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
    """One cell of a sweep, started or not.

    Attributes:
        number: its index in the sweep.
        directory: directory of its run, relative to the sweep's.
        factors: settings that differ between cells -> value as typed.
        state: its state, as a plain word.
        reason: the reason why it did not succeed; None if it did.
        has_report: whether its run has a rendered report.
        values: KPI or cost -> value of the tuned model; None if unknown.
        declared: the user's metrics among the values.
        why_unknown: the reason why values are missing; None if none are.
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
        """The factors that it shares with the cells that differ only in the seed."""
        parts = [f"{name}={value}" for name, value in self.factors.items() if name != SEED]
        return ", ".join(parts) or "all cells"


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A KPI or a cost with a value in some cell, and its unit (``1`` for a share)."""

    name: str
    unit: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The answers of one cell's base and tuned model to one item.

    Attributes:
        cell: number of the cell.
        arm: arm of the cell.
        item: the suite's id of the item.
        prompt: the prompt.
        base: answer of the base model; None if there is none.
        tuned: answer of the tuned model; None if there is none.
        reference: the suite's own answer.
        kpis: KPI -> (base model's value, tuned model's value); None if unknown.
        values: likewise, all values of the answers, under the names in `ITEM_VALUES`.
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
        record: record of the sweep.
        cells: its cells, in order.
        kpis: the KPIs that some cell has, the most common ones first.
        costs: likewise, the costs.
        predictions: the first items of each run.
        more_predictions: number of omitted items.
        comparison: comparison of its arms; None if there is none.
        why_not_compared: the reason why there is none; empty if there is one.
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
    """Return the KPIs and the costs that some cell has a value for, the most common ones first."""
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
    """Return the first items of every cell, and the number of omitted ones.

    Args:
        directory: the sweep.
        cells: the cells to read.
        items: maximum number of items per cell.
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
