"""Rules for the length of a run, and for its device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.trainer import Strategy
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]

ACCELERATORS = ("auto", "cpu", "gpu")


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `trainer`."""
    trainer = config.trainer
    if trainer.max_steps <= 0 and trainer.max_epochs <= 0:
        yield ConfigError(
            "nothing bounds the run",
            where="trainer.max_steps",
            found=trainer.max_steps,
            expected="at least 1 step, or max_steps=-1 with max_epochs of at least 1",
        )
    elif trainer.max_steps == 0 or trainer.max_epochs == 0:
        name = "max_steps" if trainer.max_steps == 0 else "max_epochs"
        yield ConfigError(
            "zero trains nothing", where=f"trainer.{name}", found=0, expected="-1 or at least 1"
        )
    if trainer.accelerator not in ACCELERATORS:
        yield ConfigError(
            "unknown accelerator",
            where="trainer.accelerator",
            found=trainer.accelerator,
            expected=expected_name(trainer.accelerator, ACCELERATORS),
        )
    yield from _shared(config)


def _shared(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what several processes cannot share out among them."""
    trainer, several = config.trainer, config.trainer.world_size
    if trainer.strategy is Strategy.one:
        for name in ("devices", "num_nodes"):
            if getattr(trainer, name) != 1:
                yield ConfigError(
                    "one process trains",
                    where=f"trainer.{name}",
                    found=getattr(trainer, name),
                    expected="1, or a trainer of several processes",
                    remedy="choose trainer=ddp or trainer=fsdp",
                )
        return
    for name, what in (
        ("accumulate_grad_batches", "micro-batches of a step"),
        ("val_check_interval", "micro-batches between validations"),
    ):
        value = getattr(trainer, name)
        if value is not None and value % several:
            yield ConfigError(
                f"{several} processes cannot share the {what} evenly",
                where=f"trainer.{name}",
                found=value,
                expected=f"a multiple of {several}: trainer.devices × trainer.num_nodes",
            )
