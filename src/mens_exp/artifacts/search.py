"""The part of sweep.json that a search adds: what it draws from, its trials, and what they say."""

from __future__ import annotations

from enum import StrEnum
from typing import TypedDict

__all__ = ["Dimension", "SearchRecord", "Trial", "TrialState"]


class TrialState(StrEnum):
    """The state of a trial."""

    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"


class Dimension(TypedDict):
    """One key that a search draws values for.

    ``kind`` is ``group`` or ``choice`` (one of ``values``), ``int`` or ``float`` (from ``low`` to
    ``high``, both included, in multiples of ``step`` above ``low`` where there is one; even in the
    logarithm where ``log``).
    """

    key: str
    kind: str
    values: list[str]
    low: float | None
    high: float | None
    step: float | None
    log: bool


class Trial(TypedDict):
    """One draw.

    ``params`` are the overrides drawn, without those that would do nothing beside the others.
    ``values`` are the objectives' in their order; null until it is complete. ``intermediate`` are
    validation losses by optimizer step. ``job`` is the number of the job whose values these are:
    its own, that of an earlier trial that comes to the same run, or null for one that cannot run.
    ``meaning`` is a hash of what that run does and leaves.
    """

    number: int
    state: TrialState
    params: dict[str, str]
    values: list[float] | None
    intermediate: list[list[float]]
    reason: str | None
    job: int | None
    meaning: str | None


class SearchRecord(TypedDict):
    """A search.

    Attributes:
        sampler: ``tpe`` or ``random``.
        seed: that each draw derives from, with the number of its trial.
        startup_trials: random draws before the sampler models anything.
        n_trials: in all.
        pruner: ``none``, ``median`` or ``hyperband``.
        pruner_startup_trials: complete trials before any is pruned; null where the pruner has none.
        pruner_min_steps: optimizer steps before which none is pruned.
        objectives: KPIs of the runs.
        directions: ``minimize`` or ``maximize`` of each.
        fixed: overrides that all trials share.
        space: what is drawn.
        trials: the draws so far.
        best: trials that no other is better than in all objectives.
        importance: objective -> key -> share of what it decides; empty while unknown.
        importance_unknown: why it is.
    """

    sampler: str
    seed: int
    startup_trials: int
    n_trials: int
    pruner: str
    pruner_startup_trials: int | None
    pruner_min_steps: int
    objectives: list[str]
    directions: list[str]
    fixed: list[str]
    space: list[Dimension]
    trials: list[Trial]
    best: list[int]
    importance: dict[str, dict[str, float]]
    importance_unknown: str | None
