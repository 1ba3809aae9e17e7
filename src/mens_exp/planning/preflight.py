"""Report all problems before a run directory is created or a weight is read; torch-free."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from mens_exp.config.data import RowsData, WrittenData
from mens_exp.config.data_sources import OwnData
from mens_exp.config.fields import range_problems
from mens_exp.config.rules.data import data_problems as rule_problems
from mens_exp.corpus.given_rows import given_in, refuse_unsteady
from mens_exp.corpus.row_files import read_own
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import asked
from mens_exp.errors import ConfigError, MensError, Problems
from mens_exp.planning.checks import adapter, classes, machine, model
from mens_exp.planning.contract import contract_of
from mens_exp.planning.planner import Gate, environment_of, refusals
from mens_exp.rows.cache import cache_root

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.root import RunConfig


def check_contract(config: RunConfig) -> Iterator[MensError]:
    """Yield every reason to refuse the run's contract."""
    for gate, error in refusals(contract_of(config), environment_of(config)):
        if gate is not Gate.FLAGS:  # reported by the rules of their groups, with dotted paths
            yield error


def check_data(config: RunConfig) -> Iterator[MensError]:
    """Yield the problems of the row files."""
    data = config.data
    if not isinstance(data, WrittenData):
        if asked(data.filter) and not any(range_problems(data)) and not any(rule_problems(config)):
            load_rows(data, cache_root())  # raises if no rows are left
        return
    problems = {problem.where for problem in rule_problems(config)}
    if isinstance(data, OwnData) and any(classes.check_group(config, "data")):
        return  # reported by the check of classes
    if not any(range_problems(data)) and not problems:
        rows = load_rows(data, cache_root())
        if given_in(data):
            refuse_unsteady(rows.sha256, load_rows(data, cache_root()).sha256)
    elif (
        problems <= {"data.val_frac"} and isinstance(data, RowsData) and not data.streaming
    ):  # already reported; the rows can still be checked
        read_own(data)
    yield from ()


def _cache(config: RunConfig) -> Iterator[MensError]:
    del config
    writable_cache()
    yield from ()


_CHECKS = (
    _cache,
    check_contract,
    machine.check_optimizer,
    check_data,
    model.check_backend,
    model.check_model,
    model.check_weight_headers,
    model.check_quantization,
    adapter.check_lora,
    adapter.check_initial_adapter,
    model.check_chat_template,
    machine.check_logger,
    machine.check_sandbox,
    classes.check,
    machine.check_machine,
)
# Builds neither a backend nor an adapter, and trains nothing.
_OF_ATTRIBUTION = (
    _cache,
    check_data,
    model.check_model,
    model.check_weight_headers,
    model.check_quantization,
    model.check_chat_template,
    classes.check,
    machine.check_machine,
)


def preflight(config: RunConfig, *, by_slurm: bool = False) -> list[MensError]:
    """List the problems of all files and limits that a run depends on.

    Args:
        config: the whole configuration.
        by_slurm: whether the run is a job that Slurm will start, on nodes of its own.
    """
    problems: list[MensError] = []
    processes = functools.partial(machine.check_processes, by_slurm=by_slurm)
    of_training = (*_CHECKS, processes)
    for check in _OF_ATTRIBUTION if config.task.name == "attribute" else of_training:
        try:
            for problem in check(config):
                problems.append(problem)  # noqa: PERF402  # preserved if the check fails later
        except Problems as several:
            problems += several.problems
        except MensError as error:
            problems.append(error)
    return list({str(problem): problem for problem in problems}.values())


def writable_cache() -> Path:
    """Return the cache directory, creating it if necessary.

    Raises:
        ConfigError: it cannot be created or written to.
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
