"""Start, supervise and stop a job's process, with its share of threads and GPUs.

The module also defines the executor protocol: start jobs, report their state, end them.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import psutil

from mens_exp.artifacts import host
from mens_exp.artifacts.host import is_alive, peak_rss_bytes
from mens_exp.config.sweep import LocalLauncher, SlurmLauncher
from mens_exp.errors import MensError, RequestError
from mens_exp.planning.machine import cores
from mens_exp.tasks import coordinator

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.sweep import JobState, SweepJob
    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig
    from mens_exp.config.sweep import Launcher, PluginLauncher

_KIB = 1024
_LOOK_S = 1.0  # polling interval for the memory of processes; the system keeps their peaks


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A batch system's statement about a job that it ended.

    Attributes:
        state: state of the job.
        reason: the system's term for it, with an explanation.
        may_pass: whether another attempt may succeed.
    """

    state: JobState
    reason: str
    may_pass: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """Exit status of a process.

    Attributes:
        exit_code: exit code, or minus the number of the signal that ended it; None if unknown.
        peak_rss_bytes: sum of its peak and those of its worker processes; None if unknown.
        stop: statement of a batch system; None if it ended by itself.
    """

    exit_code: int | None
    peak_rss_bytes: int | None = None
    stop: Stop | None = None


class Process(Protocol):
    """The part of a process that the launcher needs."""

    pid: int
    started: float

    def ended(self) -> Ended | None:
        """Return how the process ended; None while it runs."""
        ...

    def pass_on(self, number: int) -> None:
        """Send a signal to the process and its children."""
        ...


class Child:
    """A process that this one started.

    Attributes:
        has_others: whether it starts worker processes, whose memory counts as well.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Track a process that was just started."""
        self.has_others = False
        self._process = process
        self._peaks: dict[int, int] = {}  # of the workers, by pid
        self._looked = 0.0
        self.pid = process.pid
        self.started = _start_time(process.pid)

    def ended(self) -> Ended | None:
        """Return how the process ended; None while it runs."""
        if sys.platform == "win32":
            code = self._process.poll()
            return None if code is None else Ended(exit_code=code)
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid == 0:
            self._look_at_others()
            return None
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code  # it was waited for here
        scale = 1 if sys.platform == "darwin" else _KIB
        peak = usage.ru_maxrss * scale + sum(self._peaks.values())
        return Ended(exit_code=code, peak_rss_bytes=peak)

    def _look_at_others(self) -> None:
        """Record the memory of the worker processes while they run."""
        now = time.monotonic()
        if not self.has_others or now - self._looked < _LOOK_S:
            return
        self._looked = now
        for pid in _others_of(self.pid):
            peak = peak_rss_bytes(pid)
            if peak is not None:
                self._peaks[pid] = max(peak, self._peaks.get(pid, 0))

    def pass_on(self, number: int) -> None:
        """Send a signal to the process and its children."""
        signal_group(self.pid, number)


class Found:
    """A process that is already running; its outcome can only be read from its record."""

    def __init__(self, pid: int, started: float) -> None:
        """Track a process by its pid and start time."""
        self.pid, self.started = pid, started

    def ended(self) -> Ended | None:
        """Return an unknown exit status once the process is gone; None while it runs."""
        return None if is_alive(self.pid, self.started) else Ended(exit_code=None)

    def pass_on(self, number: int) -> None:
        """Send a signal to the process and its children."""
        if is_alive(self.pid, self.started):
            signal_group(self.pid, number)


def start(
    arguments: Sequence[str],
    log: Path,
    environment: Mapping[str, str],
    before: Sequence[str] = (),
) -> Child:
    """Start a job in a separate session, so that neither Ctrl-C nor a closed terminal ends it.

    Args:
        arguments: arguments of ``python -m mens_exp.sweeps.job``.
        log: file to which its output is appended.
        environment: environment of the process.
        before: a command to which the job's command line is appended, such as ``srun``.

    Raises:
        OSError: the system cannot start another process.
    """
    with log.open("ab") as output:
        command = ["-m", "mens_exp.sweeps.job", *arguments]
        return Child(
            host.spawn_python(command, output=output, environment=environment, before=before)
        )


def _others_of(pid: int) -> list[int]:
    """Return the worker processes that a job has started."""
    found = []
    try:
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error):  # it may have just ended
                if coordinator.__name__ in child.cmdline():
                    found.append(child.pid)
    except psutil.Error:
        pass
    return found


def _start_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:  # it has ended already, but was not waited for
        return 0.0


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a job's process group; do nothing if it is gone."""
    try:
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended


class Work(Protocol):
    """A job that an executor has accepted.

    Attributes:
        waits: the reason why it does not run yet; None once it runs.
    """

    waits: str | None

    def ended(self) -> Ended | None:
        """Return how it ended; None while it runs or waits.

        This also updates the attempts in the job's record.
        """
        ...

    def end(self) -> None:
        """Cancel this job, whose result is no longer needed; it closes its record."""
        ...


