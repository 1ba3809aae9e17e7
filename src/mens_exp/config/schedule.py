"""How the learning rate moves."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import setting

__all__ = ["ScheduleConfig", "ScheduleKind"]


class ScheduleKind(Enum):
    """Shape of the decay after warm-up."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"


@dataclass(kw_only=True, slots=True)
class ScheduleConfig:
    """Linear warm-up, then a decay to zero over the remaining steps (constant: none)."""

    kind: ScheduleKind = setting(MISSING, "Shape of the decay; set by the option.")
    warmup_steps: int = setting(
        3, "Optimizer steps over which the rate rises to optim.lr (5 % of 60).", ge=0
    )
