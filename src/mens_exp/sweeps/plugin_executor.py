"""The executor of a sweep whose jobs are started by an installed Hydra launcher plugin.

A plugin runs one list of jobs and returns when all have ended, so each list (a batch) runs in a
separate process (`plugin_batch`). The state of a job is read from the log of its attempts.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mens_exp.artifacts import atomic
from mens_exp.artifacts.host import lock_holder, spawn_python
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import AttemptLog, JobState
from mens_exp.sweeps.plugin_batch import queue_id
from mens_exp.sweeps.process import Child, Ended, Found, Stop

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.artifacts.sweep import JobAttempt, SweepDir, SweepJob, SweepRecord
    from mens_exp.sweeps.process import Process, Work

_SILENT_S = 60.0  # a dozen heartbeats; a shared file system may show them late
_SILENT_HERE_S = 10.0  # if the job runs on this machine
_RETURNS_S = 10.0  # a plugin returns within a second of its last job
_LOOK_S = 0.05
_MODULE = "mens_exp.sweeps.plugin_batch"


@dataclass(kw_only=True)
class _Batch:
    """A list of jobs passed to the plugin, and the process that waits for them.

    Attributes:
        number: its number in the sweep, from 1.
        plugin: the option of hydra/launcher.
        jobs: the numbers of its jobs.
        output: file with the plugin's output.
        process: the process that waits.
    """

    number: int
    plugin: str
    jobs: list[int]
    output: Path
    process: Process
    _ended: Ended | None = None
    _have_ended: set[int] = field(default_factory=set)

    def is_over(self) -> bool:
        """Return whether the plugin has returned or failed."""
        self._ended = self._ended or self.process.ended()
        return self._ended is not None

    def note_end(self, number: int) -> None:
        """Note that a job has ended; after the last one, wait for the plugin or terminate it."""
        self._have_ended.add(number)
        if self._have_ended < set(self.jobs):
            return
        until = time.monotonic() + _RETURNS_S
        while not self.is_over():
            if time.monotonic() > until:
                self.process.pass_on(signal.SIGTERM)
                return
            time.sleep(_LOOK_S)

    def said(self) -> str:
        """Return the last line that the plugin printed, or its exit code."""
        lines = self.output.read_text("utf-8", "replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), None)
        return last or f"exit code {self._ended.exit_code if self._ended else None}"

    def attempts_in(self, attempts: Sequence[JobAttempt]) -> list[JobAttempt]:
        """Return the attempts that this batch made."""
        name = queue_id(self.plugin, self.number)
        return [one for one in attempts if one.get("queue_id", "").startswith(name)]


class PluginWork:
    """One job of a batch."""

    def __init__(self, directory: SweepDir, job: SweepJob, batch: _Batch) -> None:
        """Track a job of a batch that was started."""
        self._directory, self._job, self._batch = directory, job, batch
        self._log = AttemptLog(directory.attempts(job["number"]))
        self._run = RunDir(directory.path / job["directory"])
        self._is_unwanted = False
        self.waits: str | None = f"handed to {batch.plugin}"

    def ended(self) -> Ended | None:
        """Return how the job ended; None while it runs or waits."""
        ended = self._ended()
        if ended is not None:
            self._batch.note_end(self._job["number"])
        return ended

    def _ended(self) -> Ended | None:
        is_over = self._batch.is_over()  # before its attempts are read, so that none is missed
        mine = self._attempts()
        if mine and mine[-1]["ended_utc"] is not None:
            last = mine[-1]
            return Ended(exit_code=last["exit_code"], peak_rss_bytes=last["peak_rss_bytes"])
        if mine:
            self.waits = None
            if self._is_alive(mine[-1], is_over=is_over):
                return None
            self._log.ended(None)
            self._attempts()
            return Ended(exit_code=None)
        if self._is_unwanted:  # if the plugin still starts it, it ends at once
            reason = "cancelled before it began"
            return Ended(exit_code=None, stop=Stop(state=JobState.CANCELLED, reason=reason))
        if not is_over:
            return None
        reason = f"{self._batch.plugin} did not start it: {self._batch.said()}"
        return Ended(exit_code=None, stop=Stop(state=JobState.FAILED, reason=reason))

    def is_under_way(self) -> bool:
        """Return whether the batch is running the job or has yet to run it."""
        is_over, mine = self._batch.is_over(), self._attempts()
        if not mine:
            return not is_over
        return mine[-1]["ended_utc"] is None and self._is_alive(mine[-1], is_over=is_over)

    def end(self) -> None:
        """Cancel the job so that it closes its record."""
        self._is_unwanted = True
        with suppress(OSError):
            self._directory.unwanted(self._job["number"]).touch()

    def _attempts(self) -> list[JobAttempt]:
        self._job["attempts"][:] = found = self._log.attempts()
        return self._batch.attempts_in(found)

    def _is_alive(self, attempt: JobAttempt, *, is_over: bool) -> bool:
        """Return whether an unfinished attempt is still running, on this or another machine."""
        if lock_holder(self._run.job_lock) is not None:
            return True
        try:
            silent_s = time.time() - self._directory.alive(self._job["number"]).stat().st_mtime
        except OSError:
            return not is_over
        is_here = attempt.get("host") == socket.gethostname()
        return silent_s < (_SILENT_HERE_S if is_here else _SILENT_S)


class PluginExecutor:
    """`hydra/launcher=<option of a plugin>`."""

    look_s = 0.2

    def __init__(self, directory: SweepDir, record: SweepRecord) -> None:
        """Take a sweep whose jobs are frozen."""
        self._directory, self._record = directory, record
        self._place = directory.batch.resolve()

    def start(self, jobs: Sequence[SweepJob]) -> list[tuple[SweepJob, Work | str]]:
        """Pass all jobs to the plugin, which determines how many run concurrently."""
        if not jobs:
            return []
        self._place.mkdir(parents=True, exist_ok=True)
        number = len(list(self._place.glob("plugin_*.log"))) + 1
        output = self._place / f"plugin_{number}.log"
        for job in jobs:
            self._directory.unwanted(job["number"]).unlink(missing_ok=True)
            self._directory.alive(job["number"]).unlink(missing_ok=True)
        numbers = [job["number"] for job in jobs]
        arguments = [str(self._directory.path.resolve()), str(number), *map(str, numbers)]
        try:
            with output.open("ab") as file:
                process = Child(spawn_python(["-m", _MODULE, *arguments], output=file))
        except OSError as error:
            return [(job, f"no process could be started: {error}") for job in jobs]
        noted = {"pid": process.pid, "process_started": process.started, "jobs": numbers}
        atomic.write_text(output.with_suffix(".json"), json.dumps(noted))
        batch = self._batch(number, process, numbers)
        return [(job, PluginWork(self._directory, job, batch)) for job in jobs]

    def adopt(self, job: SweepJob) -> Work | None:
        """Adopt a job that a plugin still runs, or has yet to run, for an earlier launcher."""
        for number in range(len(list(self._place.glob("plugin_*.log"))), 0, -1):
            try:
                noted = json.loads((self._place / f"plugin_{number}.json").read_bytes())
            except (OSError, ValueError):  # its launcher died before it could write this
                continue
            if job["number"] in noted["jobs"]:
                process = Found(noted["pid"], noted["process_started"])
                work = PluginWork(self._directory, job, self._batch(number, process, noted["jobs"]))
                return work if work.is_under_way() else None
        return None

    def _batch(self, number: int, process: Process, jobs: list[int]) -> _Batch:
        return _Batch(
            number=number,
            plugin=self._record.launcher,
            jobs=jobs,
            output=self._place / f"plugin_{number}.log",
            process=process,
        )

    def poll(self) -> None:
        """Do nothing: each job is read from its own log."""

    def cancel(self, works: Sequence[Work], number: int) -> None:
        """Ask the jobs to end, on any machine."""
        del number
        for work in works:
            work.end()
