"""Rules of task=promote, for each of the three things that it does."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mens_exp.config.policy import DECIDES, BurnProductionPolicy
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]

_SHA256 = re.compile(r"[0-9a-f]{64}")
_PAIR = 2
_DECIDES = "policy=<name> and path=<compare.json>"
_ANY = f"{_DECIDES}, or open=<cycle>, or replay=true"


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what the task lacks, and what contradicts."""
    if config.task.name != "promote":
        return
    if config.ledger is None:
        yield ConfigError(
            "no ledger to read and write",
            where="ledger",
            expected="a file, made when it is not there",
            remedy="add ledger=<file>",
        )
    asked = [DECIDES.holds(config), config.open is not None, config.replay]
    if sum(asked) != 1:
        what = "several things at once" if sum(asked) > 1 else "nothing to do"
        yield ConfigError(what, where="task=promote", expected=_ANY)
    if DECIDES.holds(config) and config.path is None:
        yield ConfigError(
            "no evidence",
            where="path",
            expected="compare.json files, or directories of task=compare",
            remedy="add path=<compare.json>",
        )
    if config.open is not None:
        yield from _cycle_problems(config)


def _cycle_problems(config: RunConfig) -> Iterator[ConfigError]:
    told = config.promote
    if config.policy is not None and not isinstance(config.policy, BurnProductionPolicy):
        yield ConfigError(
            "no cycle is opened for this policy",
            where="policy",
            found=config.policy.name,
            expected="burn_production, the only one that rests on cycles",
        )
    if not config.open or not config.open.strip():
        yield ConfigError("a cycle has a name", where="open", found=config.open)
    if not _SHA256.fullmatch(told.suite_digest or ""):
        yield ConfigError(
            "a cycle freezes its suite",
            where="promote.suite_digest",
            found=told.suite_digest,
            expected="64 hexadecimal digits, as a scorecard has them",
        )
    if not told.seeds or len(set(told.seeds)) != len(told.seeds):
        yield ConfigError(
            "a cycle freezes its seeds",
            where="promote.seeds",
            found=told.seeds,
            expected="seeds, each once",
        )
    if len(set(told.arms)) < _PAIR:
        yield ConfigError(
            "a cycle freezes its arms",
            where="promote.arms",
            found=told.arms,
            expected="at least two backends or names of arms",
        )
    if not told.factor:
        yield ConfigError(
            "a hypothesis is about a factor",
            where="promote.factor",
            expected="what the arms differ in, such as backend",
        )
