"""Jobs in joblib's pool: each is handed to a worker, which starts a process of its own for it."""

from __future__ import annotations

import importlib.util
import signal
import threading
import time
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.attempt_log import AttemptLog
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.run_lock import held, is_alive
from mens_exp.artifacts.sweep import JobState
from mens_exp.config.launcher import PoolBackend
from mens_exp.errors import ConfigError, MensError, MissingExtra, RequestError
from mens_exp.sweeps.job import ACCEPT_CHANGES
from mens_exp.sweeps.process import Ended, Found, Stop
from mens_exp.sweeps.supervise import supervise
from mens_exp.sweeps.threads import environment_of
from mens_exp.tasks.one_run import CANCELLED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Executor, Future
    from pathlib import Path

    from mens_exp.artifacts.sweep import JobAttempt, SweepJob, SweepRecord
    from mens_exp.artifacts.sweep_dir import SweepDir
    from mens_exp.config.launcher import JoblibLauncher
    from mens_exp.sweeps.executor import Work

__all__ = ["Call", "JoblibExecutor", "PoolWork", "pool_problems", "work"]

_LOOK_S = 0.1  # a job takes seconds at least
_IDLE_S = 300.0  # joblib's own; a worker without a job for so long, or without its launcher, ends


def pool_problems(launcher: JoblibLauncher) -> list[MensError]:
    """Return what keeps joblib from running jobs here."""
    if importlib.util.find_spec("joblib") is None:
        return [
            MissingExtra(
                "hydra/launcher=joblib needs joblib",
                where="hydra/launcher",
                remedy="pip install 'mens-exp[joblib]', or hydra/launcher=local, which needs none",
            )
        ]
    if launcher.n_jobs == 0:
        return [
            ConfigError(
                "out of range",
                where="hydra.launcher.n_jobs",
                found=0,
                expected="a whole number of jobs, or -1 for one for each core",
            )
        ]
    return []


class PoolWork:
    """A job that a worker of the pool has, or one that an earlier pool left at work."""

    def __init__(self, job: SweepJob, log: AttemptLog, told: Future[Ended] | Found) -> None:
        """Take a job, and what tells of its end: its worker, or else its process."""
        self.is_over = False
        self._job, self._log, self._told = job, log, told
        is_left = isinstance(told, Found)
        self._before = len(log.attempts()) - is_left
        self.waits: str | None = None if is_left else "it waits for a worker of joblib's pool"

    def ended(self) -> Ended | None:
        """Tell how it ended; None while it runs or waits."""
        ended = self._result()  # before the log is read, which then is whole
        if ended is not None and self._log.is_open():  # no worker is left that would note the end
            left = process_left(self._log.attempts())
            if left is None:
                self._log.ended(None)
            else:
                self._told, ended = left, None
        self._job["attempts"][:] = self._log.attempts()
        if len(self._job["attempts"]) > self._before:
            self.waits = None
        self.is_over = ended is not None
        return ended

    def _result(self) -> Ended | None:
        if isinstance(self._told, Found):
            return self._told.ended()
        if not self._told.done():
            return None
        try:
            return self._told.result()
        except BrokenExecutor:  # a worker was killed, which ends all of them
            return Ended(exit_code=None)

    def end(self) -> None:
        """Let it close its record and end."""
        process = process_left(self._log.attempts())
        if process is not None:
            process.pass_on(signal.SIGTERM)

    def pass_on(self, number: int) -> None:
        """Send a signal to a process that no worker waits for."""
        if isinstance(self._told, Found):
            self._told.pass_on(number)


def process_left(attempts: Sequence[JobAttempt]) -> Found | None:
    """Return the process of the last attempt, where it is still at work."""
    if not attempts or attempts[-1]["ended_utc"] is not None:
        return None
    last = attempts[-1]
    alive = is_alive(last["pid"], last["process_started"])
    return Found(last["pid"], last["process_started"]) if alive else None


