"""Rules for the optimizer, the schedule, and their combination."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import FullConfig, has_frozen_base
from mens_exp.config.fields import plain, shown
from mens_exp.config.optim import (
    LowRankConfig,
    MuonConfig,
    OptimConfig,
    ProdigyConfig,
    ScheduleFreeConfig,
)
from mens_exp.config.schedule import (
    LrRangeConfig,
    ScheduleConfig,
    ScheduleKind,
    WsdConfig,
    warmup_steps,
)
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig


_WITH_BETAS = OptimConfig | MuonConfig | ProdigyConfig | LowRankConfig


def optim_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `optim`; a user-defined optimizer checks its own values."""
    optim = config.optim
    betas = getattr(optim, "betas", None) if isinstance(optim, _WITH_BETAS) else None
    if betas is not None and (len(betas) != 2 or not all(0 <= one < 1 for one in betas)):  # noqa: PLR2004
        yield ConfigError(
            "two decay rates are needed",
            where="optim.betas",
            found=betas,
            expected="two numbers >= 0 and < 1",
        )
    if isinstance(optim, MuonConfig):
        yield from _muon_problems(config)
    if isinstance(optim, ScheduleFreeConfig):
        yield from _schedule_free_problems(config, optim)
    if isinstance(optim, LowRankConfig) and not isinstance(config.backend, FullConfig):
        yield ConfigError(
            "gradients of whole weights are projected to a low rank, and the matrices of an "
            "adapter already have one",
            where="optim",
            found=f"{optim.name} with backend={config.backend.name}",
            expected="backend=full",
            remedy="choose backend=full to train every weight, or optim=adamw for an adapter",
        )


def _muon_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Refuse Muon without an adapter, and for an adapter without matrices."""
    if not has_frozen_base(config.backend, config.model.source):
        yield ConfigError(
            "Muon is meant for the matrices of adapters, but this backend trains embedding and "
            "head too",
            where="optim",
            found=f"muon with backend={config.backend.name}",
            expected="a backend whose base is frozen: qlora, lora or proxy",
            remedy="choose optim=adamw",
        )
    elif all(len(sizes) == 1 for sizes in config.lora.spec.form.tensors.values()):
        yield ConfigError(
            "Muon trains matrices, and this adapter has vectors alone",
            where="optim",
            found=f"muon with lora.variant={config.lora.spec.name}",
            expected="an adapter with matrices, such as lora.variant=lora",
            remedy="choose optim=adamw",
        )


def _schedule_free_problems(config: RunConfig, optim: ScheduleFreeConfig) -> Iterator[ConfigError]:
    """Refuse a decaying schedule, which averaging replaces, and a first beta of 0."""
    if getattr(config.schedule, "kind", None) is not ScheduleKind.constant:
        yield ConfigError(
            "a schedule-free optimizer averages its steps instead of making them smaller",
            where="schedule",
            found=f"{shown(plain(getattr(config.schedule, 'kind', None)))} with optim={optim.name}",
            expected="constant, whose warm-up it has too",
            remedy="choose schedule=constant",
        )
    if optim.betas and optim.betas[0] == 0:
        yield ConfigError(
            "gradients would be taken at the last step, and the average would be ignored",
            where="optim.betas",
            found=optim.betas,
            expected="a first number above 0",
        )


def schedule_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the problems of `schedule`."""
    schedule, trainer = config.schedule, config.trainer
    if not isinstance(schedule, ScheduleConfig):
        return  # a user's class checks its own values
    if isinstance(schedule, LrRangeConfig):
        yield from _range_problems(config, schedule)
    elif schedule.warmup_steps is not None and schedule.warmup_frac is not None:
        yield ConfigError(
            "warm-up is set twice",
            where="schedule.warmup_frac",
            found=f"{schedule.warmup_frac:g} and warmup_steps {schedule.warmup_steps}",
            expected="one of the two",
            remedy="set the other one to null",
        )
    elif trainer.max_steps > 0 and trainer.max_epochs <= 0:
        yield from warmup_problems(config, trainer.max_steps, "trainer.max_steps")


def _range_problems(config: RunConfig, schedule: LrRangeConfig) -> Iterator[ConfigError]:
    if schedule.lowest >= schedule.highest:
        yield ConfigError(
            "the rate of a range test must rise",
            where="schedule.lowest",
            found=schedule.lowest,
            expected=f"less than schedule.highest ({schedule.highest:g})",
        )
    if not has_frozen_base(config.backend, config.model.source):
        yield ConfigError(
            "a range test compares each step with the frozen base, and here the base is trained",
            where="schedule",
            found=f"lr_range with backend={config.backend.name}",
            expected="a backend whose base is frozen: qlora, lora or proxy",
            remedy="choose schedule=cosine, and sweep optim.lr",
        )
    if isinstance(config.optim, ProdigyConfig):
        yield ConfigError(
            "Prodigy estimates its rate, so a range test has nothing to find",
            where="schedule",
            found="lr_range with optim=prodigy",
            expected="another optimizer, or another schedule",
            remedy="choose schedule=cosine",
        )


def warmup_problems(config: RunConfig, total_steps: int, bound: str) -> Iterator[ConfigError]:
    """Yield a problem if warm-up never ends.

    Args:
        config: the whole configuration.
        total_steps: optimizer steps of the run.
        bound: the setting that determines this length, for the message.
    """
    schedule = config.schedule
    if not isinstance(schedule, ScheduleConfig):
        return
    steps = schedule.warmup_steps
    if isinstance(schedule, WsdConfig):
        warmup, decay = warmup_steps(schedule, total_steps) or 0, schedule.decay_steps(total_steps)
        if warmup + decay > total_steps > 1:
            yield ConfigError(
                "warm-up and decay overlap",
                where="schedule.decay_frac",
                found=f"{schedule.decay_frac:g}: {decay} steps after {warmup} of warm-up",
                expected=f"together at most {bound} ({total_steps})",
            )
    # A fraction scales with the run, but a run of one step is entirely warm-up.
    if steps is not None and steps >= total_steps:
        yield ConfigError(
            "warm-up lasts as long as the run",
            where="schedule.warmup_steps",
            found=steps,
            expected=f"less than {bound} ({total_steps})",
        )
