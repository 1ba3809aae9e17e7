"""Measurements of a run in one shape: KPI values of items, and of the run as a whole."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.evals.kpi_table import KPIS, Direction, Kpi, KpiGroup, Missing, kpi_of_field

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.scorecard import Scorecard
    from mens_exp.artifacts.validation_losses import DocumentLoss

__all__ = ["Observation", "Score", "kpi_named", "observations", "scores"]

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
    """

    arm: str
    seed: int
    run: str
    item: str | None
    values: dict[str, float | None] = field(default_factory=dict)
    parts: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """One KPI of one run.

    Attributes:
        mean: over all items, or over those that have it; None where it is unknown.
        items: item -> value, empty for what the run has as a whole.
        weights: item -> its weight in the mean; empty where all are alike.
        why: it is unknown.
    """

    mean: float | None
    items: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    why: str | None = None


def observations(
    arm: str,
    manifest: Manifest,
    condition: str,
    scorecard: Scorecard | None,
    events: Iterable[Mapping[str, Any]],
    losses: Iterable[DocumentLoss] = (),
) -> list[Observation]:
    """Return what one run measured under one condition.

    Args:
        arm: whose run it is.
        manifest: of the run.
        condition: of the scorecard, such as ``tuned``.
        scorecard: None where there is none.
        events: lines of its events.jsonl; whatever is a boolean or a number is a value.
        losses: of the documents that it validated on, which are the items of the validation loss.
    """
    made = functools.partial(Observation, arm=arm, seed=manifest.seed, run=manifest.run_id)
    found = [
        made(item=str(line["item_id"]), values=_values(line))
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
    return [*found, made(item=None, values=whole, parts=parts)]


def scores(found: Sequence[Observation], items: int | None) -> dict[str, Score]:
    """Sum up the observations of one run.

    Args:
        found: of one run.
        items: how many the suite has; an item without a line counts as one without a value.
    """
    by_item: dict[str, dict[str, list[float]]] = {}
    made: dict[str, Score] = {}
    names: set[str] = set()
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
                )
            continue
        values = by_item.setdefault(one.item, {})
        names |= one.values.keys()
        for name, value in one.values.items():
            if value is not None:  # several answers to one item are one value, their mean
                values.setdefault(name, []).append(value)
    for name in sorted(names):
        valued = {i: _mean(v[name]) for i, v in by_item.items() if name in v}
        made[name] = _score(kpi_named(name), valued, sorted(by_item), items)
    return made


def kpi_named(name: str) -> Kpi:
    """Return a KPI of the table, or one that only a suite knows: neither way is better."""
    known = KPIS.get(name)
    if known is not None:
        return known
    return Kpi(
        name=name,
        group=KpiGroup.OTHER,
        direction=Direction.NONE,
        field=name,
        missing=Missing.ABSENT,
    )


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
        found |= _of_data(manifest)
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
