"""Resolve the loose names of a command exactly, before a run begins.

``latest`` is the run it means now, a branch of the hub the commit, a relative path the whole one.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from mens_exp.config.data import HubData, MixData
from mens_exp.config.mix import sources_of
from mens_exp.config.model import HfModel
from mens_exp.config.task import ExportFormat, OllamaForm
from mens_exp.config.validate import TASK_READS, problems_of
from mens_exp.errors import MensError, NoEffectError, Problems
from mens_exp.layout.hub import pinned
from mens_exp.layout.starting_adapter import find
from mens_exp.plan.preflight import preflight

if TYPE_CHECKING:
    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig

__all__ = ["settle_rows", "settled"]

_WITH_FILES = frozenset({"humaneval", "jsonl", "lm_eval", "rust", "scorecard_spec"})
_ALWAYS_MERGED = (ExportFormat.hf, ExportFormat.gguf)


def settled(cell: Cell) -> list[MensError]:
    """Settle what a cell names, and list what keeps its task from being done."""
    return [*_settled(cell), *_suite_problems(cell.config)]


def _suite_problems(config: RunConfig) -> list[MensError]:
    """List what is wrong with a suite's own file, where the task reads one."""
    if "suite" not in TASK_READS[config.task.name] or config.suite.name not in _WITH_FILES:
        return []
    from mens_exp.evals.catalogue import file_problems

    return file_problems(config.suite, calls_functions=config.task.name == "evaluate")


def _settled(cell: Cell) -> list[MensError]:
    """Settle model, rows and paths."""
    config = cell.config
    if "path" not in TASK_READS[config.task.name]:
        return _settle_without_path(cell)
    if config.path is None and config.task.name != "merge":
        return []  # told by the rules
    try:
        return _settle_path(cell)
    except Problems as several:
        return list(several.problems)
    except MensError as error:
        return [error]


def _settle_without_path(cell: Cell) -> list[MensError]:
    if cell.config.task.name == "doctor":
        return []
    if cell.config.task.name == "corpus":
        return _settle_corpus(cell)
    _settle_model(cell)
    settle_rows(cell)
    return _settle_start(cell) or preflight(cell.config)


def _settle_path(cell: Cell) -> list[MensError]:
    from mens_exp.tasks.subject import leaving_problems, reads_a_model

    config = cell.config
    of_records = {
        "inspect": _settle_inspected,
        "compare": _settle_study,
        "sync": _settle_study,
        "promote": _settle_evidence,
    }.get(config.task.name)
    if of_records is not None:
        return of_records(cell)
    if reads_a_model(config):
        from mens_exp.export.model_source import model_directory, occupied

        assert config.path is not None, "the caller has asked"
        _put_path(cell, str(model_directory(config.path)))
        return [*leaving_problems(config), *occupied(config.out)]
    if _merges(config):
        return [*_settle_merge(cell), *leaving_problems(config)]
    if config.task.name == "export" and config.format is not ExportFormat.bundle:
        return _settle_adapter(cell)
    return _settle_subject(cell)


def _put_path(cell: Cell, path: str) -> None:
    cell.config.path = cell.composed.values.path = path


def _settle_model(cell: Cell) -> None:
    """Replace a branch of the hub by the commit it means now, and a relative path by a whole one.

    What cannot be settled stays as it is; preflight says why.
    """
    model = cell.config.model
    if not isinstance(model, HfModel):
        return
    try:
        settled = pinned(model)
    except MensError:
        return
    cell.config.model = settled
    cell.composed.values.model.id = settled.id
    cell.composed.values.model.revision = settled.revision


def settle_rows(cell: Cell) -> None:
    """Replace a branch of a dataset by the commit it means now; what cannot be stays as it is."""
    data = cell.config.data
    if not isinstance(data, HubData | MixData):
        return
    from mens_exp.corpus import hub_rows  # 30 ms, which other plans do without

    try:
        if isinstance(data, HubData):
            data.revision = hub_rows.pinned(data)
            cell.composed.values.data.revision = data.revision
        else:
            for entry, source in zip(data.sources, sources_of(data), strict=True):
                if isinstance(source.data, HubData):
                    entry["revision"] = hub_rows.pinned(source.data)
            cell.composed.values.data.sources = data.sources
    except MensError:
        return


def _settle_corpus(cell: Cell) -> list[MensError]:
    """Replace paths by whole ones and a branch by the commit it means now, and check the places."""
    from mens_exp.corpus.steps.places import place_problems
    from mens_exp.tasks.corpus import settled_places

    config = cell.config
    if problems_of(config):
        return []  # told by the rules
    settled = settled_places(config.corpus)
    cell.config.corpus = settled
    stored = cell.composed.values.corpus
    stored.input, stored.output = settled.input, settled.output
    stored.extract.commit = settled.extract.commit
    return place_problems(settled)


