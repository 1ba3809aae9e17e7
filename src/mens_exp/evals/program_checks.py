"""Does a completion pass the tests of its task? Executed in a sandbox, and said why where not.

The verdict is written by the program that runs the tests, behind a word drawn for it alone, so that
a completion that exits early, or prints what a verdict looks like, has not passed. That guards
against accidents, not against a completion that searches its interpreter's frames for the word.
"""

from __future__ import annotations

import ast
import json
import secrets
import textwrap
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from mens_exp.evals.completion_styles import ANNOTATIONS, Assembled, Style, assemble
from mens_exp.sandbox.batch import run_all
from mens_exp.sandbox.program import PYTHON, Outcome, Program

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.sandbox.program import Execution, Limits, Sandbox

__all__ = ["OF_OUTCOME", "Checked", "ProgramTask", "Verdict", "check_all", "program_of"]


class Verdict(StrEnum):
    """What came of one completion."""

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


# Solution and tests are files of their own: tracebacks and `__name__` are those of modules.
_RUNNER: Final = """\
import json, os, sys


def run(word, end=os._exit, write=os.write, dumps=json.dumps):
    def tell(text):
        try:
            sys.stdout.flush()
        except Exception:  # it closed or replaced its output
            pass
        write(2, (chr(10) + word + text + chr(10)).encode("utf-8", "replace"))
        end(0)

    try:
        import solution
        with open("tests.py", encoding="utf-8") as file:
            tests = compile(file.read(), "tests.py", "exec")
        exec(tests, dict(vars(solution)))  # what the tests define is not the solution's
    except BaseException as error:
        try:
            message = str(error).encode("utf-8", "replace").decode()
        except Exception:
            message = ""
        line, frame = None, error.__traceback__
        while frame is not None:
            if frame.tb_frame.f_code.co_filename == "tests.py":
                line = frame.tb_lineno
            frame = frame.tb_next
        tell(dumps([type(error).__name__[:80], message[:400], line]))
    tell("passed")


run(sys.stdin.readline().strip())
"""

OF_OUTCOME: Final = {
    Outcome.timeout: Verdict.TIMEOUT,
    Outcome.cpu_time: Verdict.TIMEOUT,
    Outcome.memory: Verdict.MEMORY,
    Outcome.output: Verdict.OUTPUT,
    Outcome.files: Verdict.FILES,
    Outcome.killed_signal: Verdict.CRASHED,
}
"""Verdicts that a limit, or a signal, has already given."""


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
    words = [secrets.token_hex(16) for _ in tasks]
    runnable = [place for place, one in enumerate(read) if one.error is None]
    programs = [program_of(tasks[place], read[place].source, words[place]) for place in runnable]
    executions = run_all(sandbox, programs, limits, workers)
    done = dict(zip(runnable, executions, strict=True))
    return [
        _checked(task, one, done.get(place), words[place])
        for place, (task, one) in enumerate(zip(tasks, read, strict=True))
    ]


def program_of(task: ProgramTask, source: str, word: str) -> Program:
    """Return the program that runs a solution against its task's tests.

    Args:
        task: the task.
        source: the solution.
        word: what the verdict is written behind; the solution never sees it.
    """
    solution = source
    if task.setup:
        first = ANNOTATIONS if source.startswith(ANNOTATIONS) else ""
        solution = f"{first}{task.setup}\n{source.removeprefix(first)}"
    return Program(
        argv=(PYTHON, "-s", "-S", "-B", "main.py"),
        files={"main.py": _RUNNER, "solution.py": solution, "tests.py": task.tests},
        stdin=f"{word}\n",
        env={"PYTHONHASHSEED": "0", "PYTHONUTF8": "1"},
    )


def _checked(task: ProgramTask, read: Assembled, execution: Execution | None, word: str) -> Checked:
    line = None
    if execution is None:
        verdict = Verdict.NO_FUNCTION if read.parses else Verdict.SYNTAX_ERROR
        detail = read.error
    else:
        verdict, detail, line = _verdict(execution, word)
    return Checked(
        task=task.id,
        verdict=verdict,
        detail=detail,
        test=None if line is None else _statement(task.tests, line),
        style=read.style,
        source=read.source,
        execution=execution,
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


def _verdict(execution: Execution, word: str) -> tuple[Verdict, str | None, int | None]:
    """Return what came of it, the exception, and the line of the tests that it was raised from."""
    limit = OF_OUTCOME.get(execution.outcome)
    if limit is not None:
        return limit, None, None
    _, told, rest = execution.stderr.rpartition(word)
    if not told:
        return Verdict.EXITED, f"exit code {execution.exit_code}", None
    said = rest.splitlines()[0]
    if said == "passed":
        return Verdict.PASSED, None, None
    name, message, line = json.loads(said)
    verdict = {"AssertionError": Verdict.ASSERTION, "MemoryError": Verdict.MEMORY}.get(
        name, Verdict.EXCEPTION
    )
    return verdict, f"{name}: {message}" if message else name, line
