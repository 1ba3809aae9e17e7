"""A sweep whose cells are chosen by an installed Hydra sweeper plugin (hydra/sweeper=…).

A sweeper passes lists of overrides to Hydra's launcher, in one or several rounds, and receives each
job's return value. `Rounds` replaces that launcher: every cell is checked and frozen like those of
any other sweep, hydra/launcher determines where jobs run, and the sweeper receives their KPIs.

Sweepers keep no state to resume from. A resumed sweep runs its sweeper from the start, and answers
with the recorded results as long as the sweeper proposes the same cells.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher as HydraLauncher
from hydra.types import RunMode
from omegaconf import open_dict, read_write

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState, SweepDir
from mens_exp.config.compose import config_digest, hydra_context
from mens_exp.config.fields import range_problems
from mens_exp.config.override_parsing import parsed_override
from mens_exp.config.overrides import Checked, check
from mens_exp.config.plugins import error_text
from mens_exp.errors import Problems, RequestError, SetupError
from mens_exp.report import sweep_view, terminal
from mens_exp.sweeps.executors import executor_problems
from mens_exp.sweeps.launcher import Launcher, locked, writing
from mens_exp.sweeps.multirun import PLACE, finish, freeze, job_record, new_record
from mens_exp.sweeps.plan import PlannedSweep, launcher_of_cell, place_problems, plan_cells
from mens_exp.sweeps.search_request import objective_problems
from mens_exp.sweeps.search_study import objective_values
from mens_exp.tasks.run import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig
    from rich.console import Console

    from mens_exp.artifacts.sweep import SweepJob, SweepRecord
    from mens_exp.config.overrides import Cell
    from mens_exp.errors import MensError


def launch_by_sweeper(overrides: Sequence[str]) -> int:
    """Let the sweeper choose the cells, run them, and report the outcome.

    Args:
        overrides: the command's, as typed.

    Returns:
        The exit code.

    Raises:
        MensError: the command is invalid, or the sweeper proposed cells that cannot run.
    """
    first = _example(overrides)
    asked = PlannedSweep(
        root=Path(str(first.composed.sweep_root)),
        launcher=launcher_of_cell(first),
        settings=first.config.sweep,
        jobs=(),
        left_out=(),
        notes=(),
    )
    general: list[MensError] = [
        *range_problems(asked.launcher, "hydra.launcher."),
        *range_problems(asked.settings, "sweep."),
        *objective_problems("sweep.objectives", asked.settings.objectives, [first]),
        *executor_problems(asked.launcher, 1),
        *place_problems(asked.root, ()),
    ]
    Problems.raise_if(general)
    directory = SweepDir(asked.root)
    with locked(directory, PLACE):
        Problems.raise_if(place_problems(asked.root, ()))  # another launcher was faster
        record = new_record(asked, overrides, [first])
        with writing(PLACE):
            record.write(directory.record)
        return Rounds(directory, record, first, terminal.console(stderr=True)).run()


def resume_by_sweeper(directory: SweepDir, record: SweepRecord, console: Console) -> int:
    """Resume such a sweep; the caller holds its lock and has set the states of its jobs."""
    root = f"{PLACE}={directory.path}"
    return Rounds(directory, record, _example([*record.command, root]), console).run()


def _example(overrides: Sequence[str]) -> Cell:
    """Compose the command without swept values, for the settings of sweep and plugins.

    Raises:
        Problems: it cannot be composed.
    """
    swept = [
        text for text in overrides if (one := parsed_override(text, [])) and one.is_sweep_override()
    ]
    checked = check([text for text in overrides if text not in swept], multirun=True)
    Problems.raise_if(list(checked.general or (() if checked.cells else checked.problems)))
    return checked.cells[0]


class _Stopped(BaseException):
    """Ends a sweeper; a BaseException, so that its own `except Exception` cannot catch it."""


class Rounds:
    """Runs the cells that a sweeper proposes, and returns their results to it."""

    def __init__(
        self, directory: SweepDir, record: SweepRecord, first: Cell, console: Console
    ) -> None:
        """Use a sweep whose lock the caller holds.

        Args:
            directory: its directory.
            record: its record, with the jobs of an earlier launcher.
            first: the command without swept values.
            console: console for messages.
        """
        self._directory, self._record, self._first = directory, record, first
        self._launcher = Launcher(directory, record, console)
        self._console = console
        self._shared = {_meaning(text) for text in record.command}
        self._next = 0  # number of the next cell
        self._refused: Exception | None = None  # our error that ended the sweeper

    def run(self) -> int:
        """Run the sweeper until it ends; return the sweep's exit code.

        Raises:
            MensError: the sweeper proposed cells that cannot run, or failed.
        """
        option = self._first.composed.sweeper["name"]
        try:
            self._ask()
        except _Stopped:
            pass
        except Exception as error:
            raise SetupError(
                f"the sweeper {option} failed",
                where="hydra/sweeper",
                found=error_text(error),
                remedy="fix its settings or its plugin, then continue with "
                f"sweep.resume={self._directory.path}",
            ) from error
        if self._refused is not None:
            raise self._refused
        return finish(self._launcher)

    def _ask(self) -> None:
        config = self._first.composed.whole
        assert config is not None, "it was composed here"
        texts = self._record.command
        with read_write(config), open_dict(config):
            config.hydra.mode = RunMode.MULTIRUN
        with hydra_context(config) as context, _handing(_Handed(self._round)):
            sweeper = Plugins.instance().instantiate_sweeper(
                hydra_context=context, task_function=_never, config=config
            )
            sweeper.sweep([text for text in texts if not _is_of_hydra(text)])

    def _round(self, lists: Sequence[Sequence[str]]) -> list[JobReturn]:
        """Run one list of cells; the sweeper calls this through `_Handed`."""
        if not lists:
            return []
        first, self._next = self._next, self._next + len(lists)
        try:
            planned = self._planned(lists, first)
            new = self._taken(planned)
            if new:
                jobs = [job for job in self._record.jobs if job["number"] in new]
                shown = replace(self._record, jobs=jobs)
                terminal.show(*sweep_view.planned_parts(shown), on=self._console)
            with writing(PLACE):
                for job in planned.jobs:
                    if job.cell.number in new:
                        place = self._directory.path / job.directory
                        freeze(job, place, self._record.code_sha256)
                self._record.write(self._directory.record)
            code = self._launcher.run()
        except Exception as error:
            self._refused = error
            raise _Stopped from error
        if code == CANCELLED:
            raise _Stopped
        return [self._returned(first + at, list(texts)) for at, texts in enumerate(lists)]

    def _planned(self, lists: Sequence[Sequence[str]], first: int) -> PlannedSweep:
        """Check and plan cells; with sweep.invalid=skip, cells that cannot run are left out."""
        fixed = [text for text in self._record.command if _is_kept(text)]
        fixed.append(f"{PLACE}={self._directory.path}")
        found = [
            check([*fixed, *texts], multirun=True, first=number)
            for number, texts in enumerate(lists, start=first)
        ]
        checked = Checked(
            cells=tuple(cell for one in found for cell in one.cells),
            problems=tuple(problem for one in found for problem in one.problems),
            general=tuple(problem for one in found for problem in one.general),
            faulty={number: it for one in found for number, it in one.faulty.items()},
        )
        planned = plan_cells(checked, is_new=False, example=self._first)
        # Compare with the command, since a round often has only one cell.
        own = {
            number: tuple(text for text in texts if _meaning(text) not in self._shared)
            for number, texts in enumerate(lists, start=first)
        }
        jobs = [replace(job, differs=own[job.cell.number]) for job in planned.jobs]
        return replace(planned, jobs=tuple(jobs))

    def _taken(self, planned: PlannedSweep) -> set[int]:
        """Add the planned cells to the record; return the numbers of the new jobs.

        Raises:
            RequestError: the sweeper proposes a different cell than before.
        """
        here = {job["number"]: job for job in self._record.jobs}
        out = {one["number"] for one in self._record.left_out}
        new = set()
        for job in planned.jobs:
            made, known = job_record(job), here.get(job.cell.number)
            if known is None:
                self._record.jobs.append(made)
                new.add(made["number"])
            elif known["config_digest"] != config_digest(job.cell.composed.values):
                raise RequestError(
                    f"the sweeper proposes another cell {known['number']} than at its launch, so "
                    "the recorded results do not belong to it",
                    where="sweep.resume",
                    found=" ".join(made["differs"]),
                    expected=" ".join(known["differs"]),
                    remedy="start a new sweep, with a seed in the sweeper's settings",
                )
        self._record.left_out += [one for one in planned.left_out if one["number"] not in out]
        self._record.notes += [one for one in planned.notes if one not in self._record.notes]
        return new

    def _returned(self, number: int, texts: list[str]) -> JobReturn:
        """Return a cell's result as Hydra's JobReturn."""
        same = {one["number"]: one["same_as"] for one in self._record.left_out}
        target = same.get(number, number)
        job = next((one for one in self._record.jobs if one["number"] == target), None)
        result = JobReturn(overrides=texts, task_name="mens_exp", status=JobStatus.FAILED)
        if job is None:
            left = next(one for one in self._record.left_out if one["number"] == number)
            result.return_value = RequestError(f"cell {number} cannot run: {left['why']}")
            return result
        result.working_dir = str(self._directory.path / job["directory"])
        values, why = self._values(job)
        if values is None:
            result.return_value = RequestError(f"cell {number} has no result: {why}")
        else:
            result.status = JobStatus.COMPLETED
            result.return_value = values[0] if len(values) == 1 else tuple(values)
        return result

    def _values(self, job: SweepJob) -> tuple[list[float] | None, str | None]:
        if job["state"] != JobState.SUCCEEDED:
            return None, job["reason"]
        names = self._first.config.sweep.objectives
        return objective_values(RunDir(self._directory.path / job["directory"]), names)


def _meaning(text: str) -> tuple[str, str]:
    """Return an override's key and parsed value, as sweepers format numbers differently."""
    override = parsed_override(text, [])
    return ("", text) if override is None else (override.key_or_group, repr(override.value()))


