"""What each task needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mens_exp.config.quant import QuantType
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


_READS_A_RUN = {
    "evaluate": "no run to evaluate",
    "chat": "no run to talk to",
    "push": "no run to upload",
    "export": "no run to pack",
}
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what the chosen task lacks."""
    name = config.task.name
    if name in _READS_A_RUN and config.path is None:
        yield ConfigError(
            _READS_A_RUN[name],
            where="path",
            expected="a run directory, or latest",
            remedy="add path=latest",
        )
    if config.path == "base" and name in _READS_A_RUN and name != "chat":
        yield ConfigError(
            "the base model alone can only be talked to",
            where="path",
            found="base",
            expected="a run directory, or latest",
        )
    if name == "evaluate" and config.suite.name == "none":
        yield ConfigError(
            "suite=none evaluates nothing",
            where="suite",
            found="none",
            expected="a suite, such as suite=heldout_syntax",
        )
    if name == "push" and not _REPO.fullmatch(config.repo or ""):
        yield ConfigError(
            "no repository to upload to",
            where="repo",
            found=config.repo,
            expected="<user>/<name>, the user or organisation and a name",
            remedy="add repo=<user>/<name>",
        )
    if name == "attribute":
        yield from _attribution(config)
    if name == "chat" and config.prompt is not None and not config.prompt.strip():
        yield ConfigError("asks nothing", where="prompt", expected="a question, or null")


def _attribution(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what leaves nothing to attribute, or nothing to sort by."""
    if config.quant.quant_type not in {QuantType.nf4, QuantType.fp4}:
        yield ConfigError(
            "has no 4-bit error to attribute",
            where="quant.quant_type",
            found=config.quant.quant_type.value,
            expected="nf4 or fp4",
        )
    if config.tokenizer.name == "vox":
        yield ConfigError(
            "a 4-bit base is measured on its own tokens",
            where="tokenizer",
            found="vox",
            expected="hf",
        )
    bounds = config.attribute.position_bounds
    if bounds[:1] != [0] or bounds != sorted(set(bounds)):
        yield ConfigError(
            "are no bounds of buckets",
            where="attribute.position_bounds",
            found=bounds,
            expected="ascending positions, the first 0, such as [0,16,64]",
        )
