"""The learning rate as a multiple of its peak."""

from __future__ import annotations

import math

from mens_exp.config.schedule import ScheduleKind

__all__ = ["multiplier"]


def multiplier(kind: ScheduleKind, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the rate of optimizer step ``step`` (from 0) over its peak.

    Warm-up gives step ``i`` the share ``(i + 1) / warmup_steps``, so that the first step moves
    and the last step of warm-up has the peak rate. The decay then runs from the peak, at the
    first step after warm-up, towards zero, which would be reached at step ``total_steps``.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind is ScheduleKind.constant:
        return 1.0
    share = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1 - share if kind is ScheduleKind.linear else (1 + math.cos(math.pi * share)) / 2