def _never(config: DictConfig) -> None:
    """Serve as Hydra's task function, which must not be called: jobs run in their own processes."""
    raise AssertionError(f"a sweeper ran {config.hydra.job.name} by itself")


def _is_of_hydra(text: str) -> bool:
    return text.lstrip("+~").startswith(("hydra/", "hydra."))


def _is_kept(text: str) -> bool:
    """Return whether an override of Hydra's settings also applies to each cell."""
    return _is_of_hydra(text) and not text.lstrip("+~").startswith(f"{PLACE}=")


class _Handed(HydraLauncher):
    """The Hydra launcher given to a sweeper; it passes each list of cells to `Rounds`."""

    def __init__(self, run_round: Callable[[Sequence[Sequence[str]]], list[JobReturn]]) -> None:
        self._round = run_round

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Do nothing: a round needs no setup."""

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Run one list of cells, numbered consecutively over all rounds; return their results."""
        del initial_job_idx  # sweepers number jobs differently
        return self._round([list(map(str, texts)) for texts in job_overrides])


@contextmanager
def _handing(launcher: _Handed) -> Iterator[None]:
    """Make Hydra's plugin registry return this launcher inside the block."""
    plugins: Any = Plugins.instance()
    plugins.instantiate_launcher = lambda *_, **__: launcher
    try:
        yield
    finally:
        del plugins.instantiate_launcher  # restores the method of the class
