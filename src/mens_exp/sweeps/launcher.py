"""Run the jobs of a sweep: pass them to an executor and record the state of each.

The launcher is the only writer of a sweep's record, and locks its directory.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Protocol

from mens_exp.artifacts import atomic
from mens_exp.artifacts.host import run_lock
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState
from mens_exp.errors import SetupError
from mens_exp.report import sweep_view, terminal
from mens_exp.sweeps.executors import executor_of
from mens_exp.sweeps.outcome import outcome, update_from_directory
from mens_exp.tasks.run import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from rich.console import Console

    from mens_exp.artifacts.sweep import SweepDir, SweepJob, SweepRecord
    from mens_exp.sweeps.process import Ended, Work


@contextmanager
def locked(directory: SweepDir, where: str) -> Iterator[None]:
    """Lock a sweep against other launchers inside the block; create its directory if missing.

    Args:
        directory: the sweep directory.
        where: the key that names it.

    Raises:
        RequestError: another launcher is running it.
        SetupError: it cannot be created or written to.
    """
    with ExitStack() as stack:
        with writing(where):
            directory.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(run_lock(directory.lock))
        yield


@contextmanager
def writing(where: str) -> Iterator[None]:
    """Translate system errors inside the block (no directory, disk full).

    Raises:
        SetupError: the system refused an operation.
    """
    try:
        yield
    except OSError as error:
        raise SetupError(
            "the directory of the sweep cannot be written to",
            where=where,
            found=str(error),
            remedy="free space, or name another directory that you may write to",
        ) from error


_HEAR_S = 0.1  # latency of signal handling
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WELL = frozenset({JobState.SUCCEEDED, JobState.PRUNED})
_ENDS = _WELL | {JobState.FAILED}
_MAY_HAVE_ENDED = frozenset({JobState.RUNNING, JobState.WAITING})


class Feed(Protocol):
    """A source that adds jobs to a running sweep and receives their outcomes."""

    def supply(self) -> bool:
        """Add the next job to the record, if there is one; return whether one was added."""
        ...

    def watch(self, job: SweepJob) -> str | None:
        """Inspect a running job; return the reason to end it, or None."""
        ...

    def job_ended(self, job: SweepJob) -> None:
        """Process the end of a job."""
        ...


class Launcher:
    """Runs the waiting jobs of a sweep; the only writer of its record."""

    def __init__(
        self, directory: SweepDir, record: SweepRecord, console: Console, feed: Feed | None = None
    ) -> None:
        """Use a sweep whose jobs are frozen; the caller holds its lock."""
        self.directory, self.record, self.console = directory, record, console
        self._feed = feed
        self._executor = executor_of(directory, record)
        self._at_work: dict[int, Work] = {}  # by job number
        self._signals: list[int] = []
        self._is_cancelled = False
        self._tries: dict[int, int] = {}  # by job number; attempts by this launcher only
        self._worst = 0
        self._unsaved: OSError | None = None  # the error that keeps the record on disk outdated

    def run(self) -> int:
        """Run every waiting job, and wait for jobs that are already running.

        Returns:
            0 when all jobs succeeded, 130 when the sweep was cancelled, else the largest exit
            code of a failed job, 1 for one that was killed.

        Raises:
            SetupError: all jobs have ended, and the record could not be written.
        """
        with self._listening():
            self._adopt()
            while self._at_work or (not self._is_cancelled and self._is_more()):
                self._fill()
                self._pause()
                self._pass_on()
                self._look()
        for job in self._waiting():
            self._set(job, JobState.CANCELLED, "the sweep was cancelled before it began")
        self._save()
        if self._unsaved is not None:
            with writing(str(self.directory.record)):
                raise self._unsaved
        if self._is_cancelled:
            return CANCELLED
        failed = any(job["state"] not in _WELL for job in self.record.jobs)
        return max(self._worst, 1) if failed else 0

    def _is_more(self) -> bool:
        """Return whether a job is waiting or another one will be added."""
        return bool(self._waiting()) or (self._feed is not None and self._feed.supply())

    def _waiting(self) -> list[SweepJob]:
        """Return the jobs that have not been started yet."""
        return [
            job
            for job in self.record.jobs
            if job["state"] == JobState.WAITING and job["number"] not in self._at_work
        ]

    def _run_dir(self, job: SweepJob) -> RunDir:
        return RunDir(self.directory.path / job["directory"])

    def _adopt(self) -> None:
        """Adopt jobs that an earlier launcher left running."""
        for job in self.record.jobs:
            work = self._executor.adopt(job)
            if work is not None:
                self._at_work[job["number"]] = work
                self._say(job, "is still at work", _where(job))
                if self._run_dir(job).pruned.exists():  # the launcher died before ending it
                    work.end()
            elif job["state"] in _MAY_HAVE_ENDED:  # it may have ended after its directory was read
                update_from_directory(job, self._run_dir(job), here=False)
                if job["state"] in _ENDS:
                    self._set(job, JobState(job["state"]), job["reason"])

    def _fill(self) -> None:
        """Start as many waiting jobs as the executor has room for."""
        if self._is_cancelled:
            return
        if self._feed is not None:
            room = self.record.n_jobs - len(self._at_work)
            while len(self._waiting()) < room and self._feed.supply():
                pass
        waiting = self._waiting()
        told = {job["number"]: job["reason"] for job in waiting}
        for job, work in self._executor.start(waiting):
            if isinstance(work, str):
                self._set(job, JobState.FAILED, work)
                continue
            self._tries[job["number"]] = self._tries.get(job["number"], 0) + 1
            self._at_work[job["number"]] = work
            self._set(job, _state(work), work.waits)
        for job in self._waiting():
            if job["reason"] != told[job["number"]]:
                self._set(job, JobState.WAITING, job["reason"])
                self._say(job, "waits", job["reason"])

    def _pause(self) -> None:
        """Wait until the next poll or a signal."""
        until = time.monotonic() + self._executor.look_s
        while not self._signals and (left := until - time.monotonic()) > 0:
            time.sleep(min(left, _HEAR_S))

    def _look(self) -> None:
        """Record every job that has started, was requeued, or has ended."""
        self._executor.poll()
        for job in [job for job in self.record.jobs if job["number"] in self._at_work]:
            work, before = self._at_work[job["number"]], _known(job)
            ended = work.ended()
            if ended is not None:
                del self._at_work[job["number"]]
                self._note(job, ended)
            elif (reason := self._given_up(job)) is not None:
                atomic.write_text(self._run_dir(job).pruned, reason)
                work.end()
            elif (state := _state(work)) != job["state"]:
                self._set(job, state, work.waits)
                if state is JobState.WAITING:
                    self._say(job, "waits again", work.waits)
            elif _known(job) != before or job["reason"] != work.waits:
                job["reason"] = work.waits
                self._save()

    def _given_up(self, job: SweepJob) -> str | None:
        """Return, once, the reason why a search ends a running job; its record will state it."""
        if self._feed is None or job["state"] != JobState.RUNNING:
            return None
        return None if self._run_dir(job).pruned.exists() else self._feed.watch(job)

    def _note(self, job: SweepJob, ended: Ended) -> None:
        since = job["attempts"][-1]["started_utc"] if job["attempts"] else ""
        found = outcome(self._run_dir(job), ended, since_utc=since)
        job["results"] = found.results
        pruned = self._run_dir(job).pruned
        if pruned.exists() and found.state is not JobState.SUCCEEDED:
            self._set(job, JobState.PRUNED, pruned.read_text("utf-8"))
        elif self._is_cancelled and found.state is not JobState.SUCCEEDED:
            self._set(job, JobState.CANCELLED, "the sweep was cancelled")
        elif found.may_pass and self._tries.get(job["number"], 0) <= self.record.retries:
            self._say(job, "starts again", found.reason)
            self._set(job, JobState.WAITING, found.reason)
        else:
            if found.state is not JobState.SUCCEEDED:
                self._worst = max(self._worst, ended.exit_code or 0)
            self._set(job, found.state, found.reason)

    def _set(self, job: SweepJob, state: JobState, reason: str | None) -> None:
        job["state"], job["reason"] = state, reason
        if self._feed is not None and state in _ENDS:
            self._feed.job_ended(job)
        self._save()
        if state != JobState.WAITING:
            self._say(job, state.value, reason)

    def _say(self, job: SweepJob, what: str, why: str | None) -> None:
        terminal.say(sweep_view.job_line(self.record, job, what, why), on=self.console)

    def _save(self) -> None:
        """Write the record; continue to supervise jobs if the disk is full."""
        before = self._unsaved
        try:
            self.record.write(self.directory.record)
        except OSError as error:
            self._unsaved = error
            told = f"{self.directory.record} was not written, and will be tried again: {error}"
            if before is None:
                terminal.say(told, on=self.console)
        else:
            self._unsaved = None

    def _pass_on(self) -> None:
        """Forward each signal once to the jobs, which close their records and end."""
        while self._signals:
            number = self._signals.pop(0)
            self._is_cancelled = True
            self._executor.cancel(list(self._at_work.values()), number)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals only in the main thread
            return

        def heard(number: int, frame: FrameType | None) -> None:
            del frame
            self._signals.append(number)

        before = {each: signal.signal(each, heard) for each in _SIGNALS}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def _state(work: Work) -> JobState:
    return JobState.RUNNING if work.waits is None else JobState.WAITING


def _known(job: SweepJob) -> list[dict[str, object]]:
    return [dict(one) for one in job["attempts"]]


def _where(job: SweepJob) -> str | None:
    if not job["attempts"]:
        return job["reason"]
    last = job["attempts"][-1]
    return last.get("queue_id") or f"process {last['pid']}"
