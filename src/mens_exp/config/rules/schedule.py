"""Rules for the learning rate's schedule, given the length of the run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.schedule import warmup_steps
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems", "too_long"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `schedule`."""
    schedule, trainer = config.schedule, config.trainer
    if schedule.warmup_steps is not None and schedule.warmup_frac is not None:
        yield ConfigError(
            "warm-up is set twice",
            where="schedule.warmup_frac",
            found=f"{schedule.warmup_frac:g} beside warmup_steps {schedule.warmup_steps}",
            expected="one of the two",
            remedy="set the other one to null",
        )
    elif trainer.max_steps > 0 and trainer.max_epochs <= 0:
        yield from too_long(config, trainer.max_steps, "trainer.max_steps")


def too_long(config: RunConfig, total_steps: int, bound: str) -> Iterator[ConfigError]:
    """Yield a problem where warm-up never ends.

    Args:
        config: the whole configuration.
        total_steps: optimizer steps of the run.
        bound: what makes it so long, for the message.
    """
    schedule = config.schedule
    steps = schedule.warmup_steps
    # By fraction it is shorter by itself, but for a run of one step, which then is all warm-up.
    if steps is not None and warmup_steps(schedule, total_steps) >= total_steps:
        yield ConfigError(
            "warm-up lasts as long as the run",
            where="schedule.warmup_steps",
            found=steps,
            expected=f"less than {bound} ({total_steps})",
        )
