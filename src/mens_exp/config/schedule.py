"""Learning-rate schedules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["DEFAULT_WARMUP_FRAC", "ScheduleConfig", "ScheduleKind", "warmup_steps"]

DEFAULT_WARMUP_FRAC = 0.05  # unverified guess; 3 steps of the main job's 60
_DECIMALS = 9  # of a product of a fraction and steps; 0.07 * 100 is 7.000000000000001


class ScheduleKind(Enum):
    """Shape of the decay after warm-up."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Linear warm-up, then a decay to zero over the remaining steps (constant: none)."""

    kind: ScheduleKind = setting(MISSING, "Shape of the decay; set by the option.")
    warmup_steps: int | None = setting(
        None,
        "Optimizer steps over which the rate rises to optim.lr; null: by fraction.",
        ge=0,
        contract=("exec.warmup_steps",),
        aliases={
            "warmup_steps": "Transformers and TRL, Axolotl and LLaMA-Factory",
            "num_warmup_steps": "torchtune",
        },
    )
    warmup_frac: float | None = setting(
        None,
        "The same as a share of the run's optimizer steps, rounded up; null: warmup_steps, and "
        f"{DEFAULT_WARMUP_FRAC:g} where neither is set.",
        ge=0,
        lt=1,
        aliases={"warmup_ratio": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )


def warmup_steps(schedule: ScheduleConfig, total_steps: int) -> int:
    """Return the optimizer steps of warm-up in a run of ``total_steps``."""
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    frac = DEFAULT_WARMUP_FRAC if schedule.warmup_frac is None else schedule.warmup_frac
    return math.ceil(round(frac * total_steps, _DECIMALS))
