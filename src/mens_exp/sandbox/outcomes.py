"""Outcome of an execution, from its exit status and its output."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Final

from mens_exp.sandbox.program import Execution, Outcome

if TYPE_CHECKING:
    from mens_exp.sandbox.supervise import Ended

__all__ = ["execution_of"]

_SHELL_SIGNALS: Final = 128  # bubblewrap reports a signal as 128 more than its number
# What a runtime says that was refused memory: CPython, and Rust, which adds a note.
_REFUSED_MEMORY: Final = ("MemoryError", "memory allocation of ")
_LAST_LINES: Final = 3


def execution_of(ended: Ended, status: int, *, sandbox: str) -> Execution:
    """Describe an execution.

    Args:
        ended: what was watched.
        status: the program's exit status; above 128, or negative, a signal. A program that exits
            with such a number of its own is taken for killed.
        sandbox: the kind that ran it.
    """
    number = _signal_of(status) if ended.by_limit is None else signal.SIGKILL
    stdout, stderr = (
        bytes(ended.written[name]).decode("utf-8", errors="replace")
        for name in ("stdout", "stderr")
    )
    return Execution(
        outcome=ended.by_limit or _outcome(status, number, stderr),
        exit_code=status if number is None else None,
        signal=None if number is None else int(number),
        stdout=stdout,
        stderr=stderr,
        cut=tuple(ended.cut),
        wall_s=ended.wall_s,
        sandbox=sandbox,
    )


def _signal_of(status: int) -> int | None:
    number = -status if status < 0 else status - _SHELL_SIGNALS
    return number if number in signal.valid_signals() else None


def _outcome(status: int, number: int | None, stderr: str) -> Outcome:
    if status == 0:
        return Outcome.ok
    if number == signal.SIGXCPU:
        return Outcome.cpu_time
    last = stderr.rstrip().splitlines()[-_LAST_LINES:]
    if any(line.startswith(_REFUSED_MEMORY) for line in last):
        return Outcome.memory
    return Outcome.failed if number is None else Outcome.killed_signal
