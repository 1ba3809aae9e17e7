"""Report all problems before a run directory is created or a weight is read; torch-free."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from itertools import chain, islice
from typing import TYPE_CHECKING

from mens_exp.config.data import RowsData, WrittenData
from mens_exp.config.data_sources import OwnData
from mens_exp.config.fields import range_problems
from mens_exp.config.rules.data import data_problems as rule_problems
from mens_exp.corpus.given_rows import given_in, refuse_unsteady
from mens_exp.corpus.row_files import read_own
from mens_exp.corpus.source import labelling_of, load_rows
from mens_exp.corpus.split import asked
from mens_exp.errors import ConfigError, DataError, MensError, Problems
from mens_exp.layout.model_cache import ready_directory
from mens_exp.planning.checks import adapter, classes, machine, model
from mens_exp.planning.contract import contract_of
from mens_exp.planning.planner import Gate, environment_of, refusals
from mens_exp.rows.cache import cache_root
from mens_exp.rows.encode import MOST_BAD_ROWS, rendered_answers
from mens_exp.rows.rewards import refuse_single_answers
from mens_exp.tokenizer.implementations import VoxTokenizer
from mens_exp.tokenizer.load import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.row_files import Rows
    from mens_exp.rows.schema import TrainingPair


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
            load_rows(data, cache_root(), keep=True)  # raises if no rows are left
        # A plan reads our own rows only if the objective needs fields that they may lack.
        if labelling_of(config).rows.fields and not any(rule_problems(config)):
            _refuse_unlearned(config, load_rows(data, cache_root(), keep=True))
        return
    problems = {problem.where for problem in rule_problems(config)}
    if isinstance(data, OwnData) and any(classes.check_group(config, "data")):
        return  # reported by the check of classes
    if not any(range_problems(data)) and not problems:
        rows = load_rows(data, cache_root(), keep=True)
        if given_in(data):
            refuse_unsteady(rows.sha256, load_rows(data, cache_root(), keep=True).sha256)
        _refuse_unlearned(config, rows)
        _refuse_unrendered(config, rows)
    elif (
        problems <= {"data.val_frac"} and isinstance(data, RowsData) and not data.streaming
    ):  # already reported; the rows can still be checked
        read_own(data)
    yield from ()


def _refuse_unlearned(config: RunConfig, rows: Rows) -> None:
    """Refuse rows that lack fields the objective reads, or have fields it would ignore.

    Raises:
        DataError: a row does not fit the objective, or its answer has no other answer to be
            compared with; the message names the first such row.
    """
    documents = labelling_of(config).rows
    for pair in islice(rows.train, _TRIED_ROWS):
        documents.check(pair)
    if config.objective.spec.compares_groups and not rows.sides_sha256:  # a run reads large files
        refuse_single_answers(rows.train)
        refuse_single_answers(rows.val)
    if documents.needs_another_row:
        _refuse_lone_rows(config, rows)


def _refuse_lone_rows(config: RunConfig, rows: Rows) -> None:
    """Refuse a side of the split with a single row, whose own answer would stand in for another's.

    Raises:
        DataError: there is such a side.
    """
    sides = (
        ("train on", rows.train, "give more rows"),
        ("validate on", rows.val, "raise data.val_frac, or give more rows"),
    )
    for name, side, remedy in sides:
        if len(side) == 1:
            raise DataError(
                f"objective={config.objective.name} reads each prompt with another row's answer",
                where=side[0].name,
                found=f"the only row to {name}",
                expected="two rows or more",
                remedy=remedy,
            )


_TRIED_ROWS = 1_000  # of each side, so that a plan takes a second; a run checks all rows


def _refuse_unrendered(config: RunConfig, rows: Rows) -> None:
    """Refuse rows of which the chat template drops or alters a part, as the run would.

    Of the rows with tools or a system prompt, the first few of each sequence of turns are rendered.

    Raises:
        MensError: the tokenizer cannot be read, or the template alters rows.
    """
    chosen = _rendered_differently(rows)
    template = model.known_template(config) if chosen else None
    if template is not None:  # otherwise the base is yet to be downloaded or unpacked
        directory = ready_directory(config.model, cache_root())
        tokenizer = (
            VoxTokenizer(chat_template=template, date=config.tokenizer.date)
            if directory is None
            else load_tokenizer(config.tokenizer, directory)
        )
        rendered_answers(chosen, tokenizer, labelling_of(config))


def _rendered_differently(rows: Rows) -> list[TrainingPair]:
    """Return some rows for each sequence of turns of which a template may drop a part."""
    tried: Counter[tuple[object, ...]] = Counter()
    chosen = []
    for pair in chain(islice(rows.train, _TRIED_ROWS), islice(rows.val, _TRIED_ROWS)):
        turns = _turns(pair)
        tried[turns] += 1
        if turns and tried[turns] <= MOST_BAD_ROWS:
            chosen.append(pair)
    return chosen


def untried_template(config: RunConfig) -> list[str]:
    """Warn about rows of which a chat template that is not yet available may drop parts.

    Returns:
        One warning if the rows have tools or system prompts and the model is not downloaded or
        unpacked yet; an empty list if no row is affected or `check_data` has checked them.
    """
    data = config.data
    if not isinstance(data, WrittenData) or model.known_template(config) is not None:
        return []
    chosen = _rendered_differently(load_rows(data, cache_root(), keep=True))
    held = [json.loads(pair.conversation) for pair in chosen if pair.conversation is not None]
    parts = [
        *(["tools"] if any("tools" in one for one in held) else []),
        *(["system prompts"] if any(pair.system is not None for pair in chosen) else []),
    ]
    if not parts:
        return []
    said = (
        f"the rows have {' and '.join(parts)}, which the model's chat template may drop; it is read"
        " once the model is downloaded or unpacked, and rows that it drops parts of are refused "
        "then; to know before, write tokenizer.chat_template=<file>"
    )
    return [said]


def _turns(pair: TrainingPair) -> tuple[object, ...]:
    """Return the parts of a row that a template may drop, in their order; empty if none."""
    if pair.conversation is None:
        return () if pair.system is None else ("system", len(pair.history))
    held = json.loads(pair.conversation)
    turns = ((turn["role"], len(turn.get("tool_calls", ()))) for turn in held["messages"])
    return (pair.system is None, "tools" in held, *turns)


def _cache(config: RunConfig) -> Iterator[MensError]:
    del config
    writable_cache()
    yield from ()


_CHECKS = (
    _cache,
    check_contract,
    machine.check_optimizer,
    machine.check_quantizers,
    machine.check_kernels,
    machine.check_compiling,
    machine.check_offload,
    machine.check_fp8,
    check_data,
    model.check_backend,
    model.check_model,
    model.check_weight_headers,
    model.check_teacher,
    model.check_quantization,
    adapter.check_lora,
    adapter.check_initial_adapter,
    model.check_chat_template,
    machine.check_logger,
    machine.check_sandbox,
    classes.check,
    machine.check_machine,
)
# Attribution builds neither a backend nor an adapter, and trains nothing.
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
        by_slurm: whether the run is a job that Slurm will start on other machines.
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
