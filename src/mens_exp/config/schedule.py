"""Settings of `schedule`: the learning rate of each optimizer step as a multiple of the peak."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from omegaconf import MISSING

from mens_exp.config.fields import Condition, setting, value_at

DEFAULT_WARMUP_FRAC = 0.05  # unverified guess; 3 steps of the main job's 60
_DECIMALS = 9  # precision of fraction * steps: 0.07 * 100 is 7.000000000000001


class ScheduleKind(Enum):
    """Name of a built-in schedule."""

    cosine = "cosine"
    linear = "linear"
    constant = "constant"
    wsd = "wsd"
    one_cycle = "one_cycle"
    lr_range = "lr_range"


_WARMS_UP = Condition(
    holds=lambda config: value_at(config, "schedule.kind") != ScheduleKind.lr_range.value,
    words=lambda _: "with schedule=lr_range, which begins at its lowest rate",
    needs="another schedule",
)


@dataclass(kw_only=True, slots=True)
class AnySchedule:
    """A learning-rate schedule over the optimizer steps of a run."""


@dataclass(kw_only=True, slots=True)
class OwnSchedule(AnySchedule):
    """A scheduler of torch's form, by its class; its other keys are the class's arguments."""

    _target_: str = setting(MISSING, "Class of the scheduler; set by the option.")


@dataclass(kw_only=True, slots=True)
class ScheduleConfig(AnySchedule):
    """Linear warm-up, then decay to zero over the remaining steps (constant: no decay)."""

    kind: ScheduleKind = setting(MISSING, "Shape of the schedule; set by the option.")
    warmup_steps: int | None = setting(
        None,
        "Optimizer steps over which the rate rises to optim.lr; null: by fraction.",
        ge=0,
        only_if=_WARMS_UP,
        idle=(None, 0),
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
        only_if=_WARMS_UP,
        idle=(None, 0),
        lt=1,
        aliases={"warmup_ratio": "Transformers and TRL, Axolotl and LLaMA-Factory"},
    )

    @property
    def usual_warmup_frac(self) -> float:
        """The default warm-up fraction of the run."""
        return DEFAULT_WARMUP_FRAC

    def multiple(self, step: int, total_steps: int) -> float:
        """Return the learning rate of optimizer step ``step`` (from 0) as a fraction of the peak.

        Warm-up step ``i`` has the fraction ``(i + 1) / warmup_steps``, so the first step is not
        zero and the last warm-up step has the peak rate. The decay starts at the peak, at the first
        step after warm-up, and would reach zero at step ``total_steps``.
        """
        warmup = warmup_steps(self, total_steps) or 0
        if step < warmup:
            return (step + 1) / warmup
        return self._after_warmup(step, warmup, total_steps)

    def _after_warmup(self, step: int, warmup: int, total_steps: int) -> float:
        if self.kind is ScheduleKind.constant:
            return 1.0
        share = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
        is_linear = self.kind is ScheduleKind.linear
        return 1 - share if is_linear else (1 + math.cos(math.pi * share)) / 2


@dataclass(kw_only=True, slots=True)
class CosineConfig(ScheduleConfig):
    """Warm-up, then half a cosine to zero."""

    kind: ScheduleKind = setting(ScheduleKind.cosine, "Shape of the schedule; set by the option.")


@dataclass(kw_only=True, slots=True)
class LinearConfig(ScheduleConfig):
    """Warm-up, then a straight line to zero."""

    kind: ScheduleKind = setting(ScheduleKind.linear, "Shape of the schedule; set by the option.")


@dataclass(kw_only=True, slots=True)
class ConstantConfig(ScheduleConfig):
    """Warm-up, then the peak rate."""

    kind: ScheduleKind = setting(ScheduleKind.constant, "Shape of the schedule; set by the option.")


class DecayShape(Enum):
    """Shape of the decay at the end of a run."""

    linear = "linear"
    sqrt = "sqrt"


@dataclass(kw_only=True, slots=True)
class WsdConfig(ScheduleConfig):
    """Warm-up, a stable phase at the peak, and a decay to zero over the last steps.

    Runs of different lengths share their steps up to the decay (arXiv:2404.06395).
    """

    kind: ScheduleKind = setting(ScheduleKind.wsd, "Shape of the schedule; set by the option.")
    decay_frac: float = setting(
        0.2,
        "Share of the run's optimizer steps that decay, rounded up (arXiv:2405.18392: 10 to 20 % "
        "reach a cosine's loss).",
        ge=0,
        lt=1,
    )
    decay: DecayShape = setting(
        DecayShape.linear,
        "linear, or sqrt: one minus the root of the share that has passed, which falls fast at "
        "first (arXiv:2405.18392).",
    )

    def decay_steps(self, total_steps: int) -> int:
        """Return the number of steps of the decay."""
        return math.ceil(round(self.decay_frac * total_steps, _DECIMALS))

    def _after_warmup(self, step: int, warmup: int, total_steps: int) -> float:
        del warmup  # a decay that overlaps warm-up starts after it, at a lower rate
        steps = self.decay_steps(total_steps)
        passed = step - (total_steps - steps)
        if passed <= 0:
            return 1.0 if step < total_steps else 0.0
        share = min(passed / steps, 1.0)
        return 1 - (math.sqrt(share) if self.decay is DecayShape.sqrt else share)


@dataclass(kw_only=True, slots=True)
class OneCycleConfig(ScheduleConfig):
    """One cycle (arXiv:1708.07120): half a cosine up to the peak, and half a cosine to almost zero.

    The rates are those of `torch.optim.lr_scheduler.OneCycleLR`, where `pct_start` is `warmup_frac`
    or `warmup_steps` over all steps; the momentum stays as it is.
    """

    kind: ScheduleKind = setting(
        ScheduleKind.one_cycle, "Shape of the schedule; set by the option."
    )
    warmup_frac: float | None = setting(
        None,
        "The same as a share of the run's optimizer steps (torch's pct_start), which may put the "
        "peak between two steps; null: warmup_steps, and 0.3 where neither is set.",
        ge=0,
        lt=1,
    )
    div_factor: float = setting(
        25.0, "The peak over the rate of the first step (torch's default).", ge=1
    )
    final_div_factor: float = setting(
        1e4, "The rate of the first step over that of the last (torch's default).", ge=1
    )

    @property
    def usual_warmup_frac(self) -> float:
        """Torch's default."""
        return 0.3

    def multiple(self, step: int, total_steps: int) -> float:
        """Return the rate of a step as a fraction of the peak, reached at the end of warm-up.

        As in torch, a fraction puts that end between two steps unless it gives a whole number, and
        without warm-up the first step is already one step past the peak.
        """
        warmup: float | None = self.warmup_steps
        if warmup is None:
            set_ = self.warmup_frac
            warmup = (self.usual_warmup_frac if set_ is None else set_) * total_steps
        peak, last = warmup - 1, total_steps - 1
        if step < peak:
            return _between(1 / self.div_factor, 1.0, step / peak)
        share = min((step - peak) / (last - peak), 1.0) if last > peak else float(step > peak)
        return _between(1.0, 1 / (self.div_factor * self.final_div_factor), share)


