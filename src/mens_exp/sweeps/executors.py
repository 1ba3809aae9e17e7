"""Executors of a sweep: Slurm, local processes or a plugin, selected by hydra/launcher.

Each executor checks its requirements before anything is started. Only Slurm knows whether a job is
running, because jobs run on other machines and may outlive the launcher. A job that reaches its
time limit requeues itself (`slurm_task`), and Slurm requeues preempted jobs; both resume from the
last checkpoint.
"""

from __future__ import annotations

import itertools
import shlex
import signal
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from mens_exp.artifacts import atomic
from mens_exp.artifacts.host import lock_holder
from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import AttemptLog, JobAttempt, JobState
from mens_exp.config.sweep import LocalLauncher, PluginLauncher, SlurmLauncher, launcher_settings
from mens_exp.errors import ConfigError
from mens_exp.sweeps.job import ACCEPT_CHANGES
from mens_exp.sweeps.plugin_executor import PluginExecutor
from mens_exp.sweeps.process import VISIBLE, Ended, Found, Stop, environment_of, start
from mens_exp.sweeps.slurm_commands import (
    call,
    is_passing,
    queue_of,
    refused,
    script,
    slurm_problems,
)
from mens_exp.sweeps.slurm_task import TIMEOUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.sweep import SweepDir, SweepJob, SweepRecord
    from mens_exp.config.sweep import Launcher
    from mens_exp.errors import MensError
    from mens_exp.sweeps.process import Executor, Process, Work
    from mens_exp.sweeps.slurm_commands import Seen

_MEANS = {
    "BOOT_FAIL": "its node did not start",
    "CANCELLED": "ended by scancel",
    "DEADLINE": "it could not end before its deadline",
    "LAUNCH_FAILED": "Slurm could not start it",
    "NODE_FAIL": "its node failed",
    "OUT_OF_MEMORY": "it took more than its memory (hydra.launcher.mem_gb)",
    "PREEMPTED": "another job took its node",
    "RECONFIG_FAIL": "its node could not be set up",
}
# Such a job was pruned by a search, but the launcher died before it could notify Slurm.
_MAY_BE_AT_WORK = frozenset({JobState.RUNNING, JobState.WAITING, JobState.PRUNED})
_LOOKS = 3  # polls at which a job must be missing before it counts as gone
_MAY_PASS = frozenset({"BOOT_FAIL", "LAUNCH_FAILED", "NODE_FAIL", "PREEMPTED", "RECONFIG_FAIL"})


