"""Rendering of a comparison for W&B: verdicts, KPIs, arms and noise as tables of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.evals.kpi_table import name_under
from mens_exp.evals.study import BOTH

if TYPE_CHECKING:
    from collections.abc import Sequence

    import wandb

    from mens_exp.artifacts.comparison import Comparison

__all__ = ["study_tables"]

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
    # Where base and tuned are the arms, the arm says the condition.
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
