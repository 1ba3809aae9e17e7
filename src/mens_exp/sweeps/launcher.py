"""Run the jobs of a sweep: pass them to an executor and record the state of each.

The launcher is the only writer of a sweep's record, and locks its directory. A job's outcome is
determined from its record and its exit status.
"""

from __future__ import annotations

import signal
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, Protocol

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.host import is_of_disk, run_lock
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState
from mens_exp.errors import MensError, SetupError
from mens_exp.report import sweep_view, terminal
from mens_exp.sweeps.executors import executor_of
from mens_exp.tasks.run import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from rich.console import Console

    from mens_exp.artifacts.sweep import SweepDir, SweepJob, SweepRecord
    from mens_exp.sweeps.process import Ended, Work

_CANCELLED, _A_BUG = 130, 1
_RESULTS = ("wall_s", "base_val_loss", "tuned_val_loss", "peak_rss_bytes", "peak_cuda_bytes")
_LOG_TAIL = 4_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The state of a job after its process ended.

    Attributes:
        state: state of the job.
        reason: the reason, if it did not succeed.
        may_pass: whether another attempt may succeed.
        results: measured results by name.
    """

    state: JobState
    reason: str | None = None
    may_pass: bool = False
    results: dict[str, Any] = field(default_factory=dict)


class Cause(Enum):
    """Cause of a job's failure: the job itself, or the machine, where a retry may succeed."""

    OWN = auto()  # a wrong request, a gate, a non-finite loss, a bug
    PROCESS = auto()  # it was killed, ran out of memory, or never started
    DISK = auto()  # the other jobs need it as well


def cause_of(job: SweepJob, run: RunDir) -> Cause:
    """Return the cause of a job's failure from its last attempt and its record."""
    last = job["attempts"][-1] if job["attempts"] else None
    if last is None or last.get("why") is not None:  # it never started, or a batch system ended it
        return Cause.PROCESS
    manifest, code = record_of(run), last["exit_code"]
    error = None if manifest is None else manifest.error
    if code is None and error is not None:  # its exit status is unknown
        code = error["exit_code"]
    if code is None or code < 0:
        return Cause.PROCESS
    if code != SetupError.exit_code:
        return Cause.OWN
    # A full disk has no room for the error either.
    return Cause.DISK if error is None or is_of_disk(error["remedy"]) else Cause.PROCESS


def record_of(run: RunDir) -> Manifest | None:
    """Read the record of a run; None if it is missing or unreadable."""
    try:
        return Manifest.read(run.manifest)
    except MensError:
        return None


def outcome(run: RunDir, ended: Ended, *, since_utc: str) -> Outcome:
    """Determine the outcome of a job.

    Args:
        run: its directory.
        ended: how its process ended.
        since_utc: start time of the process; record entries of earlier attempts are ignored.
    """
    manifest, code = record_of(run), ended.exit_code
    if manifest is not None and manifest.status is Status.SUCCEEDED and code in {0, None}:
        results = {name: manifest.results[name] for name in _RESULTS if name in manifest.results}
        return Outcome(state=JobState.SUCCEEDED, results=results)
    if ended.stop is not None:
        stop = ended.stop
        return Outcome(state=stop.state, reason=stop.reason, may_pass=stop.may_pass)
    return _by_itself(run, manifest, code, since_utc)


def _by_itself(run: RunDir, manifest: Manifest | None, code: int | None, since_utc: str) -> Outcome:
    """Return the outcome of a job that failed without being stopped."""
    status = None if manifest is None else manifest.status
    if code == _CANCELLED or (code is None and status is Status.CANCELLED):
        return Outcome(state=JobState.CANCELLED, reason="asked to stop by a signal")
    if code is not None and code < 0:
        return Outcome(state=JobState.FAILED, reason=_killed(-code), may_pass=True)
    told = _told(manifest, since_utc)
    if code is None and told is None:
        reason = "its process died, and nobody saw how"
        return Outcome(state=JobState.FAILED, reason=reason, may_pass=True)
    if code == 0:
        return Outcome(state=JobState.FAILED, reason="it ended without a record of success")
    reason = told or _last_line(run) or f"exit code {code}"
    return Outcome(state=JobState.FAILED, reason=reason, may_pass=code == _A_BUG)


def _killed(number: int) -> str:
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"


def _told(manifest: Manifest | None, since_utc: str) -> str | None:
    """Return the error of the latest attempt."""
    if manifest is None or manifest.error is None:
        return None
    if manifest.attempts and manifest.attempts[-1]["started_utc"] < since_utc:
        return None
    error = manifest.error
    return f"{error['type']}: {error['message']}"


def _last_line(run: RunDir) -> str | None:
    """Return the last log line of a process that ended without a record."""
    try:
        text = run.log.read_bytes()[-_LOG_TAIL:].decode("utf-8", "replace")
    except OSError:
        return None
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def damage(run: RunDir, manifest: Manifest, config_digest: str) -> str | None:
    """Describe how a finished job differs from its record; None if it matches.

    Args:
        run: its directory.
        manifest: its record.
        config_digest: digest of the configuration that the sweep gave it.
    """
    if manifest.config_digest != config_digest:
        return f"{run.manifest.name} is of another configuration"
    for name, sha256 in manifest.outputs.items():
        path = run.path / name
        if not path.is_file():
            return f"{name} is gone"
        if sha256_file(path) != sha256:
            return f"{name} has changed"
    return None


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
            remedy="make room or name another directory, one that you may write to",
        ) from error


_HEAR_S = 0.1  # latency of signal handling
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_WELL = frozenset({JobState.SUCCEEDED, JobState.PRUNED})
_ENDS = _WELL | {JobState.FAILED}


class Feed(Protocol):
    """A source that adds jobs to a running sweep and receives their outcomes."""

    def supply(self) -> bool:
        """Add the next job to the record, if there is one; return whether one was added."""
        ...

    def watch(self, job: SweepJob) -> str | None:
        """Inspect a running job; return the reason to end it, or None."""
        ...

    def settle(self, job: SweepJob) -> None:
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
        self._at_work: dict[int, Work] = {}  # by job
        self._signals: list[int] = []
        self._is_cancelled = False
        self._tries: dict[int, int] = {}  # by job; only of this launcher
        self._worst = 0
        self._unsaved: OSError | None = None  # why the record on disk is out of date

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
            elif job["state"] == JobState.RUNNING:  # it has ended in the meantime
                job["state"] = JobState.WAITING

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
            self._feed.settle(job)
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