class SlurmWork:
    """One task of a job array."""

    def __init__(self, executor: SlurmExecutor, job: SweepJob, queue_id: str) -> None:
        """Track a job by its queue id."""
        self._executor, self._job, self.queue_id = executor, job, queue_id
        self.waits: str | None = f"submitted to Slurm as {queue_id}"

    def ended(self) -> Ended | None:
        """Return how the job ended; None while it runs or waits."""
        log = self._executor.log(self._job)
        self._job["attempts"][:] = log.attempts()
        if self._executor.silence is not None:
            told = f"{self._executor.silence}; Slurm may still have it as {self.queue_id}"
            return Ended(exit_code=None, stop=Stop(state=JobState.FAILED, reason=told))
        if not self._executor.has_answered:
            return None
        seen = self._executor.seen.get(self.queue_id)
        if seen is not None and not seen.is_over:
            # Measured on 22.05: a controller that was down when a job ended lists it as running
            # for minutes.
            if self._mine and self._mine[-1]["exit_code"] == 0:
                return Ended(exit_code=0)
            queued = f"in Slurm's queue as {self.queue_id}: {seen.reason}"
            self.waits = queued if seen.is_waiting else None
            return None
        if self._job["attempts"] and self._job["attempts"][-1]["ended_utc"] is None:
            log.ended(None, why=None if seen is None else seen.state)
            self._job["attempts"][:] = log.attempts()
        return self._ended(seen)

    def end(self) -> None:
        """Cancel the job so that it closes its record; Slurm does not requeue it."""
        self._executor.end(self.queue_id)

    @property
    def _mine(self) -> list[JobAttempt]:
        """The attempts that Slurm started under this id."""
        return [one for one in self._job["attempts"] if one.get("queue_id") == self.queue_id]

    def _ended(self, seen: Seen | None) -> Ended:
        mine = self._mine
        if seen is None and mine:  # it ended long ago and Slurm has purged it
            return Ended(exit_code=mine[-1]["exit_code"])
        if seen is None:  # measured on 22.05: jobs cancelled in the queue are purged
            reason = f"CANCELLED: {self.queue_id} left Slurm's queue before it began"
            return Ended(exit_code=None, stop=Stop(state=JobState.CANCELLED, reason=reason))
        late = sum(one.get("why") == TIMEOUT for one in mine)
        if seen.state == TIMEOUT or (mine and mine[-1].get("why") == TIMEOUT):
            settings = self._executor.launcher
            times = f"{late} time{'' if late == 1 else 's'}"
            reason = f"{TIMEOUT}: its {settings.timeout_min} minutes were over, {times}"
            may_pass = late <= settings.max_num_timeout
            stop = Stop(state=JobState.FAILED, reason=reason, may_pass=may_pass)
        elif seen.state in _MEANS:
            state = JobState.CANCELLED if seen.state == "CANCELLED" else JobState.FAILED
            reason = f"{seen.state}: {_MEANS[seen.state]}"
            stop = Stop(state=state, reason=reason, may_pass=seen.state in _MAY_PASS)
        elif not mine:
            said = self._executor.output(self.queue_id) or f"exit code {seen.exit_code}"
            reason = f"{seen.state}: it never began: {said}"
            stop = Stop(state=JobState.FAILED, reason=reason)
        else:
            return Ended(exit_code=mine[-1]["exit_code"])
        return Ended(exit_code=None, stop=stop)