class JoblibExecutor:
    """`hydra/launcher=joblib`: a pool that lasts, whose workers each have one job at a time."""

    look_s = _LOOK_S

    def __init__(self, directory: SweepDir, record: SweepRecord, launcher: JoblibLauncher) -> None:
        """Take a sweep whose jobs are frozen."""
        self._directory, self._record, self._launcher = directory, record, launcher
        self._pool: Executor | None = None
        self._works: list[PoolWork] = []
        directory.signals.unlink(missing_ok=True)  # of an earlier launcher

    def start(self, jobs: Sequence[SweepJob]) -> list[tuple[SweepJob, Work | str]]:
        """Hand jobs to workers that have none."""
        self._works = [work for work in self._works if not work.is_over]
        room = max(0, self._record.n_jobs - len(self._works))
        return [(job, self._handed_over(job)) for job in jobs[:room]]

    def _handed_over(self, job: SweepJob) -> PoolWork:
        log, call = self._log(job), self._call(job)
        if self._pool is None:
            self._pool = _pool(self._launcher.backend, self._record.n_jobs)
        try:
            told = self._pool.submit(work, call)
        except BrokenExecutor:  # a worker was killed; what it had at work is seen to
            self._pool = _pool(self._launcher.backend, self._record.n_jobs)
            told = self._pool.submit(work, call)
        self._works.append(PoolWork(job, log, told))
        return self._works[-1]

    def _call(self, job: SweepJob) -> Call:
        record = self._record
        run = RunDir(self._directory.path / job["directory"])
        return Call(
            number=job["number"],
            arguments=[str(run.path)] + [ACCEPT_CHANGES] * (record.changes == "accept"),
            output=run.log,
            n_jobs=record.n_jobs,
            threads=record.threads,
            gpus=record.gpus,
            gpus_per_job=record.gpus_per_job,
            processes=job.get("processes", 1),
            directory=self._directory,
        )

    def adopt(self, job: SweepJob) -> Work | None:
        """Take up a process of an earlier pool, over `n_jobs` where they are more."""
        log = self._log(job)
        job["attempts"][:] = log.attempts()
        found = process_left(job["attempts"])
        if found is None or job["state"] not in {JobState.RUNNING, JobState.WAITING}:
            return None
        self._works.append(PoolWork(job, log, found))
        return self._works[-1]

    def poll(self) -> None:
        """Do nothing: workers tell of themselves."""

    def cancel(self, works: Sequence[Work], number: int) -> None:
        """Hand a signal on through the workers; jobs that wait for one do not begin."""
        with self._directory.signals.open("ab") as file:
            file.write(b"%d\n" % number)
        for one in works:
            assert isinstance(one, PoolWork), "this executor made it"
            one.pass_on(number)

    def _log(self, job: SweepJob) -> AttemptLog:
        return AttemptLog(self._directory.attempts(job["number"]))


def _pool(backend: PoolBackend, n_jobs: int) -> Executor:
    """Return workers: joblib's own processes, or threads of this one."""
    if backend is PoolBackend.threading:
        return ThreadPoolExecutor(n_jobs)
    from joblib.externals import loky

    pool: Executor = loky.ProcessPoolExecutor(n_jobs, timeout=_IDLE_S)
    return pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """The arguments that a worker needs to run one job.

    Attributes:
        number: of the job.
        arguments: of ``python -m mens_exp.sweeps.job``.
        output: where the job's output goes.
        n_jobs: jobs at a time.
        threads: of the job.
        gpus: devices that jobs take in turn.
        gpus_per_job: how many of them a job may use.
        processes: of the job.
        directory: the sweep's.
    """

    number: int
    arguments: list[str]
    output: Path
    n_jobs: int
    threads: int
    gpus: list[str]
    gpus_per_job: int
    processes: int
    directory: SweepDir


def work(call: Call) -> Ended:
    """Run one job, in a worker of the pool; tell how it ended."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher hears Ctrl-C for all of them
    passed = 0

    def news() -> list[int]:
        nonlocal passed
        found = _numbers(call.directory.signals)[passed:]
        passed += len(found)
        return found

    log = AttemptLog(call.directory.attempts(call.number))
    if _numbers(call.directory.signals):
        return Ended(exit_code=CANCELLED)
    try:
        with _slot(call.directory.batch, call.n_jobs) as slot:
            environment = environment_of(
                slot,
                threads=call.threads,
                gpus=call.gpus,
                each=call.gpus_per_job,
                processes=call.processes,
            )
            ended = supervise(
                call.arguments,
                call.output,
                environment,
                log,
                processes=call.processes,
                queue_id=None,
                signals=news,
            )
    except OSError as error:
        stop = Stop(state=JobState.FAILED, reason=f"no process could be started: {error}")
        return Ended(exit_code=None, stop=stop)
    log.ended(ended.exit_code, peak_rss_bytes=ended.peak_rss_bytes)
    return ended


_slots = threading.Lock()  # threads of one process share its locks


@contextmanager
def _slot(batch: Path, n_jobs: int) -> Iterator[int]:
    """Take a place among the jobs that run at a time, which decides the GPU."""
    batch.mkdir(parents=True, exist_ok=True)
    while True:
        for slot in range(n_jobs):
            manager = held(batch / f"slot_{slot}.lock")
            try:
                with _slots:
                    manager.__enter__()
            except RequestError:
                continue
            try:
                yield slot
            finally:
                manager.__exit__(None, None, None)
            return
        time.sleep(_LOOK_S)


def _numbers(signals: Path) -> list[int]:
    try:
        return [int(line) for line in signals.read_text("ascii").split()]
    except OSError:  # none was sent
        return []
