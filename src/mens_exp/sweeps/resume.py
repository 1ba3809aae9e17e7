"""sweep.resume=<dir>: continue a sweep whose jobs or launcher did not finish."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.provenance import code_digest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import Job, JobState, SweepDir, SweepRecord
from mens_exp.config.compose import config_digest, from_yaml, to_yaml, typed
from mens_exp.config.fields import range_problems
from mens_exp.config.overrides import check, chosen_sweeper
from mens_exp.config.sweep import (
    IN_ORDER,
    LAUNCHERS,
    SLURM,
    Changes,
    launcher_settings,
    launcher_values,
)
from mens_exp.config.validate import problems_of
from mens_exp.errors import ConfigError, NoEffectError, Problems, RequestError
from mens_exp.planning import machine
from mens_exp.report import terminal
from mens_exp.sweeps.executors import executor_problems
from mens_exp.sweeps.launcher import Launcher, locked, writing
from mens_exp.sweeps.multirun import finish
from mens_exp.sweeps.outcome import update_from_directory
from mens_exp.sweeps.process import gpu_problems, jobs_at_a_time
from mens_exp.sweeps.slurm_commands import queue_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from mens_exp.artifacts.sweep import SweepJob
    from mens_exp.config.overrides import Cell

_TRIALS = "hydra.sweeper.n_trials"
_MAY_CHANGE = frozenset({"sweep.resume", "sweep.retries", "sweep.changes", _TRIALS})
_STAYS = frozenset({"hydra.launcher.threads", "hydra.launcher.cpus_per_task"})  # affect results


def resume_sweep(overrides: Sequence[str]) -> int:
    """Skip jobs that are complete and verified, and run the rest.

    Args:
        overrides: the command's, as typed.

    Returns:
        The exit code of the sweep.

    Raises:
        MensError: there is no such sweep, its launcher is still alive, the code has changed since
            the launch, or an override cannot be changed.
    """
    directory, launched = _launched(overrides)
    _refuse_others(overrides, launched)
    trials = [text for text in overrides if text.startswith(f"{_TRIALS}=")]
    overrides = [text for text in overrides if text not in trials]
    # Use the launcher of the original launch, so that its settings are known.
    checked = check([f"hydra/launcher={launched.launcher}", *overrides], multirun=True)
    Problems.raise_if(checked.problems)
    asked = checked.cells[0]
    with locked(directory, "sweep.resume"):
        console = terminal.console(stderr=True)
        record = reopened(directory, asked, {text.partition("=")[0] for text in overrides}, console)
        if trials and record.search is None:
            words = "on a sweep that lists its cells"
            raise NoEffectError(words, where=_TRIALS, found=trials[-1], remedy=f"drop {_TRIALS}")
        if record.search is not None:
            from mens_exp.sweeps.searching import resume_search

            return resume_search(directory, record, console, trials[-1:])
        with writing("sweep.resume"):
            record.write(directory.record)
        if chosen_sweeper(record.command) != IN_ORDER:
            from mens_exp.sweeps.plugin_sweeper import resume_by_sweeper

            return resume_by_sweeper(directory, record, console)
        return finish(Launcher(directory, record, console))


def reopened(directory: SweepDir, asked: Cell, given: set[str], console: Console) -> SweepRecord:
    """Read a sweep's record, and set the state of each job from its directory.

    Args:
        directory: the sweep; the caller holds its lock.
        asked: a cell of the command, for the settings of sweep and launcher.
        given: keys that the command sets.
        console: console for messages.

    Raises:
        MensError: the code has changed since the launch, or the jobs cannot run here.
    """
    record = SweepRecord.read(directory.record)
    _take_over(record, asked, given)
    settings = launcher_settings(record.launcher_settings, record.launcher)
    last = max((job["number"] for job in record.jobs), default=0)
    Problems.raise_if(executor_problems(settings, 1 + last))
    for note in record.notes:
        terminal.say(f"note: {note}", on=console)
    for job in record.jobs:
        here = record.launcher != SLURM
        update_from_directory(job, RunDir(directory.path / job["directory"]), here=here)
    if "hydra.launcher.nodes" in given:
        _move_to_other_nodes(directory, record)
    _freeze_for_nodes(directory, record)
    done = sum(job["state"] == JobState.SUCCEEDED for job in record.jobs)
    terminal.say(f"{done} of {len(record.jobs)} jobs are done, and verified.", on=console)
    return record


def _move_to_other_nodes(directory: SweepDir, record: SweepRecord) -> None:
    """Update the record of the remaining jobs to the launcher's new number of nodes.

    `_freeze_for_nodes` then writes their files on every resumption, so that a kill in between
    leaves no mismatch.

    Raises:
        ConfigError: the number is not set, or a step cannot be divided evenly among the processes.
        RequestError: a job of the sweep is still in Slurm's queue with the earlier number.
    """
    seen = queue_of(directory.batch.resolve()).values()
    queued = [one.queue_id for one in seen if not one.is_over]
    if queued:
        raise RequestError(
            "jobs of the sweep are still in Slurm's queue, for another number of nodes",
            where="hydra.launcher.nodes",
            found=", ".join(queued),
            remedy=f"end them with `scancel {' '.join(queued)}`, or leave nodes as it is",
        )
    nodes = record.launcher_settings["nodes"]
    if nodes is None:
        raise ConfigError(
            "a sweep needs a number of nodes to continue",
            where="hydra.launcher.nodes",
            found="null",
            expected="1 or more",
            remedy="name the number, or leave nodes as it is",
        )
    for job, values in _frozen_for(nodes, directory, record):
        Problems.raise_if(problems_of(typed(values)))
        job["config_digest"] = config_digest(values)
    with writing("sweep.resume"):
        record.write(directory.record)


def _freeze_for_nodes(directory: SweepDir, record: SweepRecord) -> None:
    """Rewrite the files of jobs whose recorded number of nodes has changed.

    A configuration with any other difference stays as it is; its job will refuse it.
    """
    nodes = record.launcher_settings.get("nodes")
    if record.launcher != SLURM or nodes is None:
        return
    for job, values in _frozen_for(nodes, directory, record):
        run = RunDir(directory.path / job["directory"])
        frozen = Job.read(run.job)
        if config_digest(values) != job["config_digest"] or (
            frozen.config_digest == job["config_digest"]  # written last
        ):
            continue
        kept = [text for text in frozen.overrides if not text.startswith("trainer.num_nodes=")]
        frozen.overrides = [*kept, f"trainer.num_nodes={nodes}"]
        frozen.config_digest = job["config_digest"]
        with writing("sweep.resume"):
            atomic.write_text(run.config, to_yaml(values))
            frozen.write(run.job)


def _frozen_for(
    nodes: int, directory: SweepDir, record: SweepRecord
) -> Iterator[tuple[SweepJob, Any]]:
    """Yield the waiting jobs with their configurations for `nodes` nodes."""
    for job in record.jobs:
        run = RunDir(directory.path / job["directory"])
        if job["state"] == JobState.WAITING and run.config.is_file() and run.job.is_file():
            values = from_yaml(run.config)
            values.trainer.num_nodes = nodes
            yield job, values


def _launched(overrides: Sequence[str]) -> tuple[SweepDir, SweepRecord]:
    """Return the directory of the sweep, and its record as it was left."""
    plain = [text for text in overrides if _key(text) == "sweep.resume"]
    checked = check(plain, multirun=True)
    Problems.raise_if(checked.problems)
    directory = _found(str(checked.cells[0].config.sweep.resume))
    record = SweepRecord.read(directory.record)
    if record.study is not None:
        raise RequestError(
            "the sweep belongs to a study, which is continued by its own command",
            where="sweep.resume",
            found=str(directory.path),
            remedy=f"write {shlex.join(['python', '-m', 'mens_exp', *record.command])}",
        )
    return directory, record


def _key(text: str) -> str:
    return text.lstrip("+~").partition("=")[0]


def _refuse_others(overrides: Sequence[str], record: SweepRecord) -> None:
    """Refuse overrides that must not change; resources per job may change, except threads."""
    schema = LAUNCHERS.get(record.launcher)
    names = record.launcher_settings if schema is None else launcher_values(schema())
    settings = {f"hydra.launcher.{name}" for name in names if name != "_target_"}
    may = _MAY_CHANGE | (settings - _STAYS)
    Problems.raise_if(
        [
            ConfigError(
                "cannot change when a sweep continues",
                where=_key(text),
                found=text,
                expected=f"nothing but {', '.join(sorted(may - {'sweep.resume'}))}",
                remedy="start a new sweep for other settings",
            )
            for text in overrides
            if _key(text) not in may
        ]
    )


def _found(text: str) -> SweepDir:
    directory = SweepDir(Path(text).expanduser())
    if directory.record.is_file():
        return directory
    raise RequestError(
        "no sweep.json in this directory" if directory.path.is_dir() else "no such directory",
        where="sweep.resume",
        found=text,
        expected="the directory of a sweep, as its last line names it",
        remedy="continue a single run with resume=<its directory>",
    )


def _take_over(record: SweepRecord, asked: Cell, given: set[str]) -> None:
    """Apply the command's overrides to the sweep's original settings."""
    settings = asked.config.sweep
    if "sweep.retries" in given:
        record.retries = settings.retries
    if "sweep.changes" in given:
        record.changes = settings.changes.value
    launcher = launcher_settings(asked.composed.launcher, record.launcher)
    new = launcher_values(launcher)
    changed = {name: new[name] for name in new if f"hydra.launcher.{name}" in given}
    if changed:
        Problems.raise_if(list(range_problems(launcher, "hydra.launcher.")))
        record.launcher_settings.update(changed)
        record.n_jobs = jobs_at_a_time(launcher_settings(record.launcher_settings, record.launcher))
    if record.gpus:  # use the current GPUs, which may differ from those at launch
        record.gpus = list(machine.gpu_ids()) or record.gpus
        many = record.n_jobs if record.search else min(record.n_jobs, len(record.jobs))
        Problems.raise_if(gpu_problems(record.gpus, record.gpus_per_job, many))
    if code_digest() == record.code_sha256:
        return
    if record.changes == Changes.refuse.value:
        raise RequestError(
            "the code of mens_exp has changed since the sweep was launched",
            where="sweep.changes",
            found=record.changes,
            remedy="restore it, or continue anyway with sweep.changes=accept",
        )
    note = f"went on at {utc_now()} with other code than it was launched with"
    record.notes.append(note)