class SlurmExecutor:
    """`hydra/launcher=slurm`."""

    def __init__(self, directory: SweepDir, record: SweepRecord, launcher: SlurmLauncher) -> None:
        """Take a sweep whose jobs are frozen."""
        self.launcher, self.look_s = launcher, launcher.poll_s
        self.seen: dict[str, Seen] = {}
        self.has_answered = False
        self.silence: str | None = None  # why jobs can no longer be followed
        self._directory, self._record = directory, record
        self._batch = directory.batch.resolve()
        self._unwanted: set[str] = set()  # jobs to cancel, of which Slurm could not be notified
        self._gone: Counter[str] = Counter()  # polls at which Slurm did not list a job
        self._is_unsure = False  # whether Slurm may have accepted the last submission

    def start(self, jobs: Sequence[SweepJob]) -> list[tuple[SweepJob, Work | str]]:
        """Submit all jobs as one job array; if Slurm does not answer, they wait."""
        if self._is_unsure and not self.has_answered:
            return []
        there = [(job, work) for job in jobs if self._is_unsure and (work := self._queued(job))]
        self._is_unsure = False
        taken = {job["number"] for job, _ in there}
        return [*there, *self._submitted([job for job in jobs if job["number"] not in taken])]

    def _submitted(self, jobs: Sequence[SweepJob]) -> list[tuple[SweepJob, Work | str]]:
        if not jobs:
            return []
        self._batch.mkdir(parents=True, exist_ok=True)
        numbers = [job["number"] for job in jobs]
        path = self._batch / f"submission_{len(list(self._batch.glob('*.sh'))) + 1}.sh"
        arguments = [
            str(self._directory.path.resolve()),
            f"--timeout-min={self.launcher.timeout_min}",
            f"--signal-delay-s={self.launcher.signal_delay_s}",
            f"--max-num-timeout={self.launcher.max_num_timeout}",
            f"--nodes={self.launcher.nodes or 1}",
            *([ACCEPT_CHANGES] if self._record.changes == "accept" else []),
        ]
        text = script(self.launcher, numbers, batch=self._batch, arguments=arguments)
        atomic.write_text(path, text)
        try:
            array = call(["sbatch", "--parsable", str(path)]).strip().partition(";")[0]
        except OSError as error:
            if is_passing(str(error)):
                self._is_unsure, self.has_answered = True, False
                for job in jobs:
                    job["reason"] = f"Slurm does not take it yet: {error}"
                return []
            return [(job, f"Slurm did not take it: {error}") for job in jobs]
        self.poll()
        return [(job, SlurmWork(self, job, f"{array}_{job['number']}")) for job in jobs]

    def adopt(self, job: SweepJob) -> Work | None:
        """Adopt a job of an earlier launcher that is queued or running in Slurm."""
        if not self.has_answered:
            try:
                self.seen, self.has_answered = queue_of(self._batch), True
            except OSError as error:
                raise refused(str(error)) from error
        job["attempts"][:] = self.log(job).attempts()
        return self._queued(job) if job["state"] in _MAY_BE_AT_WORK else None

    def _queued(self, job: SweepJob) -> SlurmWork | None:
        """Return a job's work, if it is queued or running in Slurm."""
        mine = [one for one in self.seen.values() if one.number == job["number"]]
        ids = [one.queue_id for one in mine if not one.is_over]
        return SlurmWork(self, job, ids[-1]) if ids else None

    def poll(self) -> None:
        """Query the states of all jobs; if Slurm does not answer, they stay unchanged."""
        try:
            found, self.has_answered = queue_of(self._batch), True
        except OSError:  # a restarting controller; the next answer covers all changes
            self.has_answered = False
            return
        gone = {name for name, last in self.seen.items() if not last.is_over} - found.keys()
        self._gone = Counter({name: self._gone[name] + 1 for name in gone})
        # Measured on 22.05: a controller that was killed does not list all jobs at once after
        # restart.
        kept = {name: self.seen[name] for name in gone if self._gone[name] < _LOOKS}
        self.seen = found | kept
        for queue_id in sorted(self._unwanted):
            self.end(queue_id)

    def end(self, queue_id: str) -> None:
        """Cancel one job; if Slurm does not answer, repeat the request when it does."""
        self._unwanted.discard(queue_id)
        try:
            call(["scancel", queue_id])
        except OSError as error:  # any other error means that the job has already ended
            if is_passing(str(error)):
                self._unwanted.add(queue_id)

    def cancel(self, works: Sequence[Work], number: int) -> None:
        """Cancel the jobs: Slurm signals them, and kills those that do not close in time."""
        del number
        ids = [work.queue_id for work in works if isinstance(work, SlurmWork)]
        if not ids:
            return
        try:
            call(["scancel", *ids])
        except OSError as error:
            self.silence = f"`{shlex.join(['scancel', *ids])}` failed: {error}"

    def log(self, job: SweepJob) -> AttemptLog:
        """Return the log of a job's attempts."""
        return AttemptLog(self._directory.attempts(job["number"]))

    def output(self, queue_id: str) -> str | None:
        """Return the last line of the batch script's output."""
        try:
            text = (self._batch / f"slurm_{queue_id}.out").read_text("utf-8", "replace")
        except OSError:  # there is no output
            return None
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1] if lines else None


class LocalWork:
    """A job's local process, started by this launcher or an earlier one."""

    waits: str | None = None

    def __init__(self, job: SweepJob, run: RunDir, process: Process) -> None:
        """Track a job whose last attempt is ``process``."""
        self.is_over = False
        self._job, self._run, self._process = job, run, process

    def ended(self) -> Ended | None:
        """Return how the job ended; None while it runs."""
        ended = self._process.ended()
        if ended is None:
            return None
        attempt = self._job["attempts"][-1]
        other = lock_holder(self._run.job_lock)
        if other is not None:  # started by a launcher that died before it could record it
            attempt["pid"], attempt["process_started"] = other
            self._process = Found(*other)
            return None
        attempt["ended_utc"] = utc_now()
        attempt["exit_code"], attempt["peak_rss_bytes"] = ended.exit_code, ended.peak_rss_bytes
        self.is_over = True
        return ended

    def end(self) -> None:
        """Cancel the job so that it closes its record."""
        self.pass_on(signal.SIGTERM)

    def pass_on(self, number: int) -> None:
        """Send a signal to the process and its children."""
        self._process.pass_on(number)


