"""Grade a Python completion: run the answer in one process and its tests in another.

The answer's process (`answer_side.py`) is new for each answer and returns values. The grader
(`grader_side.py`) is started once per sandbox, in a separate sandbox, and forks for each answer.
This module starts both and connects them with a socket. Only the grader decides the verdict, so
nothing that the completion does in its own process produces one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import json
import marshal
import math
import os
import re
import socket
import textwrap
import threading
import weakref
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from mens_exp.errors import SetupError
from mens_exp.evals.completion_styles import ANNOTATIONS, Assembled, Style, above, assemble
from mens_exp.sandbox.program import PYTHON, Limits, Outcome, Program, call_all

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.sandbox.program import Execution, Sandbox, Service

_PYTHON: Final = (PYTHON, "-s", "-S", "-B", "main.pyc")
_ENVIRONMENT: Final = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"}
_MORE_S: Final = 2.0  # additional time for the grader to notice that the answer has timed out
_MORE_MIB: Final = 128  # additional memory for the grader besides the answer's values
# Limits of the grader itself; each fork for an answer has separate limits.
_GRADER: Final = Limits(memory_mib=2**20, cpu_s=86_400, processes=256, file_mib=1)
_STARTING: Final = threading.Lock()
_GRADERS: Final[weakref.WeakKeyDictionary[Any, Grader]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Graded:
    """The grader's verdict on an answer.

    Attributes:
        said: ``passed``; ``raised``; ``ended``, if the answer's process ended early; ``refused``,
            if it wrote an invalid value; or ``lost``, if the grader was killed at a limit.
        error: type of the raised exception; empty otherwise.
        message: its message, or the reason for the refusal.
        line: the line of the tests that raised it.
        execution: execution of the answer's process.
    """

    said: str
    error: str = ""
    message: str = ""
    line: int | None = None
    execution: Execution


class Grader:
    """A process that forks a test process for each answer."""

    def __init__(self, sandbox: Sandbox) -> None:
        """Start the process."""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            program = replace(_program("grader_side.py"), channel=theirs.fileno())
            self._service = sandbox.start(program, _GRADER)
        self._finalizer = weakref.finalize(self, _close, self._control, self._service, os.getpid())

    @property
    def is_running(self) -> bool:
        """Whether the process accepts answers."""
        return self._service.is_running

    def close(self) -> None:
        """End the process."""
        self._finalizer()

    def grade(
        self, sandbox: Sandbox, files: dict[str, str], job: dict[str, Any], limits: Limits
    ) -> Graded:
        """Run one answer and its tests; safe to call from several threads.

        Args:
            sandbox: sandbox of the answer.
            files: files of the answer, including ``solution.py``.
            job: the job for `grader_side.py`: tests, code before them, and the entry point.
            limits: limits of the answer; the grader's are slightly higher.

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
                with contextlib.suppress(OSError):  # ends the connection even if a child holds it
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
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # no verdict will follow
            socket.send_fds(self._control, [b"answer"], [judging.fileno(), asking.fileno()])


def grader_of(sandbox: Sandbox) -> Grader:
    """Return the grader of a sandbox; start it if it is not running."""
    with _STARTING:
        found = _GRADERS.get(sandbox)
        if found is None or not found.is_running:
            found = _GRADERS[sandbox] = Grader(sandbox)
        return found


def _close(control: socket.socket, service: Service, pid: int) -> None:
    if os.getpid() != pid:  # this is a fork of the process that started the grader
        control.close()
        return
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # takes effect even if a fork still holds the socket
    control.close()
    service.close()