class Executor(Protocol):
    """A place where the jobs of a sweep run."""

    look_s: float  # polling interval, in seconds

    def start(self, jobs: Sequence[SweepJob]) -> list[tuple[SweepJob, Work | str]]:
        """Accept as many waiting jobs, in order, as there is room for; the rest stay waiting.

        A sweep with listed cells offers all of them from the start; a search offers each as it is
        drawn.

        Returns:
            The accepted jobs, each with its work or the reason why it could not be started.
        """
        ...

    def adopt(self, job: SweepJob) -> Work | None:
        """Adopt a job that an earlier launcher left behind; None if it is not running."""
        ...

    def poll(self) -> None:
        """Query the state of all jobs at once; their works then report it."""
        ...

    def cancel(self, works: Sequence[Work], number: int) -> None:
        """Cancel jobs, which close their records.

        Args:
            works: the running jobs.
            number: number of the signal that requested it.
        """
        ...


VISIBLE = "CUDA_VISIBLE_DEVICES"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def jobs_at_a_time(launcher: Launcher) -> int:
    """Return the maximum number of concurrent jobs."""
    if isinstance(launcher, SlurmLauncher):
        return launcher.array_parallelism
    many = launcher.n_jobs if isinstance(launcher, LocalLauncher) else _n_jobs_of(launcher)
    return many if many > 0 else max(1, cores() + 1 + many)


def _n_jobs_of(launcher: PluginLauncher) -> int:
    """Return the plugin's own setting, counted as joblib does, or one job for each core."""
    given = launcher.settings.get("n_jobs")
    return given if isinstance(given, int) and given else -1


def threads_per_job(launcher: Launcher) -> int:
    """Return the threads per job: the user's setting, or the cores divided by concurrent jobs."""
    if isinstance(launcher, SlurmLauncher):
        return launcher.cpus_per_task
    asked = (
        launcher.threads
        if isinstance(launcher, LocalLauncher)
        else launcher.settings.get("cpus_per_task")
    )
    if isinstance(asked, int):
        return asked
    given = os.environ.get(_THREADS[0], "")
    if given.isdecimal() and int(given) > 0:
        return int(given)
    return max(1, cores() // jobs_at_a_time(launcher))


def processes_of(config: RunConfig) -> int:
    """Count the processes of a job on its machine."""
    return config.trainer.devices if config.task.name == "train" else 1


def nodes_of(config: RunConfig) -> int:
    """Count the machines of a job."""
    return config.trainer.num_nodes if config.task.name == "train" else 1


def gpus_per_job(cells: Sequence[Cell]) -> int:
    """Return the number of GPUs of the widest job; 0 if no job may use one."""
    configs = [cell.config for cell in cells]
    many = [processes_of(one) for one in configs if one.trainer.accelerator != "cpu"]
    return max(many, default=0)


def gpus_of(slot: int, gpus: Sequence[str], each: int) -> tuple[str, ...]:
    """Return the GPUs of a slot.

    Args:
        slot: index among the concurrent jobs.
        gpus: the GPUs that all jobs share.
        each: GPUs per slot; single-GPU slots may share a GPU, round-robin.
    """
    if each == 1:
        return (gpus[slot % len(gpus)],) if gpus else ()
    return tuple(gpus[slot * each : (slot + 1) * each])


def gpu_problems(gpus: Sequence[str], each: int, n_jobs: int) -> list[MensError]:
    """Refuse more concurrent multi-GPU jobs than the GPUs allow.

    Args:
        gpus: the GPUs that all jobs share; empty if unknown.
        each: GPUs per slot.
        n_jobs: number of concurrent jobs.
    """
    if each == 1 or not gpus or n_jobs * each <= len(gpus):
        return []
    most = len(gpus) // each
    return [
        RequestError(
            "that many concurrent jobs need more GPUs than there are",
            where="hydra.launcher.n_jobs",
            found=f"{n_jobs} of {each} GPUs each (trainer.devices), and {len(gpus)} are here",
            expected=f"at most {most}",
            remedy=f"choose hydra.launcher.n_jobs={most}" if most else "choose fewer processes",
        )
    ]


def environment_of(
    slot: int, *, threads: int, gpus: Sequence[str], each: int = 1, processes: int = 1
) -> dict[str, str]:
    """Return the environment of a job.

    Args:
        slot: index among the concurrent jobs.
        threads: threads of the job, divided among its processes; torch reads the number from the
            environment.
        gpus: devices, assigned to slots round-robin.
        each: GPUs per slot.
        processes: number of processes of the job.
    """
    made = {**os.environ, **dict.fromkeys(_THREADS, str(max(1, threads // processes)))}
    made.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")  # as the command line sets it
    if mine := gpus_of(slot, gpus, each):
        made[VISIBLE] = ",".join(mine[:processes])
    return made
