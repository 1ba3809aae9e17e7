"""hydra/sweeper=optuna: a sweep whose cells are drawn from the results of earlier ones.

A feed passes jobs to the launcher as they are drawn, and reports their outcomes to the study.
"""

from __future__ import annotations

import shlex
import time
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.artifacts.host import machine_fault
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState, LeftOut, SweepDir, TrialState
from mens_exp.artifacts.sweep import Trial as Row
from mens_exp.config.override_values import override_of
from mens_exp.errors import ConfigError, Problems
from mens_exp.planning.contract import contract_of
from mens_exp.report import html, search_view, terminal
from mens_exp.sweeps.launcher import Launcher, locked, writing
from mens_exp.sweeps.multirun import PLACE, finish, freeze, job_record, new_record
from mens_exp.sweeps.outcome import Cause, cause_of
from mens_exp.sweeps.plan import PlannedJob, directory_of, estimate_of, meaning, place_problems
from mens_exp.sweeps.search_request import Cells, read_request
from mens_exp.sweeps.search_study import Curve, Study, need_optuna, objective_values
from mens_exp.tasks.run import TRAINING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from mens_exp.artifacts.sweep import Dimension, SearchRecord, SweepJob, SweepRecord
    from mens_exp.config.overrides import Cell

_MOST_FAILURES = 5  # consecutive job failures; beyond that, the draws are not the cause
_WATCH_S = 1.0  # polling interval for validation losses; a validation takes longer
_OUTCOMES = {
    JobState.SUCCEEDED: TrialState.COMPLETE,
    JobState.PRUNED: TrialState.PRUNED,
    JobState.FAILED: TrialState.FAILED,
}


