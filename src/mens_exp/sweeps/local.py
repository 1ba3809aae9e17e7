"""Jobs as processes of this machine, so many at a time."""

from __future__ import annotations

import itertools
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import psutil

from mens_exp.artifacts.manifest import utc_now
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.run_lock import holder
from mens_exp.artifacts.sweep import JobAttempt, JobState
from mens_exp.sweeps.job import ACCEPT_CHANGES
from mens_exp.sweeps.process import Found, start
from mens_exp.sweeps.threads import VISIBLE, environment_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.sweep import SweepJob, SweepRecord
    from mens_exp.artifacts.sweep_dir import SweepDir
    from mens_exp.sweeps.executor import Work
    from mens_exp.sweeps.process import Ended, Process

__all__ = ["LocalExecutor", "LocalWork"]


class LocalWork:
    """A job's process, of this launcher or of an earlier one."""

    waits: str | None = None

    def __init__(self, job: SweepJob, run: RunDir, process: Process) -> None:
        """Take a job whose last attempt is that process."""
        self.is_over = False
        self._job, self._run, self._process = job, run, process

    def ended(self) -> Ended | None:
        """Tell how it ended; None while it runs."""
        ended = self._process.ended()
        if ended is None:
            return None
        attempt = self._job["attempts"][-1]
        other = holder(self._run.job_lock)
        if other is not None:  # started by a launcher that died before it could note it
            attempt["pid"], attempt["process_started"] = other
            self._process = Found(*other)
            return None
        attempt["ended_utc"] = utc_now()
        attempt["exit_code"], attempt["peak_rss_bytes"] = ended.exit_code, ended.peak_rss_bytes
        self.is_over = True
        return ended

    def end(self) -> None:
        """Let it close its record and end."""
        self.pass_on(signal.SIGTERM)

    def pass_on(self, number: int) -> None:
        """Send a signal to the process and to what it has started."""
        self._process.pass_on(number)


class LocalExecutor:
    """`hydra/launcher=local`: a slot for each of the jobs that run at a time."""

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
        """Take up a process of an earlier launcher, over `n_jobs` where they are more."""
        if job["state"] != JobState.RUNNING:
            return None
        last = job["attempts"][-1]
        work = LocalWork(job, self._run_dir(job), Found(last["pid"], last["process_started"]))
        self._slots[self._slot_of(job, last["pid"])] = work
        return work

    def _slot_of(self, job: SweepJob, pid: int) -> int:
        """Return the slot whose GPUs a process was given, else the first that is free."""
        with suppress(psutil.Error):  # it has ended, or the system does not tell
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
        """Do nothing: each process is asked by itself."""

    def cancel(self, works: Sequence[Work], number: int) -> None:
        """Hand a signal on to the processes."""
        for work in works:
            assert isinstance(work, LocalWork), "this executor made it"
            work.pass_on(number)

    def _run_dir(self, job: SweepJob) -> RunDir:
        return RunDir(self._directory.path / job["directory"])
