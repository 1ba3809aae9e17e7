"""What each task needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what the chosen task lacks."""
    if config.task.name == "evaluate" and config.path is None:
        yield ConfigError(
            "no run to evaluate",
            where="path",
            expected="a run directory, or latest",
            remedy="add path=latest",
        )
    if config.task.name == "evaluate" and config.suite.name == "none":
        yield ConfigError(
            "suite=none evaluates nothing",
            where="suite",
            found="none",
            expected="a suite, such as suite=heldout_syntax",
        )