class Search:
    """The launcher's feed; it updates the search's part of the record, which the launcher saves."""

    def __init__(
        self, directory: SweepDir, record: SweepRecord, study: Study, cells: Cells | None = None
    ) -> None:
        """Use a search whose lock the caller holds, and the builder of its cells, if known."""
        assert record.search is not None, "a sweep that searches"
        self._directory, self._record, self._study = directory, record, study
        self._search: SearchRecord = record.search
        self._cells = cells or Cells(space=self._search["space"], fixed=self._search["fixed"])
        self._curves: dict[int, Curve] = {}
        self._looked: dict[int, float] = {}
        self._failures = 0  # consecutive failed jobs
        self._is_held = False  # a trial has to run again before more are drawn

    def supply(self) -> bool:
        """Draw until there is a trial to run; return whether there is one."""
        while self._is_more() and not self._is_held:
            is_to_run = self._draw()
            self._record.write(self._directory.record)
            if is_to_run:
                return True
        return False

    def watch(self, job: SweepJob) -> str | None:
        """Report a running job's validation losses; return the reason to end it, or None."""
        number, now = job["number"], time.monotonic()
        if self._search["pruner"] == "none" or now - self._looked.get(number, 0.0) < _WATCH_S:
            return None
        self._looked[number] = now
        curve = self._curves.setdefault(number, Curve(self._run(job).telemetry))
        may_end = curve.read()
        row = self._search["trials"][number]
        row["intermediate"] = [[step, loss] for step, loss in curve.points]
        if not curve.points or not may_end or not self._study.should_end(number, curve.points):
            return None
        step, loss = curve.points[-1]
        rule = f"pruner={self._search['pruner']}"
        return f"ended by the search at step {step}: validation loss {loss:.4f} ({rule})"

    def job_ended(self, job: SweepJob) -> None:
        """Report the outcome of a job, and of equivalent trials, to the sampler."""
        has_failed = job["state"] == JobState.FAILED
        self._failures = self._failures + 1 if has_failed else 0
        if has_failed and cause_of(job, self._run(job)) is Cause.DISK:
            self._hold(f"trial {job['number']} failed as the disk did")
        elif self._failures == _MOST_FAILURES:
            self._hold(f"{_MOST_FAILURES} jobs in a row failed")
        self._tell_all(job)

    def catch_up(self) -> None:
        """Synchronise record and journal after a launcher that was interrupted."""
        rows = self._search["trials"]
        for job in self._record.jobs:
            self._take_back(job)
        running = {row["number"] for row in rows if row["state"] == TrialState.RUNNING}
        # Trials missing from the record were being drawn when the launcher ended.
        self._study.go_back(len(rows), running)
        for job in self._record.jobs:
            if job["state"] in _OUTCOMES:
                self._tell_all(job)
        for row in rows:
            if row["state"] != TrialState.RUNNING:
                self._study.tell(row["number"], row["state"], row["values"])
        self._search["best"] = _best(self._search)

    def _take_back(self, job: SweepJob) -> None:
        """Repeat the failed trials of a job, unless the job itself was the cause."""
        mine = [row for row in self._search["trials"] if row["job"] == job["number"]]
        if job["state"] in {JobState.FAILED, JobState.PRUNED} or any(
            row["state"] != TrialState.FAILED for row in mine
        ):
            return
        if job["state"] == JobState.SUCCEEDED:  # found after its process had been killed
            is_own = objective_values(self._run(job), self._search["objectives"])[0] is None
        else:
            is_own = cause_of(job, self._run(job)) is Cause.OWN
        if not is_own:
            for row in mine:
                row["state"], row["reason"] = TrialState.RUNNING, None
        elif job["state"] == JobState.WAITING:
            job["state"], job["reason"] = JobState.FAILED, mine[0]["reason"]

    def is_finished(self) -> bool:
        """Return whether all trials were drawn and none would run again."""
        rows = self._search["trials"]
        failed = {row["job"] for row in rows if row["state"] == TrialState.FAILED}
        return not self._is_more() and all(
            job["state"] in {JobState.SUCCEEDED, JobState.PRUNED}
            or (job["number"] in failed and cause_of(job, self._run(job)) is Cause.OWN)
            for job in self._record.jobs
        )

    def conclude(self) -> None:
        """Record the overall results of the trials."""
        self._search["best"] = _best(self._search)
        self._search["importance"] = self._study.importance()
        unknown = None if self._search["importance"] else self._study.why_no_importance()
        self._search["importance_unknown"] = unknown

    def _hold(self, why: str) -> None:
        """Stop drawing until the search is resumed."""
        self._is_held = True
        if self._is_more():
            last = len(self._search["trials"]) - 1
            self._record.notes.append(f"{why}: nothing was drawn after trial {last}")

    def _is_more(self) -> bool:
        return len(self._search["trials"]) < self._search["n_trials"]

    def _run(self, job: SweepJob) -> RunDir:
        return RunDir(self._directory.path / job["directory"])

    def _draw(self) -> bool:
        """Draw one trial; return whether it needs to run."""
        number = len(self._search["trials"])
        trial = self._study.ask(number)

        def suggest(dimension: Dimension) -> str | float:
            return self._study.suggest(trial, dimension)

        drawn = self._cells.draw(number, suggest)
        row = _row(number, drawn.params)
        self._search["trials"].append(row)
        if drawn.cell is None:
            self._fail(row, "; ".join(str(problem) for problem in drawn.problems))
            self._leave_out(row, None)
            return False
        return self._queue(row, drawn.cell)

    def _queue(self, row: Row, cell: Cell) -> bool:
        """Create a trial's job, unless an earlier one is equivalent."""
        trains = cell.config.task.name in TRAINING
        contract = contract_of(cell.config).digest if trains else None
        row["meaning"] = meaning(cell, contract)
        rows = self._search["trials"][: row["number"]]
        twin = next((one for one in rows if one["meaning"] == row["meaning"]), None)
        if twin is not None and twin["job"] is not None:
            row["job"] = twin["job"]
            self._leave_out(row, twin["job"])
            job = next(one for one in self._record.jobs if one["number"] == twin["job"])
            if twin["state"] != TrialState.RUNNING:
                self._tell(row, job)
            return False
        planned = PlannedJob(
            cell=cell,
            directory=directory_of(cell),
            differs=tuple(row["params"].values()),
            contract=contract,
            estimate=estimate_of(cell),
            notes=(),
        )
        row["job"] = row["number"]
        place = self._directory.path / planned.directory
        freeze(planned, place, self._record.code_sha256)
        self._record.jobs.append(job_record(planned))
        return True

    def _leave_out(self, row: Row, same_as: int | None) -> None:
        why = row["reason"] or f"the same as cell {same_as}, whose values it takes"
        self._record.left_out.append(
            LeftOut(
                number=row["number"],
                differs=list(row["params"].values()),
                why=why,
                same_as=same_as,
            )
        )

    def _tell_all(self, job: SweepJob) -> None:
        """Report a job's outcome for its own trial and for equivalent ones."""
        for row in self._search["trials"]:
            if row["job"] == job["number"] and row["state"] == TrialState.RUNNING:
                self._tell(row, job)

    def _tell(self, row: Row, job: SweepJob) -> None:
        state, reason, values = _OUTCOMES[JobState(job["state"])], job["reason"], None
        if state is TrialState.COMPLETE:
            values, why = objective_values(self._run(job), self._search["objectives"])
            if values is None:
                state, reason = TrialState.FAILED, f"no value of its objective: {why}"
        row["state"], row["reason"], row["values"] = state, reason, values
        self._study.tell(row["number"], state, values)
        self._search["best"] = _best(self._search)

    def _fail(self, row: Row, reason: str) -> None:
        row["state"], row["reason"] = TrialState.FAILED, reason
        self._study.tell(row["number"], TrialState.FAILED)


