"""Validation of typed values: ranges, consistency, and settings without effect."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.config.fields import TRAINING, UNSET, declared, in_range, plain, range_problems, shown
from mens_exp.config.root import RunConfig
from mens_exp.config.rules import base, data, graph, lora, optim, suite, task, training
from mens_exp.config.schemas import declarations, declarations_of
from mens_exp.config.task import TASKS
from mens_exp.errors import ConfigError, MensError, NoEffectError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.config.fields import Condition, Declaration

# Groups whose options also set keys of other groups.
_BUNDLES = frozenset({"preset", "experiment"})
_EVERYWHERE = frozenset({"task", "hydra", "sweep"})


def _reads(task: str) -> frozenset[str]:
    """Return the settings, sections and groups whose declarations list a task."""
    naming = {
        path
        for path, several in declarations().items()
        if any(task in one.read_by for one in several)
    }
    inner = {path for path in naming if path.rpartition(".")[0] in naming}
    return frozenset(naming - inner) | (_BUNDLES if task in TRAINING else frozenset())


TASK_READS: dict[str, frozenset[str]] = {task: _reads(task) for task in TASKS}
_READ_OF_THE_BASE = frozenset({"model", "tokenizer", "quant", "lora", "backend"})


def problems_of(config: RunConfig) -> list[MensError]:
    """List all problems of typed values that can be found without reading files."""
    problems: list[MensError] = [*range_problems(config), *_idle_values(config, config)]
    rules = (
        training.trainer_problems,
        optim.schedule_problems,
        optim.optim_problems,
        training.adapter_problems,
        data.data_problems,
        lora.lora_problems,
        training.objective_problems,
        graph.backend_problems,
        graph.quant_problems,
        base.sharded_problems,
        base.offload_problems,
        base.fp8_problems,
    )
    for rule in rules:
        problems += rule(config)
    if not any(range_problems(config.model, "model.")):  # its rules divide by its values
        problems += graph.model_problems(config)
    problems += task.task_problems(config)
    problems += task.merge_problems(config)
    problems += data.corpus_problems(config)
    problems += suite.suite_problems(config)
    problems += task.compare_problems(config)
    problems += task.promote_problems(config)
    problems += task.study_problems(config)
    return problems


def settings_read(values: Mapping[str, Any], task: str) -> dict[str, Any]:
    """Return the settings, sections and groups of a configuration that a task reads.

    Args:
        values: a configuration as plain data; unknown keys are kept.
        task: the task's name.
    """
    paths = TASK_READS[task] | _reads_from_command(task, values.get("path"))
    reads = {path.partition(".")[0] for path in paths} | {"seed", "task"}
    unread = RunConfig.__dataclass_fields__.keys() - reads
    return {name: value for name, value in values.items() if name not in unread}


def overrides_not_read(
    name: str, keys: Iterable[str], texts: Sequence[str] = (), *, path: str | None = None
) -> list[MensError]:
    """List explicit overrides that the chosen task never reads.

    Args:
        name: the task's name.
        keys: override keys as given, without ``+`` or ``~``.
        texts: all overrides as typed, for the command that would be accepted.
        path: the run that the task reads; with ``base``, the model of the command is used.
    """
    reads = TASK_READS[name] | _reads_from_command(name, path)
    unread: list[str] = []
    for key in keys:
        group = key.split(".", 1)[0].split("/", 1)[0]  # hydra/launcher is Hydra's, as hydra.run
        whole_group = key == group and any(read.startswith(f"{group}.") for read in reads)
        if group not in _EVERYWHERE and not whole_group and not {key, group} & reads:
            unread.append(key)
    kept = [text for text in texts if text.lstrip("+~").partition("=")[0] not in unread]
    command = shlex.join(["python", "-m", "mens_exp", *kept])
    return [
        NoEffectError(
            f"with task={name}",
            where=key,
            expected=_tasks_that_read(key, name),
            remedy=f"write {command}" if texts else f"drop {key}, or choose another task",
        )
        for key in unread
    ]


def _tasks_that_read(key: str, name: str) -> str:
    """State which tasks read a setting, or that none does."""
    group = key.partition(".")[0]
    tasks = [task for task, reads in TASK_READS.items() if {key, group} & reads]
    if tasks:
        return f"a task that reads it: {', '.join(f'task={task}' for task in tasks)}"
    return f"nothing: task={name} has no such setting"


def _reads_from_command(name: str, path: str | None) -> frozenset[str]:
    """Return the settings that a task reads from the command if `path` does not name a run."""
    if path == "base" and name != "export":
        return _READ_OF_THE_BASE | (frozenset({"data"}) if name == "evaluate" else frozenset())
    if name != "evaluate" or path is None or path == "latest":
        return frozenset()
    place = Path(path).expanduser()
    is_adapter = place.exists() and not (place / "manifest.json").is_file()
    return (_READ_OF_THE_BASE - {"lora"}) | {"data"} if is_adapter else frozenset()


def ineffective_overrides(config: RunConfig, keys: Iterable[str]) -> list[MensError]:
    """List explicit overrides that have no effect given the rest of the configuration.

    Each is refused once, by the first condition that is not met. Overrides that the task does not
    read are left to :func:`overrides_not_read`.

    Args:
        config: the whole configuration.
        keys: override keys as given.
    """
    keys = list(keys)
    unread = {one.where for one in overrides_not_read(config.task.name, keys, path=config.path)}
    problems: list[MensError] = []
    for key in keys:
        chain = declarations_of(config, key) if key not in unread else []
        exempt = [condition for about in chain for condition in about.even_if]
        for about in chain:
            unmet = _unmet(config, about, exempt) if about.idle is UNSET else None
            if unmet is not None:
                problems.append(
                    NoEffectError(
                        unmet.words(config),
                        where=key,
                        expected=unmet.needs,
                        remedy=unmet.remedy or f"drop {key}",
                    )
                )
                break
    return problems


def _idle_values(config: RunConfig, node: Any, prefix: str = "") -> Iterator[ConfigError]:
    """Yield errors for values that have no effect and differ from the required idle value."""
    for field in dataclasses.fields(node):
        value, path = getattr(node, field.name), f"{prefix}{field.name}"
        inner = value.items() if isinstance(value, dict) else ()
        if dataclasses.is_dataclass(value):
            yield from _idle_values(config, value, f"{path}.")
        for name, entry in inner:
            if dataclasses.is_dataclass(entry):
                yield from _idle_values(config, entry, f"{path}.{name}.")
        about = declared(type(node), field.name)
        idle = about.idle if isinstance(about.idle, tuple) else (about.idle,)
        if about.idle is UNSET or value in idle or not in_range(field, value):
            continue
        unmet = _unmet(config, about)
        if unmet is not None:
            yield NoEffectError(
                unmet.words(config),
                where=path,
                found=plain(value),
                expected=f"{' or '.join(shown(plain(one)) for one in idle)}, or {unmet.needs}",
                remedy=unmet.remedy or f"drop {path}, or set it to {shown(plain(idle[0]))}",
            )


def _unmet(
    config: RunConfig, about: Declaration, exempt: Sequence[Condition] = ()
) -> Condition | None:
    """Return the first condition of a declaration that a configuration does not meet."""
    task = config.task.name
    for one in about.only_if:
        judged = one.tasks is None or task in one.tasks
        if judged and one not in exempt and not one.holds(config):
            return one
    return None
