"""Programs to execute, their limits, and the outcome."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from mens_exp.errors import MensError
from mens_exp.sandbox.process_tree import kill_tree

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Mapping

__all__ = [
    "PYTHON",
    "Execution",
    "Limits",
    "Outcome",
    "Program",
    "Sandbox",
    "Service",
    "python_program",
]

PYTHON: Final = str(Path(sys.executable).resolve())
"""The interpreter without its virtual environment; the same path inside a sandbox."""

_END_S: Final = 5.0


class Outcome(StrEnum):
    """The way an execution ended."""

    ok = "ok"  # exit code 0
    failed = "failed"  # another exit code
    killed_signal = "killed_signal"  # by a signal that no limit sent
    timeout = "timeout"  # the wall time was over
    cpu_time = "cpu_time"
    memory = "memory"
    output = "output"  # more was written than is read
    files = "files"  # more were made than anything needs


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits of one execution, its whole process tree counted together."""

    memory_mib: int = 512
    cpu_s: float = 10.0
    wall_s: float = 10.0
    processes: int = 32  # threads count
    output_kib: int = 256  # stdout and stderr, each
    file_mib: int = 16  # all files that it writes together


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A command with the files it finds in its working directory; it never has a network."""

    argv: tuple[str, ...]
    files: Mapping[str, str | bytes] = field(default_factory=dict)  # by plain file name
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)  # beside PATH, HOME, TMPDIR and LANG
    visible: tuple[str, ...] = ()  # further paths of this machine, seen read-only
    channel: int | None = None  # a socket that is its input, instead of `stdin`

    def __post_init__(self) -> None:
        """Refuse a file elsewhere than in the working directory.

        Raises:
            MensError: a name is not a plain file name.
        """
        for name in self.files:
            if name in {"", ".", ".."} or set(name) & {"/", "\0"}:
                raise MensError(
                    "a program's file is named by a path", found=name, expected="a plain file name"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """The result of one program."""

    outcome: Outcome
    exit_code: int | None  # null where it was killed
    signal: int | None  # the signal that ended it, by itself or by a limit
    stdout: str
    stderr: str
    cut: tuple[str, ...]  # which of stdout and stderr were longer than is kept
    wall_s: float
    sandbox: str  # the kind that ran it


@dataclass(frozen=True, kw_only=True, slots=True)
class Service:
    """A program that goes on until its channel is closed; nothing that it writes is read."""

    process: subprocess.Popen[bytes]
    surroundings: contextlib.ExitStack  # what is gone with it

    @property
    def is_running(self) -> bool:
        """Whether it has not ended."""
        return self.process.poll() is None

    def close(self) -> None:
        """Wait for its end, its channel being closed, or kill it."""
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            kill_tree(self.process.pid)
            self.process.wait(_END_S)
        finally:
            self.surroundings.close()


class Sandbox(Protocol):
    """Runs one program, in a surrounding of its own that is gone afterwards."""

    @property
    def kind(self) -> str:
        """``bubblewrap``, or ``unsafe``: no isolation at all."""

    def run(self, program: Program, limits: Limits) -> Execution:
        """Execute one program; safe to call from several threads.

        Raises:
            SetupError: the surrounding could not be made; the program did not start.
        """

    def start(self, program: Program, limits: Limits) -> Service:
        """Start a program of this package that serves others; its whole time is not limited."""


def python_program(source: str, *, stdin: str = "", name: str = "main.py") -> Program:
    """Return a Python program with the standard library alone and a fixed hash seed."""
    return Program(
        argv=(PYTHON, "-s", "-S", "-B", name),
        files={name: source},
        stdin=stdin,
        env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
    )
