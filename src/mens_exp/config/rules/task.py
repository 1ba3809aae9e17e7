"""What each task needs."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mens_exp.config.task import ExportFormat
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["problems", "unread"]


_READS_A_PATH = {
    "evaluate": "no run to evaluate",
    "chat": "no run to talk to",
    "push": "no run to upload",
    "export": "nothing to export",
    "serve": "no model to serve",
}
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what the chosen task lacks."""
    name = config.task.name
    if name in _READS_A_PATH and config.path is None:
        yield ConfigError(
            _READS_A_PATH[name],
            where="path",
            expected="a model directory"
            if _reads_a_model(config)
            else "a run directory, or latest",
            remedy="add path=<directory>" if _reads_a_model(config) else "add path=latest",
        )
    if config.path == "base" and name in _READS_A_PATH and name != "chat":
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
    if name == "chat" and config.prompt is not None and not config.prompt.strip():
        yield ConfigError("asks nothing", where="prompt", expected="a question, or null")


def unread(config: RunConfig, keys: Iterable[str]) -> Iterator[ConfigError]:
    """Yield the keys of task=export that the chosen format does not read."""
    if config.task.name != "export":
        return
    read_by = {"gguf": "gguf", "export": "bundle"}
    for key in keys:
        group = key.partition(".")[0]
        if group in read_by and read_by[group] != config.format.value:
            yield ConfigError(
                f"has no effect with format={config.format.value}",
                where=key,
                expected=f"format={read_by[group]}",
                remedy=f"drop {key}, or add format={read_by[group]}",
            )


def _reads_a_model(config: RunConfig) -> bool:
    is_packed = config.format is ExportFormat.bundle
    return config.task.name == "serve" or (config.task.name == "export" and not is_packed)
