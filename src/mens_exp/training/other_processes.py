"""The processes that the first one starts beside itself, watched until they end."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mens_exp.artifacts import own_process
from mens_exp.errors import TrainingError
from mens_exp.plan.machine import cores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

__all__ = ["Others", "started"]

_END_S = 10.0  # for a process that was asked to end
_LINE = 200  # characters of a log's last line that a message shows


class Others:
    """Processes by rank; each writes what it has to say into a log of its own."""

    def __init__(self, processes: Mapping[int, subprocess.Popen[bytes]], logs: Path) -> None:
        """Take processes that were just started; the first logs into ``1.log`` under ``logs``."""
        self.processes = dict(processes)
        self.logs = logs

    def failed(self) -> TrainingError | None:
        """Say which process has ended as it should not; None where none has."""
        for rank, process in self.processes.items():
            code = process.poll()
            if code:
                log = self.logs / f"{rank}.log"
                return TrainingError(
                    f"process {rank} of {len(self.processes) + 1} has ended",
                    where=f"trainer, process number {process.pid}",
                    found=_how(code, log),
                    expected="all processes to train to the end",
                    remedy=f"see {log}, and go on with resume={self.logs.parent}",
                )
        return None

    def failed_within(self, seconds: float) -> TrainingError | None:
        """Wait so long for a process to end as it should not: its end may not be seen at once."""
        deadline = time.monotonic() + seconds
        while (found := self.failed()) is None and time.monotonic() < deadline:
            if all(process.poll() is not None for process in self.processes.values()):
                return self.failed()
            time.sleep(0.05)
        return found

    def wait(self) -> None:
        """Wait until all have ended; one that does not is ended."""
        deadline = time.monotonic() + _END_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def end(self) -> None:
        """End those that still run."""
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        self.wait()

    def drop_empty_logs(self) -> None:
        """Remove the logs of processes that had nothing to say."""
        for rank in self.processes:
            log = self.logs / f"{rank}.log"
            if log.is_file() and log.stat().st_size == 0:
                log.unlink()
        if self.logs.is_dir() and not any(self.logs.iterdir()):
            self.logs.rmdir()


def _how(code: int, log: Path) -> str:
    """Say how a process ended, and the last thing that it said."""
    how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    lines = log.read_text("utf-8", "replace").splitlines() if log.is_file() else []
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last[:_LINE]}" if last else how


@contextmanager
def started(
    arguments: Mapping[int, Sequence[str]], logs: Path, *, stuck: Callable[[TrainingError], None]
) -> Iterator[Others]:
    """Start processes for the block, and end them with it.

    Args:
        arguments: of ``python``, by rank.
        logs: directory of what they print.
        stuck: called from another thread where a process has ended and the block goes on all the
            same, half a minute later: a GPU's collective waits for ever.
    """
    logs.mkdir(exist_ok=True)
    others = Others(
        {
            rank: _start(line, logs / f"{rank}.log", len(arguments) + 1)
            for rank, line in arguments.items()
        },
        logs,
    )
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(others, over, stuck), daemon=True)
    watch.start()
    try:
        yield others
        others.wait()
    finally:
        over.set()
        watch.join()
        others.end()
        others.drop_empty_logs()


def _start(arguments: Sequence[str], log: Path, processes: int) -> subprocess.Popen[bytes]:
    """Start one in a session of its own: Ctrl-C ends it through the first process alone."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    with log.open("ab") as output:
        return own_process.spawn(arguments, output=output, environment=environment)


STUCK_S = 30.0


def _watch(others: Others, over: threading.Event, stuck: Callable[[TrainingError], None]) -> None:
    found = None
    while found is None:
        if over.wait(0.2):
            return
        found = others.failed()
    if not over.wait(STUCK_S):
        stuck(found)
