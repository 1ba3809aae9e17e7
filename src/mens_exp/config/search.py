"""Settings of `hydra/sweeper=optuna`, which draws the cells of a sweep as their results come in."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from mens_exp.config.fields import setting

__all__ = ["OPTUNA", "OptunaSweeper", "Pruner", "Sampler", "is_search", "search_settings"]

OPTUNA = "optuna"


class Sampler(Enum):
    """The sampler of values."""

    tpe = "tpe"
    random = "random"


class Pruner(Enum):
    """The pruner that ends trials early."""

    none = "none"
    median = "median"
    hyperband = "hyperband"


@dataclass(kw_only=True)  # Hydra reads it as it reads its own sweepers
class OptunaSweeper:
    """`hydra.sweeper` of `hydra/sweeper=optuna`."""

    _target_: str = "mens_exp.sweeps.searching.launch_search"
    n_trials: int = setting(20, "Draws in all, those that cannot run and repeats included.", ge=1)
    sampler: Sampler = setting(
        Sampler.tpe, "tpe: Optuna's tree-structured Parzen estimator; random: evenly at random."
    )
    seed: int = setting(0, "Of the draws; each derives from it and the trial's number.", ge=0)
    startup_trials: int = setting(
        10, "Trials that tpe draws at random before it models their results (Optuna's).", ge=1
    )
    objectives: list[str] = setting(
        ["val_loss"], "KPIs of a run to improve, named as task=compare names them."
    )
    directions: list[str] = setting(
        [], "minimize or maximize, for each objective; empty: as the table of KPIs says."
    )
    pruner: Pruner = setting(
        Pruner.none,
        "median: ends a trial whose validation loss is above the median of the earlier ones at "
        "that step; hyperband: Optuna's, with optimizer steps as the resource.",
    )
    pruner_startup_trials: int = setting(
        5, "Complete trials before median ends any (Optuna's default).", ge=0
    )
    pruner_min_steps: int = setting(1, "Optimizer steps before which no trial is ended.", ge=1)


def search_settings(node: dict[str, Any]) -> OptunaSweeper:
    """Type the composed node of the sweeper."""
    return OptunaSweeper(**{one.name: node[one.name] for one in fields(OptunaSweeper)})


def is_search(texts: list[str]) -> bool:
    """Tell whether overrides choose the sweeper that searches."""
    chosen = [text.partition("=")[2] for text in texts if text.startswith("hydra/sweeper=")]
    return bool(chosen) and chosen[-1] == OPTUNA