class LocalExecutor:
    """`hydra/launcher=local`: one slot per concurrent job."""

    look_s = 0.1  # a job takes seconds at least

    def __init__(self, directory: SweepDir, record: SweepRecord) -> None:
        """Take a sweep whose jobs are frozen."""
        self._directory, self._record = directory, record
        self._slots: dict[int, LocalWork] = {}

    def start(self, jobs: Sequence[SweepJob]) -> list[tuple[SweepJob, Work | str]]:
        """Start jobs in the free slots."""
        self._slots = {slot: work for slot, work in self._slots.items() if not work.is_over}
        many = self._record.n_jobs
        free = [slot for slot in range(many) if slot not in self._slots]
        free = free[: max(0, many - len(self._slots))]
        return [(job, self._started(slot, job)) for slot, job in zip(free, jobs, strict=False)]

    def _started(self, slot: int, job: SweepJob) -> Work | str:
        record, run = self._record, self._run_dir(job)
        arguments = [str(run.path)] + [ACCEPT_CHANGES] * (record.changes == "accept")
        began = utc_now()
        try:
            process = start(arguments, run.log, self._environment(slot, job))
        except OSError as error:
            return f"no process could be started: {error}"
        process.has_others = job.get("processes", 1) > 1
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
        self._slots[slot] = LocalWork(job, run, process)
        return self._slots[slot]

    def adopt(self, job: SweepJob) -> Work | None:
        """Adopt a process of an earlier launcher, even beyond `n_jobs`."""
        if job["state"] != JobState.RUNNING:
            return None
        last = job["attempts"][-1]
        work = LocalWork(job, self._run_dir(job), Found(last["pid"], last["process_started"]))
        self._slots[self._slot_of(job, last["pid"])] = work
        return work

    def _slot_of(self, job: SweepJob, pid: int) -> int:
        """Return the slot that owns a process's GPUs, or else the first free slot."""
        with suppress(psutil.Error):  # it has ended, or its environment is not readable
            given = psutil.Process(pid).environ().get(VISIBLE, "")
            for slot in range(self._record.n_jobs):
                if slot not in self._slots and self._environment(slot, job).get(VISIBLE) == given:
                    return slot
        return next(slot for slot in itertools.count() if slot not in self._slots)

    def _environment(self, slot: int, job: SweepJob) -> dict[str, str]:
        record = self._record
        return environment_of(
            slot,
            threads=record.threads,
            gpus=record.gpus,
            each=record.gpus_per_job,
            processes=job.get("processes", 1),
        )

    def poll(self) -> None:
        """Do nothing: each process is polled individually."""

    def cancel(self, works: Sequence[Work], number: int) -> None:
        """Forward a signal to the processes."""
        for work in works:
            assert isinstance(work, LocalWork), "this executor made it"
            work.pass_on(number)

    def _run_dir(self, job: SweepJob) -> RunDir:
        return RunDir(self._directory.path / job["directory"])


def executor_of(directory: SweepDir, record: SweepRecord) -> Executor:
    """Return the executor of a sweep."""
    launcher = launcher_settings(record.launcher_settings, record.launcher)
    if isinstance(launcher, SlurmLauncher):
        return SlurmExecutor(directory, record, launcher)
    if isinstance(launcher, PluginLauncher):
        return PluginExecutor(directory, record)
    return LocalExecutor(directory, record)


def executor_problems(launcher: Launcher, many: int) -> list[MensError]:
    """List problems that prevent a launcher from running jobs; nothing is started or written.

    Args:
        launcher: its settings.
        many: the number of jobs.
    """
    if isinstance(launcher, SlurmLauncher):
        return slurm_problems(launcher, many)
    if isinstance(launcher, LocalLauncher) and launcher.n_jobs == 0:
        return [
            ConfigError(
                "out of range",
                where="hydra.launcher.n_jobs",
                found=0,
                expected="1 or more, or -1 for one job for each core",
            )
        ]
    return []
