"""Does a completion pass the tests of its task? Executed in a sandbox, and said why where not.

The completion runs in one process and its tests in another (`grading.py`), so that whatever the
completion does in its own gives no verdict.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from mens_exp.evals.completion_styles import ANNOTATIONS, Assembled, Style, above, assemble
from mens_exp.evals.grading import grader_of
from mens_exp.sandbox.batch import call_all
from mens_exp.sandbox.program import Outcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.evals.grading import Graded, Grader
    from mens_exp.sandbox.program import Execution, Limits, Sandbox

__all__ = ["OF_OUTCOME", "Checked", "ProgramTask", "Verdict", "check_all"]


class Verdict(StrEnum):
    """The result of one completion."""

    PASSED = "passed"
    SYNTAX_ERROR = "syntax_error"  # no reading of it is a program; nothing was executed
    COMPILE_ERROR = "compile_error"  # the compiler refused it
    NO_FUNCTION = "no_function"  # a program, without the function that is asked for
    ASSERTION = "assertion"  # a test said no
    EXCEPTION = "exception"  # it raised, on its own or in a test
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
    prompt: str  # what the model is given
    entry_point: str
    tests: str  # statements that raise where the function is wrong
    code: str = ""  # the part of the prompt that the program begins with
    setup: str = ""  # statements before the program
    reference: str  # a completion that passes

    @property
    def asks_for_class(self) -> bool:
        """Whether the entry point is a class: then what its objects' operators say is tested."""
        pattern = rf"^class\s+{re.escape(self.entry_point)}\b"
        return re.search(pattern, self.reference, re.MULTILINE) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """The verdict on one completion, and what it rests on."""

    task: str
    verdict: Verdict
    detail: str | None  # the exception's type and message
    test: str | None  # the statement of the tests that failed
    style: Style | None
    source: str
    execution: Execution | None  # None where nothing was executed


OF_OUTCOME: Final = {
    Outcome.timeout: Verdict.TIMEOUT,
    Outcome.cpu_time: Verdict.TIMEOUT,
    Outcome.memory: Verdict.MEMORY,
    Outcome.output: Verdict.OUTPUT,
    Outcome.files: Verdict.FILES,
    Outcome.killed_signal: Verdict.CRASHED,
}
"""Verdicts that a limit, or a signal, has already given."""

_OF_ERROR: Final = {"AssertionError": Verdict.ASSERTION, "MemoryError": Verdict.MEMORY}


def check_all(
    sandbox: Sandbox,
    tasks: Sequence[ProgramTask],
    completions: Sequence[str],
    limits: Limits,
    workers: int | None = None,
) -> list[Checked]:
    """Judge one completion of each task, several at once, in their order.

    Raises:
        SetupError: the sandbox broke.
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
    """Return what the grader is given: the tests, and what they use that is the task's own."""
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
    """Return the smallest statement of the tests that a line is of; None where it is of none."""
    found = [
        node
        for node in ast.walk(ast.parse(tests))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or node.lineno)
    ]
    if not found:
        return None  # a decorator's line, or of a solution that calls its own code tests.py
    smallest = min(found, key=lambda node: (node.end_lineno or node.lineno) - node.lineno)
    return textwrap.dedent(ast.get_source_segment(tests, smallest, padded=True) or "").strip()


def _verdict(graded: Graded) -> tuple[Verdict, str | None, int | None]:
    """Return what came of it, the exception, and the line of the tests that it was raised from."""
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
