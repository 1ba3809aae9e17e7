"""The local launcher: every job a process of its own, so many at a time, each state on record."""

from __future__ import annotations

import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from mens_exp.artifacts import atomic
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.run_lock import holder
from mens_exp.artifacts.sweep import JobAttempt, JobState
from mens_exp.report import sweep_view
from mens_exp.sweeps.job import ACCEPT_CHANGES
from mens_exp.sweeps.outcome import outcome
from mens_exp.sweeps.process import Found, start
from mens_exp.sweeps.threads import environment_of
from mens_exp.tasks.one_run import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from rich.console import Console

    from mens_exp.artifacts.sweep import SweepJob, SweepRecord
    from mens_exp.artifacts.sweep_dir import SweepDir
    from mens_exp.sweeps.process import Ended, Process

__all__ = ["Feed", "Launcher"]

_LOOK_S = 0.1  # between two looks at the processes; a job takes seconds at least
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WELL = frozenset({JobState.SUCCEEDED, JobState.PRUNED})
_ENDS = _WELL | {JobState.FAILED}


class Feed(Protocol):
    """What adds jobs to a sweep while it runs, and learns what becomes of them."""

    def supply(self) -> bool:
        """Add a waiting job to the record, if another is to come; tell whether it did."""
        ...

    def watch(self, job: SweepJob) -> str | None:
        """Look at a running job; tell why it is to end, or None."""
        ...

    def settle(self, job: SweepJob) -> None:
        """Take note that a job has come to its end."""
        ...


class Launcher:
    """Runs what waits of a sweep; the only writer of its record."""

    def __init__(
        self, directory: SweepDir, record: SweepRecord, console: Console, feed: Feed | None = None
    ) -> None:
        """Take a sweep whose jobs are frozen; its lock is held by the caller."""
        self.directory, self.record, self.console = directory, record, console
        self._feed = feed
        self._at_work: dict[int, tuple[SweepJob, Process]] = {}  # by slot
        self._signals: list[int] = []
        self._is_cancelled = False
        self._tries: dict[int, int] = {}  # by job, of this launcher
        self._worst = 0

    def run(self) -> int:
        """Run every waiting job, and wait for those that are at work already.

        Returns:
            0 when all jobs succeeded, 130 when the sweep was cancelled, else the largest exit
            code of a failed job, 1 for one that was killed.
        """
        with self._listening():
            self._adopt()
            while self._at_work or (not self._is_cancelled and self._is_more()):
                self._fill()
                time.sleep(_LOOK_S)
                self._pass_on()
                self._look()
        for job in self._waiting():
            self._set(job, JobState.CANCELLED, "the sweep was cancelled before it began")
        self._save()
        if self._is_cancelled:
            return CANCELLED
        failed = any(job["state"] not in _WELL for job in self.record.jobs)
        return max(self._worst, 1) if failed else 0

    def _is_more(self) -> bool:
        """Tell whether a job waits, or one more is to come."""
        return bool(self._waiting()) or (self._feed is not None and self._feed.supply())

    def _waiting(self) -> list[SweepJob]:
        return [job for job in self.record.jobs if job["state"] == JobState.WAITING]

    def _run_dir(self, job: SweepJob) -> RunDir:
        return RunDir(self.directory.path / job["directory"])

    def _adopt(self) -> None:
        """Take up the processes of an earlier launcher, over `n_jobs` where they are more."""
        running = [job for job in self.record.jobs if job["state"] == JobState.RUNNING]
        for slot, job in enumerate(running):
            last = job["attempts"][-1]
            self._at_work[slot] = (job, Found(last["pid"], last["process_started"]))
            self._say(job, "is still at work", f"process {last['pid']}")

    def _fill(self) -> None:
        """Start waiting jobs in the free slots."""
        if self._is_cancelled:
            return
        for slot in range(self.record.n_jobs):
            is_free = slot not in self._at_work and len(self._at_work) < self.record.n_jobs
            if is_free and self._is_more():
                self._start(slot, self._waiting()[0])

    def _start(self, slot: int, job: SweepJob) -> None:
        run = self._run_dir(job)
        record = self.record
        arguments = [str(run.path)] + [ACCEPT_CHANGES] * (record.changes == "accept")
        environment = environment_of(slot, threads=record.threads, gpus=record.gpus)
        began = utc_now()
        try:
            process = start(arguments, run.log, environment)
        except OSError as error:
            self._set(job, JobState.FAILED, f"no process could be started: {error}")
            return
        self._tries[job["number"]] = self._tries.get(job["number"], 0) + 1
        job["attempts"].append(
            JobAttempt(
                pid=process.pid,
                process_started=process.started,
                started_utc=began,
                ended_utc=None,
                exit_code=None,
                peak_rss_bytes=None,
            )
        )
        self._at_work[slot] = (job, process)
        self._set(job, JobState.RUNNING, None)

    def _look(self) -> None:
        """Note every job whose process has ended."""
        for slot, (job, process) in list(self._at_work.items()):
            ended = process.ended()
            if ended is None:
                self._watch(job, process)
                continue
            other = holder(self._run_dir(job).job_lock)
            if other is not None:  # started by a launcher that died before it could note it
                job["attempts"][-1]["pid"], job["attempts"][-1]["process_started"] = other
                self._at_work[slot] = (job, Found(*other))
                self._save()
                continue
            del self._at_work[slot]
            self._note(job, ended)

    def _watch(self, job: SweepJob, process: Process) -> None:
        """End a job that its search gives up; its record says why."""
        run = self._run_dir(job)
        reason = None if self._feed is None or run.pruned.exists() else self._feed.watch(job)
        if reason is not None:
            atomic.write_text(run.pruned, reason)
            process.pass_on(signal.SIGTERM)

    def _note(self, job: SweepJob, ended: Ended) -> None:
        attempt = job["attempts"][-1]
        attempt["ended_utc"] = utc_now()
        attempt["exit_code"], attempt["peak_rss_bytes"] = ended.exit_code, ended.peak_rss_bytes
        found = outcome(self._run_dir(job), ended, since_utc=attempt["started_utc"])
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
            self._feed.settle(job)
        self._save()
        if state != JobState.WAITING:
            self._say(job, state.value, reason)

    def _say(self, job: SweepJob, what: str, why: str | None) -> None:
        self.console.print(sweep_view.line(self.record, job, what, why), soft_wrap=True)

    def _save(self) -> None:
        self.record.write(self.directory.record)

    def _pass_on(self) -> None:
        """Hand signals on to the jobs, each once: they close their records, then end."""
        while self._signals:
            number = self._signals.pop(0)
            self._is_cancelled = True
            for _, process in self._at_work.values():
                process.pass_on(number)

    @contextmanager
    def _listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield  # Python handles signals in the main thread alone
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
