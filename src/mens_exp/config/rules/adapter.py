"""Which adapter is the result, and when a run may end for want of a better one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.adapter import Selection
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what `adapter.select=best` and early stopping lack."""
    needing: list[tuple[str, str | None]] = []
    if config.adapter.select is Selection.best:
        needing.append(("adapter.select", "best"))
    if "early_stopping" in config.callbacks:
        needing.append(("callbacks.early_stopping", None))
    if needing:
        yield from _validations(config, needing)


def _validations(config: RunConfig, needing: list[tuple[str, str | None]]) -> Iterator[ConfigError]:
    interval = config.trainer.val_check_interval
    each = config.trainer.accumulate_grad_batches
    remedy = f"add trainer.val_check_interval=<micro-batches, a multiple of {each}>"
    if interval is None:
        for where, found in needing:
            yield ConfigError(
                "needs validations while training runs",
                where=where,
                found=found,
                expected="trainer.val_check_interval to be set",
                remedy=remedy,
            )
    elif interval % each:
        yield ConfigError(
            "a validation would fall inside an optimizer step",
            where="trainer.val_check_interval",
            found=interval,
            expected=f"a multiple of trainer.accumulate_grad_batches ({each}), "
            f"which {' and '.join(where for where, _ in needing)} need",
        )
