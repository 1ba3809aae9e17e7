"""Rules of tasks: the settings that each needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mens_exp.config.quant import QuantType
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


_READS_A_PATH = {
    "evaluate": "no run to evaluate",
    "chat": "no run to talk to",
    "push": "no run to upload",
    "export": "nothing to export",
    "serve": "no model to serve",
    "inspect": "nothing to inspect",
    "compare": "nothing to compare",
    "sync": "nothing to upload",
}
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what the chosen task lacks."""
    name = config.task.name
    if name in _READS_A_PATH and config.path is None and not _brings_models(config):
        yield ConfigError(
            _READS_A_PATH[name],
            where="path",
            expected="a model directory"
            if _reads_a_model(config)
            else "runs, a sweep's directory, or latest"
            if name in {"compare", "sync"}
            else "a run directory, or latest",
            remedy="add path=<directory>" if _reads_a_model(config) else "add path=latest",
        )
    if config.path == "base" and name in _READS_A_PATH and name not in {"chat", "evaluate"}:
        yield ConfigError(
            "the base model alone can only be talked to, or evaluated",
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
    export = config.export
    if export.double_quant is not None and export.base_quant is QuantType.none:
        yield ConfigError(
            "contradicts export.base_quant=none, which has no constants",
            where="export.double_quant",
            found=export.double_quant,
            expected="null, or another export.base_quant",
        )
    if name == "attribute":
        yield from _attribution(config)
    if name in {"compare", "evaluate"} and config.logger.sink not in {"wandb", "none"}:
        yield ConfigError(
            f"logs training steps, and task={name} has none",
            where="logger",
            found=config.logger.sink,
            expected="wandb or none",
        )
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


def _brings_models(config: RunConfig) -> bool:
    """Tell whether what is evaluated stands in the suite's own file."""
    return config.task.name == "evaluate" and config.suite.name == "scorecard_spec"


def _reads_a_model(config: RunConfig) -> bool:
    return config.task.name == "serve"
