"""The configured optimizer, and the learning-rate schedule as a multiple of the peak."""

from __future__ import annotations

import dataclasses
import inspect
import math
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class, instantiate

from mens_exp.config.optim import (
    PagedAdamw8bitConfig,
    ScheduleConfig,
    ScheduleKind,
    warmup_steps,
)
from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch.optim.lr_scheduler import LRScheduler

    from mens_exp.config.optim import AnySchedule, OptimizerConfig


def multiplier(kind: ScheduleKind, step: int, *, warmup_steps: int, total_steps: int) -> float:
    """Return the learning rate of optimizer step ``step`` (from 0) as a fraction of the peak.

    Warm-up step ``i`` has the fraction ``(i + 1) / warmup_steps``, so that the first step is not
    zero and the last warm-up step has the peak rate. The decay then runs from the peak, at the
    first step after warm-up, towards zero, which would be reached at step ``total_steps``.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if kind is ScheduleKind.constant:
        return 1.0
    share = min((step - warmup_steps) / max(total_steps - warmup_steps, 1), 1.0)
    return 1 - share if kind is ScheduleKind.linear else (1 + math.cos(math.pi * share)) / 2


def build_scheduler(
    config: AnySchedule, optimizer: torch.optim.Optimizer, *, total_steps: int
) -> LRScheduler:
    """Build the schedule of the learning rate, which is asked once for each optimizer step.

    A class of the user's gets the length of the run if it takes ``total_steps``.
    """
    from torch.optim.lr_scheduler import LambdaLR

    if not isinstance(config, ScheduleConfig):
        target = config._target_  # type: ignore[attr-defined]  # OwnSchedule has it
        settings = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
        taken = inspect.signature(get_class(target)).parameters
        offered = {"total_steps": total_steps} if "total_steps" in taken else {}
        made: LRScheduler = instantiate({**offered, **settings}, optimizer, _convert_="all")
        return made
    warmup = warmup_steps(config, total_steps) or 0
    return LambdaLR(
        optimizer,
        lambda step: multiplier(config.kind, step, warmup_steps=warmup, total_steps=total_steps),
    )


_OURS = {"_target_", "name"}  # identify the optimizer; the rest are its arguments


def build_optimizer(
    config: OptimizerConfig, parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Build the optimizer over the trained parameters, which are already on their device.

    Raises:
        SetupError: a paged optimizer without a CUDA device. bitsandbytes would fall back to a
            non-paged one with a warning.
    """
    device = parameters[0].device.type
    if isinstance(config, PagedAdamw8bitConfig) and device != "cuda":
        raise SetupError(
            "paged memory is CUDA's own",
            where="optim",
            found=f"{config.name} on {device}",
            expected="a CUDA device",
            remedy="use optim=adamw_8bit, which is the same arithmetic, or optim=adamw",
        )
    arguments = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _OURS
    }
    cls: Any = get_class(config._target_)  # Hydra's own spelling
    optimizer: torch.optim.Optimizer = cls(parameters, **arguments)
    return optimizer
