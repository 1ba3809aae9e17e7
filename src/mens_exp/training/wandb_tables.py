"""Tables and panels of a run or a study for W&B, rendered from the JSON record.

A panel is a `wandb.plot`, which a reviewer can filter, or a table of data for which W&B has no
plot, such as intervals. Only the functions that build wandb objects import wandb.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.attribution import Attribution
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.scorecard import Condition, Scorecard, read_item_events
from mens_exp.evals.kpis import ITEM_VALUES, KPIS, item_values, name_of_key, name_under
from mens_exp.evals.study import BOTH

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import wandb

    from mens_exp.artifacts.run_dir import RunDir

_SIDES = tuple(map(str, Condition))  # come first, and exist even without answers
ALWAYS_SHOWN = frozenset({"parse_rate", "error"})
"""Columns of an answer; each further column exists if some answer has it."""


def panels(run_dir: RunDir) -> dict[str, Any]:
    """Return the tables `scorecard` (condition × KPI), `predictions` (row per item), a study's.

    Plots are named `plots/…`. Each panel is present only if its data is recorded.

    Raises:
        DataError: one of these files cannot be read.
    """
    found: dict[str, Any] = {}
    if conditions := conditions_of(run_dir):
        found["scorecard"] = _scorecard_table(conditions)
        found |= _scorecard_plots(conditions)
    if run_dir.events.is_file():
        found["predictions"] = _predictions_table(run_dir.events)
    if run_dir.attribution.is_file():
        found |= _attribution(Attribution.read(run_dir.attribution))
    if run_dir.comparison.is_file():
        record = Comparison.read(run_dir.comparison)
        found |= {**study_tables(record), **study_plots(record)}
    return found


def conditions_of(run_dir: RunDir) -> dict[str, dict[str, float | int | None]]:
    """Return the scorecard of a run by condition; empty if there is none."""
    return Scorecard.read(run_dir.scorecard).conditions if run_dir.scorecard.is_file() else {}


def _scorecard_table(conditions: Mapping[str, Mapping[str, float | None]]) -> wandb.Table:
    import wandb

    keys = {name_of_key(key): key for values in conditions.values() for key in sorted(values)}
    rows = [
        [condition, *(values.get(keys[name]) for name in sorted(keys))]
        for condition, values in conditions.items()
    ]
    return wandb.Table(columns=["condition", *sorted(keys)], data=rows)


def _predictions_table(path: Path) -> wandb.Table:
    """Build a table with a row per item: prompt, answers side by side, and their metadata."""
    import wandb

    items: dict[str, dict[str, Any]] = {}
    sides: dict[str, None] = dict.fromkeys(_SIDES)
    found = set(ALWAYS_SHOWN)
    for event in read_item_events(path):
        if event["sample"] > 0:
            continue  # one row per item
        side = event["condition"]
        sides[side] = None
        row = items.setdefault(event["item_id"], {"item_id": event["item_id"]})
        row |= {"prompt": event["prompt"], "reference": event["reference"]}
        row[side] = event["completion"]
        values = item_values(event)
        found |= {name for name, value in values.items() if value is not None}
        row |= {f"{side}/{name}": value for name, value in values.items()}
    measured = [name for name in ITEM_VALUES if name in found]
    shown: list[str | int] = ["item_id", "prompt", "reference", *sides]
    shown += [f"{side}/{name}" for name in measured for side in sides]
    data = [[row.get(str(name)) for name in shown] for row in items.values()]
    return wandb.Table(columns=list(shown), data=data)


_OF_VERDICT = (
    *("estimate", "level", "low", "high", "p", "p_sign_flip", "p_holm"),
    *("mde", "mde_low", "mde_high", "seeds_needed", "seeds_needed_low", "seeds_needed_high"),
    *("in_seed_noise", "width_ratio", "verdict", "why"),
)
_OF_KPI = (
    *("group", "direction", "unit", "arm_mean", "reference_mean", "estimate", "level"),
    *("low", "high", "mde", "mde_low", "mde_high", "in_seed_noise", "verdict"),
)


def study_tables(record: Comparison) -> dict[str, wandb.Table]:
    """Return the tables of a comparison, by name."""
    verdicts = [
        [
            *(one["arm"], one["reference"]),
            *_picked(one["kpis"][record.primary], _OF_VERDICT),
            len(record.looks[one["arm"]]["others"]) + 1 if one["arm"] in record.looks else 1,
            "; ".join(one["confounded_by"]),
        ]
        for one in record.contrasts
    ]
    kpis = [
        [one["arm"], name, *_picked(kpi, _OF_KPI)]
        for one in record.contrasts
        for name, kpi in one["kpis"].items()
    ]
    names = list(record.arms[0]["kpis"])
    arms = [
        [arm["name"], len(arm["seeds"]), arm["runs"], *map(arm["kpis"].get, names)]
        for arm in record.arms
    ]
    # If base and tuned are the arms, the arm gives the condition.
    is_one = record.condition != BOTH
    shown = [name_under(record.condition, name) if is_one else name for name in names]
    noise = [[name, one["seed"], one["rerun"]] for name, one in record.noise.items()]
    return {
        "verdicts": _table(["arm", "reference", *_OF_VERDICT, "looks", "confounded_by"], verdicts),
        "kpis": _table(["arm", "kpi", *_OF_KPI], kpis),
        "arms": _table(["arm", "seeds", "runs", *shown], arms),
        "noise": _table(["kpi", "seed", "rerun"], noise),
    }


def _picked(record: Any, names: Sequence[str]) -> list[Any]:
    return [record[name] for name in names]


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> wandb.Table:
    import wandb

    return wandb.Table(columns=list(columns), data=[list(row) for row in rows])


def _scorecard_plots(conditions: Mapping[str, Mapping[str, float | None]]) -> dict[str, Any]:
    """Return a bar for each share of the scorecard, base and tuned side by side."""
    import wandb

    rows = [
        [f"{name} · {condition}", value]
        for name in KPIS
        for condition, values in conditions.items()
        for key, value in values.items()
        if name_of_key(key) == name and value is not None and KPIS[name].unit == "1"
    ]
    if not rows:
        return {}
    table = wandb.Table(columns=["kpi", "share"], data=rows)
    return {"plots/kpis": wandb.plot.bar(table, "kpi", "share", title="KPIs, as shares")}


_OF_MODULE = ("path", "kind", "layer", "parameters", "kl", "loss_change", "share", "rank")
_MOST_BARS = 30


def _attribution(record: Attribution) -> dict[str, Any]:
    """Return a row for each module that was quantized alone, and bars of the most costly."""
    import wandb

    modules: list[Any] = sorted(record.modules, key=lambda one: one["rank"])
    dearest = [[one["logical"], one["share"]] for one in modules[:_MOST_BARS]]
    table = wandb.Table(columns=["module", "share"], data=dearest)
    title = "Share of the cost of quantizing, the most expensive modules"
    return {
        "modules": _table(_OF_MODULE, [_picked(one, _OF_MODULE) for one in modules]),
        "plots/modules": wandb.plot.bar(table, "module", "share", title=title),
    }


def study_plots(record: Comparison) -> dict[str, Any]:
    """Return plots of a comparison: arms, loss curves, and runs by training time."""
    import wandb

    primary = record.primary
    found: dict[str, Any] = {}
    arms = [
        [arm["name"], value] for arm in record.arms if (value := arm["kpis"][primary]) is not None
    ]
    if arms:
        table = wandb.Table(columns=["arm", primary], data=arms)
        found["plots/arms"] = wandb.plot.bar(table, "arm", primary, title=f"{primary} by arm")
    for metric in ("train/loss", "val/loss"):
        curves = {name: one[metric] for name, one in record.curves.items() if metric in one}
        if curves:
            found[f"plots/{metric.replace('/', '_')}"] = wandb.plot.line_series(
                xs=[one["steps"] for one in curves.values()],
                ys=[one["mean"] for one in curves.values()],
                keys=list(curves),
                title=f"{metric} by arm, mean over seeds",
                xname="step",
            )
    costs = [[one.get("train_s"), one.get(primary)] for one in record.scatter.values()]
    known = [row for row in costs if None not in row]
    if known and primary != "train_s":
        table = wandb.Table(columns=["train_s", primary], data=known)
        title = f"{primary} by training time (s)"
        found["plots/cost"] = wandb.plot.scatter(table, "train_s", primary, title=title)
    return found