@dataclass(kw_only=True, slots=True)
class LrRangeConfig(ScheduleConfig):
    """A range test of learning rates (arXiv:1506.01186, section 3.3): the rate grows geometrically.

    The record names the rate of the lowest loss and proposes one. The run ends when the loss
    diverges; its adapter is of no use.
    """

    kind: ScheduleKind = setting(ScheduleKind.lr_range, "Shape of the schedule; set by the option.")
    lowest: float = setting(1e-3, "The first step's rate, as a multiple of optim.lr.", gt=0)
    highest: float = setting(100.0, "The last step's rate, as a multiple of optim.lr.", gt=0)
    divergence: float = setting(
        4.0,
        "The run ends when the smoothed loss is more than this multiple of its lowest value "
        "(fastai's and Lightning's default).",
        gt=1,
    )

    @property
    def usual_warmup_frac(self) -> float:
        """Zero: there is no warm-up."""
        return 0.0

    def multiple(self, step: int, total_steps: int) -> float:
        """Return the rate of a step as a multiple of optim.lr."""
        share = min(step / max(total_steps - 1, 1), 1.0)
        found: float = self.lowest * (self.highest / self.lowest) ** share
        return found


def _between(first: float, last: float, share: float) -> float:
    """Interpolate between two values on half a cosine."""
    return last + (first - last) * (1 + math.cos(math.pi * share)) / 2


SCHEDULES: dict[str, type[ScheduleConfig]] = {
    "cosine": CosineConfig,
    "linear": LinearConfig,
    "constant": ConstantConfig,
    "wsd": WsdConfig,
    "one_cycle": OneCycleConfig,
    "lr_range": LrRangeConfig,
}


def warmup_steps(schedule: AnySchedule, total_steps: int) -> int | None:
    """Return the number of warm-up steps in a run of ``total_steps`` optimizer steps.

    None (unknown) for a user's class.
    """
    if not isinstance(schedule, ScheduleConfig):
        return None
    if schedule.warmup_steps is not None:
        return schedule.warmup_steps
    usual, set_ = schedule.usual_warmup_frac, schedule.warmup_frac
    return math.ceil(round((usual if set_ is None else set_) * total_steps, _DECIMALS))
