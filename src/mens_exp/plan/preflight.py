"""Errors that can be found before a run directory exists or a weight is read; torch-free."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from mens_exp.errors import ConfigError, MensError, Problems
from mens_exp.plan.checks import (
    adapter,
    backend,
    classes,
    contract,
    data,
    logger,
    lora,
    machine,
    model,
    optim,
    processes,
    quant,
    sandbox,
    tokenizer,
    weights,
)
from mens_exp.rows.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.root import RunConfig

__all__ = ["preflight", "writable_cache"]


def _cache(config: RunConfig) -> Iterator[MensError]:
    del config
    writable_cache()
    yield from ()


_CHECKS = (
    _cache,
    contract.check,
    optim.check,
    data.check,
    backend.check,
    model.check,
    weights.check,
    quant.check,
    lora.check,
    adapter.check,
    tokenizer.check,
    logger.check,
    sandbox.check,
    classes.check,
    processes.check,
    machine.check,
)
# It builds neither a backend nor an adapter and trains nothing.
_OF_ATTRIBUTION = (
    _cache,
    data.check,
    model.check,
    weights.check,
    quant.check,
    tokenizer.check,
    classes.check,
    machine.check,
)


def preflight(config: RunConfig) -> list[MensError]:
    """List everything wrong with the files and limits that a run would meet."""
    problems: list[MensError] = []
    for check in _OF_ATTRIBUTION if config.task.name == "attribute" else _CHECKS:
        try:
            for problem in check(config):
                problems.append(problem)  # noqa: PERF402  # kept when the check gives up later
        except Problems as several:
            problems += several.problems
        except MensError as error:
            problems.append(error)
    return list({str(problem): problem for problem in problems}.values())


def writable_cache() -> Path:
    """Return the cache folder, made where it is missing.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(root, os.W_OK) else "no permission to write"
    except OSError as error:
        reason = error.strerror or type(error).__name__
    if reason is not None:
        raise ConfigError(
            f"the cache folder cannot be used: {reason}",
            where="MENS_EXP_CACHE",
            found=str(root),
            remedy="set MENS_EXP_CACHE to a folder that can be written",
        )
    return root
