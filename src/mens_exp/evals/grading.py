"""Run an answer in one process, and its tests in another that never saw its code.

The answer's process (`answer_side.py`) is fresh for each answer and gives values. The grader
(`grader_side.py`) is started once for each sandbox, in a sandbox of its own, and forks for each
answer. Both are started here, joined by a socket; only the grader's word makes a verdict.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import marshal
import math
import os
import socket
import threading
import weakref
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import SetupError
from mens_exp.sandbox.program import PYTHON, Limits, Program

if TYPE_CHECKING:
    from mens_exp.sandbox.program import Execution, Sandbox, Service

__all__ = ["Graded", "Grader", "grader_of"]

_PYTHON: Final = (PYTHON, "-s", "-S", "-B", "main.pyc")
_ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
_MORE_S: Final = 2.0  # for the grader to find that the answer's time was over
_MORE_MIB: Final = 128  # the grader's own, beside the values of the answer
# Of the grader itself; what it makes of one answer has limits of its own.
_GRADER: Final = Limits(memory_mib=2**20, cpu_s=86_400, processes=256, file_mib=1)
_STARTING: Final = threading.Lock()
_GRADERS: Final[weakref.WeakKeyDictionary[Any, Grader]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """The grader's word on an answer.

    Attributes:
        said: ``passed``; ``raised``; ``ended``, by the answer's process; ``refused``, what it wrote
            being no value; or ``lost``, where the grader was killed at a limit.
        error: the type of what was raised; empty otherwise.
        message: its message, or why something was refused.
        line: the line of the tests that it was raised from.
        execution: of the answer's process.
    """

    said: str
    error: str = ""
    message: str = ""
    line: int | None = None
    execution: Execution


class Grader:
    """A process that forks one that runs tests, for each answer."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start it."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = replace(_program("grader_side.py"), channel=theirs.fileno())
            self._service = sandbox.start(program, _GRADER)
        self._finalizer = weakref.finalize(self, _close, self._control, self._service, os.getpid())

    @property
    def is_running(self) -> bool:
        """Whether it can be asked."""
        return self._service.is_running

    def close(self) -> None:
        """End it."""
        self._finalizer()

    def grade(
        self, sandbox: Sandbox, files: dict[str, str], job: dict[str, Any], limits: Limits
    ) -> Graded:
        """Run one answer and its tests; safe to call from several threads.

        Args:
            sandbox: of the answer.
            files: of the answer, ``solution.py`` among them.
            job: for `grader_side.py`: tests, what stands before them, the entry point.
            limits: of the answer. The grader may wait a little longer, and use a little more.

        Raises:
            SetupError: a sandbox could not be made.
        """
        limited = {
            **job,
            "wall_s": limits.wall_s + _MORE_S,
            "cpu_s": math.ceil(limits.cpu_s) + 1,
            "memory_mib": limits.memory_mib + _MORE_MIB,
        }
        answering, asking = socket.socketpair()
        result, judging = socket.socketpair()
        with answering, result:
            with asking, judging:
                self._hand_over(judging, asking)
            _send(result, marshal.dumps(limited))
            program = _program("answer_side.py")
            program = replace(program, files={**program.files, **files}, channel=answering.fileno())
            try:
                execution = sandbox.run(program, limits)
            finally:
                with contextlib.suppress(OSError):  # whoever still holds it: it is over
                    answering.shutdown(socket.SHUT_RDWR)
            verdict = _received(result)
        if not verdict and not self.is_running:
            raise SetupError(
                "the process that runs tests did not start, or was killed",
                expected="a sandbox, and memory for one more Python",
                remedy="see `task=doctor`",
            )
        if not verdict:
            return Graded(said="lost", execution=execution)
        word, message, line = json.loads(verdict)
        said, _, error = word.partition(" ")
        return Graded(said=said, error=error, message=message, line=line, execution=execution)

    def _hand_over(self, judging: socket.socket, asking: socket.socket) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # seen by the missing word
            socket.send_fds(self._control, [b"answer"], [judging.fileno(), asking.fileno()])


def grader_of(sandbox: Sandbox) -> Grader:
    """Return the grader of a sandbox, started at the first call and whenever it is gone."""
    with _STARTING:
        found = _GRADERS.get(sandbox)
        if found is None or not found.is_running:
            found = _GRADERS[sandbox] = Grader(sandbox)
        return found


def _close(control: socket.socket, service: Service, pid: int) -> None:
    if os.getpid() != pid:  # a fork of the process that started it
        control.close()
        return
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # also where a fork still holds it
    control.close()
    service.close()


def _send(to: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # as above
        to.sendall(len(data).to_bytes(4, "little") + data)


def _received(result: socket.socket) -> bytes:
    """Return what the grader wrote until it ended; it is killed at its own limit."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := result.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def _program(name: str) -> Program:
    return Program(argv=_PYTHON, files={"main.pyc": _compiled(name)}, env=_ENVIRONMENT)


@functools.cache
def _compiled(name: str) -> bytes:
    """Return a program of this package as bytecode: compiling it anew would take milliseconds."""
    source = Path(__file__).with_name(name).read_text("utf-8")
    code = compile(source, name, "exec", dont_inherit=True, optimize=2)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