def _settle_subject(cell: Cell) -> list[MensError]:
    """Replace ``latest`` by the run it means now, before a run of our own becomes the latest."""
    from mens_exp.tasks.subject import base_problems, config_of, sending_problems, subject_of

    config = cell.config
    assert config.path is not None, "the caller has asked"
    if config.path == "base" and config.task.name == "chat":
        _settle_model(cell)
        return base_problems(config)
    if config.task.name == "evaluate":
        return _settle_evaluated(cell)
    subject = subject_of(config.path)
    if config.task.name == "chat":
        config_of(subject)  # they build what it names
    _put_path(cell, str(subject.path))
    return sending_problems(config, subject)


def _settle_evaluated(cell: Cell) -> list[MensError]:
    """Replace what `path` names by what it means now, and refuse what cannot be scored."""
    from mens_exp.tasks.evaluated import problems, subject_named

    config = cell.config
    assert config.path is not None, "the caller has asked"
    subject = subject_named(config.path)
    _put_path(cell, subject.path)
    if subject.run is None:
        _settle_model(cell)
        settle_rows(cell)
    # The check puts the adapter's layers into a configuration: into one of its own.
    return problems(copy.deepcopy(config), subject)


def _merges(config: RunConfig) -> bool:
    """Tell whether the task merges an adapter: to keep the model, or on the way to an export."""
    if config.task.name != "export":
        return config.task.name == "merge"
    for_ollama = config.format is ExportFormat.ollama and config.ollama.form is OllamaForm.merged
    return config.format in _ALWAYS_MERGED or for_ollama


def _settle_study(cell: Cell) -> list[MensError]:
    """Replace what `path` names by the runs and sweeps that it means now."""
    from mens_exp.tasks.study_runs import named_paths

    assert cell.config.path is not None, "the caller has asked"
    _put_path(cell, ",".join(named_paths(cell.config.path)))
    return []


def _settle_evidence(cell: Cell) -> list[MensError]:
    """Replace what `path` names by the files of the comparisons."""
    from mens_exp.tasks.promotion_evidence import comparison_files

    assert cell.config.path is not None, "the caller has asked"
    _put_path(cell, ",".join(map(str, comparison_files(cell.config.path))))
    return []


def _settle_inspected(cell: Cell) -> list[MensError]:
    """Replace what `path` names by what it means now, and refuse what cannot be done with that."""
    from mens_exp.tasks.inspected import inspected, problems

    assert cell.config.path is not None, "the caller has asked"
    found = inspected(cell.config.path)
    _put_path(cell, str(found.path))
    return problems(cell.config, found)


def _settle_merge(cell: Cell) -> list[MensError]:
    """Replace what `path` names by the adapter directory that it means now."""
    from mens_exp.tasks.merge_inputs import adapter_place, input_problems

    problems = input_problems(cell.config)
    if cell.config.path is not None and not problems:
        place = adapter_place(cell.config.path)
        _put_path(cell, str(place.directory))
        if place.run is not None:
            problems += _told_by_the_run(cell)
    return problems


def _told_by_the_run(cell: Cell) -> list[MensError]:
    """Refuse what a certificate takes from the run whose adapter it is, not from the command."""
    keys = {text.lstrip("+~").partition("=")[0] for text in cell.composed.overrides}
    return [
        NoEffectError(
            "on the adapter of a run, which is measured on its own rows",
            where=key,
            expected="no such setting, or an adapter without its run",
            remedy=f"drop {key}; parity.text=<file> names another text",
        )
        for key in sorted(keys)
        if key.partition(".")[0] in {"data", "tokenizer"}
    ]


def _settle_adapter(cell: Cell) -> list[MensError]:
    """Replace what ``path`` names by the adapter's directory, and check its conversion."""
    from mens_exp.tasks.conversion import place_of, problems

    config = cell.config
    assert config.path is not None, "the caller has asked"
    place = place_of(config.path)
    _put_path(cell, str(place.directory))
    if place.run is None:
        _settle_model(cell)
    return problems(config, cell.composed.overrides)


def _settle_start(cell: Cell) -> list[MensError]:
    """Replace what ``lora.init_from`` names by the adapter directory that it means now."""
    if cell.config.lora.init_from is None:
        return []
    try:
        cell.config.lora.init_from = str(find(cell.config.lora.init_from))
    except MensError:
        return []  # preflight says so, beside everything else
    cell.composed.values.lora.init_from = cell.config.lora.init_from
    return []
