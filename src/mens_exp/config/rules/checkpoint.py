"""Settings of checkpoints that nothing would read."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.checkpoint import CheckpointConfig
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is set of `checkpoint` though no callback saves any."""
    if "checkpoint" in config.callbacks:
        return
    default = CheckpointConfig()
    for name in ("every_n_steps", "keep"):
        value = getattr(config.checkpoint, name)
        if value != getattr(default, name):
            yield ConfigError(
                "has no effect without the checkpoint callback",
                where=f"checkpoint.{name}",
                found=value,
                expected="callbacks=default, or another choice with checkpoint in it",
            )
