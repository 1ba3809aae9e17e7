"""Rules against a sandbox that has no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["unread"]


def unread(config: RunConfig, keys: Iterable[str]) -> Iterator[ConfigError]:
    """Yield explicit settings of a sandbox beside a suite that executes nothing.

    Args:
        config: the whole configuration.
        keys: override keys as given.
    """
    if config.task.name == "corpus":
        yield from _of_a_corpus(config, keys)
        return
    if config.suite.executes:
        return
    for key in keys:
        if key.partition(".")[0] == "sandbox":
            yield ConfigError(
                f"has no effect with suite={config.suite.name}, which executes nothing",
                where=key,
                expected="a suite that executes programs",
                remedy=f"drop {key}, or choose another suite",
            )


def _of_a_corpus(config: RunConfig, keys: Iterable[str]) -> Iterator[ConfigError]:
    if config.corpus.validate.compile and "validate" in config.corpus.steps:
        return
    for key in keys:
        if key.partition(".")[0] == "sandbox":
            yield ConfigError(
                "has no effect on a corpus whose code is not compiled",
                where=key,
                expected="the step validate and corpus.validate.compile=true beside it",
                remedy=f"drop {key}, or compile",
            )
