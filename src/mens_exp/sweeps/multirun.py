"""Launch a sweep (-m): plan it, freeze its jobs on disk, and run all of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from mens_exp.artifacts import atomic, provenance
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.provenance import code_digest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import Job, JobState, SweepDir, SweepJob, SweepRecord
from mens_exp.config.compose import config_digest, to_yaml
from mens_exp.config.sweep import LocalLauncher, launcher_option, launcher_values
from mens_exp.errors import Problems
from mens_exp.planning import machine
from mens_exp.planning.checks import classes
from mens_exp.report import sweep_view, terminal, wording
from mens_exp.sweeps.launcher import Launcher, locked, writing
from mens_exp.sweeps.plan import place_problems, plan_sweep
from mens_exp.sweeps.process import gpus_per_job, jobs_at_a_time, processes_of, threads_per_job
from mens_exp.tasks.run import complete
from mens_exp.tasks.study_runs import write_sweep_page

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.config.overrides import Cell
    from mens_exp.config.sweep import Launcher as LauncherSettings
    from mens_exp.config.sweep import SweepConfig
    from mens_exp.report.document import Step
    from mens_exp.sweeps.plan import PlannedJob

PLACE = "hydra.sweep.dir"


def launch(overrides: Sequence[str]) -> int:
    """Plan a sweep, freeze its jobs, run them, and report the outcome.

    Args:
        overrides: the command's, as typed.

    Returns:
        The exit code.

    Raises:
        MensError: nothing was started.
    """
    planned = plan_sweep(overrides)
    directory = SweepDir(planned.root)
    with locked(directory, PLACE):
        cells = [job.cell for job in planned.jobs]
        Problems.raise_if(place_problems(planned.root, cells))  # another launcher was faster
        record = new_record(planned, overrides, cells)
        record.jobs = [job_record(job) for job in planned.jobs]
        record.left_out = list(planned.left_out)
        console = terminal.console(stderr=True)
        terminal.show(*sweep_view.planned_parts(record), on=console)
        with writing(PLACE):
            for job in planned.jobs:
                freeze(job, directory.path / job.directory, record.code_sha256)
            record.write(directory.record)
        return finish(Launcher(directory, record, console))


def finish(
    launcher: Launcher,
    is_finished: Callable[[], bool] = lambda: False,
    *,
    conclude: Callable[[], list[Step]] | None = None,
    again: Sequence[str] = (),
) -> int:
    """Run the remaining jobs of a sweep and show the outcome.

    Args:
        launcher: the launcher of the sweep.
        is_finished: for a sweep that failed, returns whether none of its jobs would run again.
        conclude: called when the jobs have ended, before the page is rendered; returns the next
            steps to show.
        again: overrides of the command to continue with; by default ``sweep.resume``.

    Returns:
        The exit code.
    """
    code = launcher.run()
    console = launcher.console
    terminal.show(*sweep_view.result_parts(launcher.record), on=console)
    place = launcher.directory.path
    _complete(launcher)
    after = sweep_view.steps(wording.path(place), again, is_done=not code)
    if conclude is not None:
        after = conclude() or after
    _render(launcher)
    is_over = bool(code) and is_finished()
    if is_over:
        told = "All trials were drawn. Those that failed did so by themselves: none runs again."
        terminal.say(told, on=console)
    terminal.say(f"The record: {launcher.directory.record}", on=console)
    if not is_over:
        terminal.say_next(after, on=console)
    return code


def _complete(launcher: Launcher) -> None:
    """Write the missing pages of jobs that succeeded but were killed before writing them."""
    for job in launcher.record.jobs:
        if job["state"] != JobState.SUCCEEDED:
            continue
        try:
            complete(RunDir(launcher.directory.path / job["directory"]))
        except Exception as error:  # noqa: BLE001  # isolated, like the sweep's own page
            told = f"Pages of {job['directory']} were not written: {type(error).__name__}: {error}"
            terminal.say(told, on=launcher.console)


def _render(launcher: Launcher) -> None:
    """Write the sweep's page; a failure does not affect the finished jobs."""
    try:
        write_sweep_page(launcher.directory)
    except Exception as error:  # noqa: BLE001  # a sink, isolated
        told = f"{launcher.directory.page.name} was not written: {type(error).__name__}: {error}"
        terminal.say(told, on=launcher.console)
    else:
        terminal.say(f"Report: {launcher.directory.page}", on=launcher.console)


class Asked(Protocol):
    """A sweep's command as recorded, whether its cells are listed or drawn by a search."""

    @property
    def root(self) -> Path:
        """The directory of the sweep."""

    @property
    def launcher(self) -> LauncherSettings:
        """The launcher of its jobs."""

    @property
    def settings(self) -> SweepConfig:
        """The settings of the sweep."""

    @property
    def notes(self) -> Sequence[str]:
        """Further notes for a reader."""


def new_record(asked: Asked, overrides: Sequence[str], cells: Sequence[Cell]) -> SweepRecord:
    """Return the record of a sweep that has no jobs yet.

    Args:
        asked: the requested sweep.
        overrides: the command's overrides, as typed.
        cells: the cells to run, or examples of drawn ones.
    """
    launcher = asked.launcher
    return SweepRecord(
        sweep_id=asked.root.resolve().name,
        created_utc=utc_now(),
        command=list(overrides),
        code_sha256=code_digest(),
        provenance=provenance.collect(Path.cwd()),
        n_jobs=jobs_at_a_time(launcher),
        threads=threads_per_job(launcher),
        **_devices(launcher, cells),
        launcher=launcher_option(launcher),
        launcher_settings=launcher_values(launcher),
        retries=asked.settings.retries,
        changes=asked.settings.changes.value,
        jobs=[],
        notes=list(asked.notes),
    )


def _devices(launcher: LauncherSettings, cells: Sequence[Cell]) -> dict[str, Any]:
    """Return the GPUs that jobs share, and the number of GPUs per job."""
    if not isinstance(launcher, LocalLauncher):  # Slurm, or a plugin, assigns GPUs to each job
        return {}
    each = gpus_per_job(cells)
    return {"gpus": list(machine.gpu_ids()), "gpus_per_job": each} if each else {}


def job_record(planned: PlannedJob) -> SweepJob:
    """Return the initial record of a job."""
    return SweepJob(
        number=planned.cell.number,
        directory=planned.directory,
        differs=list(planned.differs),
        state=JobState.WAITING,
        reason=None,
        config_digest=config_digest(planned.cell.composed.values),
        contract=planned.contract,
        estimate=planned.estimate,
        results={},
        notes=list(planned.notes),
        attempts=[],
        processes=processes_of(planned.cell.config),
    )


def freeze(planned: PlannedJob, directory: Path, code_sha256: str) -> None:
    """Write everything that a job needs, so that nothing is composed again."""
    composed, run = planned.cell.composed, RunDir(directory)
    atomic.write_text(run.config, to_yaml(composed.values))
    own = classes.record(planned.cell.config)
    job = Job(
        number=planned.cell.number,
        overrides=list(composed.overrides),
        choices=composed.choices,
        config_digest=config_digest(composed.values),
        code_sha256=code_sha256,
        own_files={} if own is None else own["files"],
        contract=planned.contract,
    )
    job.write(run.job)
