"""A job's process: one that this launcher started, or one that an earlier launcher left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import psutil

from mens_exp.artifacts import own_process
from mens_exp.artifacts.host_memory import peak_rss_bytes
from mens_exp.artifacts.run_lock import is_alive
from mens_exp.tasks import following

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.sweep import JobState

__all__ = ["Child", "Ended", "Found", "Process", "Stop", "signal_group", "start"]

_KIB = 1024
_LOOK_S = 1.0  # between two looks at the memory of processes, whose peaks the system keeps


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """A batch system's statement about a job that it ended.

    Attributes:
        state: of the job.
        reason: the system's own word for it, and what that means.
        may_pass: whether another attempt may end otherwise.
    """

    state: JobState
    reason: str
    may_pass: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The way a process ended.

    Attributes:
        exit_code: minus the number of the signal that ended it; None where nobody saw.
        peak_rss_bytes: its own peak, and those of the processes that train along with it; None
            where the system did not tell.
        stop: what a batch system says of it; None where it ended by itself.
    """

    exit_code: int | None
    peak_rss_bytes: int | None = None
    stop: Stop | None = None


class Process(Protocol):
    """The part of a process that the launcher needs."""

    pid: int
    started: float

    def ended(self) -> Ended | None:
        """Tell how it ended; None while it runs."""
        ...

    def pass_on(self, number: int) -> None:
        """Send a signal to it and to what it has started."""
        ...


class Child:
    """A process that this one started.

    Attributes:
        has_others: whether it starts processes that train along, whose memory counts as well.
    """

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        """Take a process that was just started."""
        self.has_others = False
        self._process = process
        self._peaks: dict[int, int] = {}  # of the others, by their numbers
        self._looked = 0.0
        self.pid = process.pid
        self.started = _start_time(process.pid)

    def ended(self) -> Ended | None:
        """Tell how it ended; None while it runs."""
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
        """Note how much memory those have taken that train along, while they can be asked."""
        now = time.monotonic()
        if not self.has_others or now - self._looked < _LOOK_S:
            return
        self._looked = now
        for pid in _others_of(self.pid):
            peak = peak_rss_bytes(pid)
            if peak is not None:
                self._peaks[pid] = max(peak, self._peaks.get(pid, 0))

    def pass_on(self, number: int) -> None:
        """Send a signal to it and to what it has started."""
        signal_group(self.pid, number)


class Found:
    """A process that is at work already; how it ends can only be read from its record."""

    def __init__(self, pid: int, started: float) -> None:
        """Take a process by its number and start time."""
        self.pid, self.started = pid, started

    def ended(self) -> Ended | None:
        """Tell that it is gone; None while it runs."""
        return None if is_alive(self.pid, self.started) else Ended(exit_code=None)

    def pass_on(self, number: int) -> None:
        """Send a signal to it and to what it has started."""
        if is_alive(self.pid, self.started):
            signal_group(self.pid, number)


def start(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> Child:
    """Start a job in a session of its own, so that neither Ctrl-C nor a closed terminal ends it.

    Args:
        arguments: of ``python -m mens_exp.sweeps.job``.
        log: where its output goes, after what is there.
        environment: of the process.

    Raises:
        OSError: the system starts no further process.
    """
    with log.open("ab") as output:
        command = ["-m", "mens_exp.sweeps.job", *arguments]
        return Child(own_process.spawn(command, output=output, environment=environment))


def _others_of(pid: int) -> list[int]:
    """Return the processes that a job has started to train along."""
    found = []
    try:
        for child in psutil.Process(pid).children():
            with suppress(psutil.Error):  # it has just ended
                if following.__name__ in child.cmdline():
                    found.append(child.pid)
    except psutil.Error:
        pass
    return found


def _start_time(pid: int) -> float:
    try:
        return psutil.Process(pid).create_time()
    except psutil.Error:  # it is gone already, and waits to be asked how
        return 0.0


def signal_group(pid: int, number: int) -> None:
    """Send a signal to a job's process and to what it has started; nothing where it is gone."""
    try:
        if sys.platform == "win32":
            os.kill(pid, signal.SIGTERM)
        else:
            os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass  # it has ended