def _send(to: socket.socket, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # likewise
        to.sendall(len(data).to_bytes(4, "little") + data)


def _received(result: socket.socket) -> bytes:
    """Return everything that the grader's fork wrote until it ended, at the latest at its limit."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := result.recv(65_536):
            parts.append(part)
    return b"".join(parts)


def _program(name: str) -> Program:
    return Program(argv=_PYTHON, files={"main.pyc": _compiled(name)}, env=_ENVIRONMENT)


@functools.cache
def _compiled(name: str) -> bytes:
    """Return a program of this package as bytecode; cached, since compiling takes milliseconds."""
    source = Path(__file__).with_name(name).read_text("utf-8")
    code = compile(source, name, "exec", dont_inherit=True, optimize=2)
    return importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)


class Verdict(StrEnum):
    """The result of one completion."""

    PASSED = "passed"
    SYNTAX_ERROR = "syntax_error"  # no reading of it is a program; nothing was executed
    COMPILE_ERROR = "compile_error"  # rejected by the compiler
    NO_FUNCTION = "no_function"  # a program without the requested function
    ASSERTION = "assertion"  # a test failed
    EXCEPTION = "exception"  # raised by the answer, also inside a test
    TIMEOUT = "timeout"  # wall or processor time
    MEMORY = "memory"
    OUTPUT = "output"
    FILES = "files"
    CRASHED = "crashed"  # ended by a signal
    EXITED = "exited"  # it ended the process before the tests did


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTask:
    """A function to write, and the tests that it must pass."""

    id: str
    prompt: str  # the model's prompt
    entry_point: str
    tests: str  # statements that raise if the function is wrong
    code: str = ""  # code of the prompt that the program starts with
    setup: str = ""  # statements before the program
    reference: str  # a completion that passes

    @property
    def asks_for_class(self) -> bool:
        """Whether the entry point is a class, whose operators are then tested too."""
        pattern = rf"^class\s+{re.escape(self.entry_point)}\b"
        return re.search(pattern, self.reference, re.MULTILINE) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The verdict on one completion, with its evidence."""

    task: str
    verdict: Verdict
    detail: str | None  # the exception's type and message
    test: str | None  # the failed statement of the tests
    style: Style | None
    source: str
    execution: Execution | None  # None if nothing was executed


OF_OUTCOME: Final = {
    Outcome.timeout: Verdict.TIMEOUT,
    Outcome.cpu_time: Verdict.TIMEOUT,
    Outcome.memory: Verdict.MEMORY,
    Outcome.output: Verdict.OUTPUT,
    Outcome.files: Verdict.FILES,
    Outcome.killed_signal: Verdict.CRASHED,
}
"""Verdicts that follow from a limit or a signal."""

_OF_ERROR: Final = {"AssertionError": Verdict.ASSERTION, "MemoryError": Verdict.MEMORY}


def check_all(
    sandbox: Sandbox,
    tasks: Sequence[ProgramTask],
    completions: Sequence[str],
    limits: Limits,
    workers: int | None = None,
) -> list[Checked]:
    """Judge one completion of each task, several at once, in order.

    Raises:
        SetupError: the sandbox failed.
    """
    read = [
        assemble(text, entry_point=task.entry_point, prompt=task.code)
        for task, text in zip(tasks, completions, strict=True)
    ]
    runnable = [place for place, one in enumerate(read) if one.error is None]
    grader = grader_of(sandbox) if runnable else None
    calls = [
        partial(
            cast("Grader", grader).grade,
            sandbox,
            {"solution.py": _solution(tasks[place], read[place].source)},
            _job(tasks[place]),
            limits,
        )
        for place in runnable
    ]
    done = dict(zip(runnable, call_all(calls, workers), strict=True))
    return [
        _checked(task, one, done.get(place))
        for place, (task, one) in enumerate(zip(tasks, read, strict=True))
    ]


def _solution(task: ProgramTask, source: str) -> str:
    if not task.setup:
        return source
    first = ANNOTATIONS if source.startswith(ANNOTATIONS) else ""
    return f"{first}{task.setup}\n{source.removeprefix(first)}"


def _job(task: ProgramTask) -> dict[str, Any]:
    """Return the grader's job: the tests, and the task's own code that they use."""
    helpers = above(task.code, task.entry_point)
    return {
        "tests": task.tests,
        "before": [code for code in (task.setup, helpers) if code.strip()],
        "entry_point": task.entry_point,
        "of_class": task.asks_for_class,
    }


def _checked(task: ProgramTask, read: Assembled, graded: Graded | None) -> Checked:
    line = None
    if graded is None:
        verdict = Verdict.NO_FUNCTION if read.parses else Verdict.SYNTAX_ERROR
        detail = read.error
    else:
        verdict, detail, line = _verdict(graded)
    return Checked(
        task=task.id,
        verdict=verdict,
        detail=detail,
        test=None if line is None else _statement(task.tests, line),
        style=read.style,
        source=read.source,
        execution=None if graded is None else graded.execution,
    )


def _statement(tests: str, line: int) -> str | None:
    """Return the smallest statement of the tests that includes a line; None if there is none."""
    found = [
        node
        for node in ast.walk(ast.parse(tests))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not found:
        return None  # a decorator's line, or a line of an answer whose code is named tests.py
    smallest = min(found, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    return textwrap.dedent(ast.get_source_segment(tests, smallest, padded=True) or "").strip()


def _verdict(graded: Graded) -> tuple[Verdict, str | None, int | None]:
    """Return the verdict, the exception, and the line of the tests that raised it."""
    limit = OF_OUTCOME.get(graded.execution.outcome)
    if limit is not None:
        return limit, None, None
    match graded.said:
        case "passed":
            return Verdict.PASSED, None, None
        case "raised":
            name, message = graded.error, graded.message
            verdict = _OF_ERROR.get(name, Verdict.EXCEPTION)
            return verdict, f"{name}: {message}" if message else name, graded.line
        case "refused":
            return Verdict.EXCEPTION, f"it returned {graded.message}", None
        case "lost":
            return Verdict.TIMEOUT, None, None
    return Verdict.EXITED, f"exit code {graded.execution.exit_code}", None
