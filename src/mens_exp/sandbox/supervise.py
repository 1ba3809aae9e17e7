"""Wait for a process tree within its limits, and end it where one is passed."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from mens_exp.errors import MensError
from mens_exp.sandbox.process_tree import files_in, use_of
from mens_exp.sandbox.program import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.sandbox.program import Limits

__all__ = ["Ended", "supervise"]

_MOST_FILES: Final = 10_000  # each is a kilobyte of the kernel's memory, whatever it holds
_SAMPLE_S: Final = 0.05  # how often memory and processor time are looked at
_DRAIN_S: Final = 1.0  # for what is left in the pipes of a process that has ended
_DEATH_S: Final = 10.0  # a killed process that still has not ended hangs in the kernel
_EXIT: Final = "exit"


@dataclass(kw_only=True, slots=True)
class Ended:
    """The end of a tree, and its output."""

    by_limit: Outcome | None = None
    returncode: int = 0  # of the first process, as `subprocess` has it
    wall_s: float = 0.0
    written: dict[str, bytearray] = field(default_factory=dict)  # by stdout, stderr
    cut: list[str] = field(default_factory=list)


def supervise(
    process: subprocess.Popen[bytes],
    limits: Limits,
    *,
    started: float,
    kill: Callable[[], None],
    private: str | None = None,
) -> Ended:
    """Read what a process writes until it and its pipes have ended, or a limit is passed.

    Args:
        process: started with pipes for stdout and stderr.
        limits: of its tree; those that the kernel keeps are not looked at here.
        started: when, on the monotonic clock.
        kill: ends the tree; it is called at most once, and also when this is interrupted.
        private: where the tree sees a file system of its own, whose files are counted.

    Returns:
        What was written up to the limit, and the limit that ended it, if one did.

    Raises:
        MensError: the process was killed and has not ended.
    """
    ended = Ended()
    done = False
    exit_fd = os.pidfd_open(process.pid)
    try:
        with selectors.DefaultSelector() as selector:
            for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
                assert pipe is not None, "the process was started with pipes"
                ended.written[name] = bytearray()
                selector.register(pipe, selectors.EVENT_READ, name)
            selector.register(exit_fd, selectors.EVENT_READ, _EXIT)
            ended.by_limit = _watch(
                selector,
                limits,
                ended,
                started=started,
                passed=lambda: _passed(process.pid, limits, private),
            )
        done = ended.by_limit is None
    finally:
        os.close(exit_fd)
        if not done:
            kill()
        ended.wall_s = time.monotonic() - started
        _close(process)
        ended.returncode = _awaited(process)
    return ended


def _awaited(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(_DEATH_S)
    except subprocess.TimeoutExpired as error:
        raise MensError(
            "a killed process is still alive", found=f"process {process.pid}"
        ) from error


def _watch(
    selector: selectors.BaseSelector,
    limits: Limits,
    ended: Ended,
    *,
    started: float,
    passed: Callable[[], Outcome | None],
) -> Outcome | None:
    deadline = started + limits.wall_s
    sample_at = started + _SAMPLE_S
    running = True
    while selector.get_map():
        until = min(deadline, sample_at) if running else deadline
        for key, _ in selector.select(max(0.0, until - time.monotonic())):
            if key.data == _EXIT:
                running = False
                selector.unregister(key.fileobj)
                deadline = time.monotonic() + _DRAIN_S
            elif not _read(key, selector, limits.output_kib * 1024, ended):
                return Outcome.output
        now = time.monotonic()
        if now >= deadline:
            return Outcome.timeout if running else None
        if running and now >= sample_at:
            limit = passed()
            if limit is not None:
                return limit
            sample_at = time.monotonic() + _SAMPLE_S
    return None


def _read(
    key: selectors.SelectorKey, selector: selectors.BaseSelector, most: int, ended: Ended
) -> bool:
    """Take what a pipe holds; tell whether it is within the limit."""
    chunk = os.read(key.fd, 65_536)
    if not chunk:
        selector.unregister(key.fileobj)
        return True
    kept = ended.written[key.data]
    kept += chunk
    if len(kept) <= most:
        return True
    del kept[most:]
    ended.cut.append(key.data)
    return False


def _passed(pid: int, limits: Limits, private: str | None) -> Outcome | None:
    most = limits.memory_mib * 2**20
    use = use_of(pid, memory_above=most)
    if use.memory_bytes > most:
        return Outcome.memory
    if private is not None and files_in(pid, private) > _MOST_FILES:
        return Outcome.files
    return Outcome.cpu_time if use.cpu_s > limits.cpu_s else None


def _close(process: subprocess.Popen[bytes]) -> None:
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()