def _row(number: int, params: dict[str, str]) -> Row:
    return Row(
        number=number,
        state=TrialState.RUNNING,
        params=params,
        values=None,
        intermediate=[],
        reason=None,
        job=None,
        meaning=None,
    )


def _best(search: SearchRecord) -> list[int]:
    """Return the Pareto-optimal runs: not dominated by any other in the objectives."""
    signs = [-1.0 if name == "maximize" else 1.0 for name in search["directions"]]
    points = {
        row["number"]: [sign * value for sign, value in zip(signs, row["values"], strict=True)]
        for row in search["trials"]
        if row["values"] is not None and row["job"] == row["number"]
    }

    def is_beaten(mine: list[float]) -> bool:
        return any(
            other != mine and all(a <= b for a, b in zip(other, mine, strict=True))
            for other in points.values()
        )

    return [number for number, mine in points.items() if not is_beaten(mine)]


def launch_search(overrides: Sequence[str]) -> int:
    """Check a search's space, draw and run its trials, and report the best ones.

    Args:
        overrides: the command's, as typed.

    Returns:
        The exit code: 0 when every trial that began was completed or pruned, and at least one
        completed.

    Raises:
        MensError: nothing was started.
    """
    need_optuna()
    request = read_request(overrides)
    directory = SweepDir(request.root)
    with locked(directory, PLACE):
        Problems.raise_if(place_problems(request.root, ()))  # another launcher was quicker
        record = new_record(request, overrides, request.probed)
        record.search = request.search
        console = terminal.console(stderr=True)
        terminal.show(*search_view.space_parts(record), on=console)
        with writing(PLACE):
            record.write(directory.record)
        return _run(directory, record, console, request.cells)


def resume_search(
    directory: SweepDir, record: SweepRecord, console: Console, overrides: Sequence[str]
) -> int:
    """Resume a search whose job states match their directories; the caller holds its lock.

    Args:
        directory: directory of the search.
        record: record of the search.
        console: console for messages.
        overrides: overrides of its settings: the total number of trials.

    Raises:
        ConfigError: the number of trials is invalid.
        MissingExtra: Optuna is not installed.
    """
    assert record.search is not None, "a sweep that searches"
    need_optuna()
    drawn = len(record.search["trials"])
    for text in overrides:
        key, _, value = text.partition("=")
        if not value.isdecimal() or int(value) < max(drawn, 1):
            raise ConfigError(
                "out of range",
                where=key,
                found=value,
                expected=f"a whole number of trials, {drawn} or more, as so many were drawn",
            )
        record.search["n_trials"] = int(value)
    return _run(directory, record, console)


def _run(
    directory: SweepDir, record: SweepRecord, console: Console, cells: Cells | None = None
) -> int:
    """Run the rest of a search; a system error of the launcher stops it like a kill.

    Raises:
        SetupError: a read or write failed; the data on disk is consistent.
    """
    try:
        return _searched(directory, record, console, cells)
    except (OSError, MemoryError) as error:
        again = shlex.join(
            ["python", "-m", "mens_exp", override_of("sweep.resume", str(directory.path))]
        )
        refused = machine_fault(error, again)
        if refused is None:
            raise
        raise refused from error


def _searched(
    directory: SweepDir, record: SweepRecord, console: Console, cells: Cells | None
) -> int:
    assert record.search is not None, "a sweep that searches"
    search = Search(directory, record, Study(directory.journal, record.search), cells)
    search.catch_up()
    record.write(directory.record)
    code = finish(Launcher(directory, record, console, search), search.is_finished)
    search.conclude()
    record.write(directory.record)
    made = search_view.document(record)
    atomic.write_text(directory.search_page, html.page(made))
    terminal.show(*search_view.best_parts(record), on=console)
    terminal.say(f"Report: {directory.search_page}", on=console)
    terminal.say_next(made.steps, on=console)
    return code or int(not record.search["best"])
