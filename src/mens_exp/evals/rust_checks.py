"""Does a Rust completion compile, and pass the tests of its task?

Tasks are MultiPL-E's HumanEval in Rust: the prompt ends in an opening brace, and the tests close
it and bring the main function. `rust_grading.py` runs answer and tests in processes of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import DataError
from mens_exp.evals.program_checks import Verdict
from mens_exp.evals.rust_grading import RustJob, grade_rust
from mens_exp.evals.rust_lints import Lintable, Linted, lint_rust
from mens_exp.evals.rust_styles import assemble_rust, head_of
from mens_exp.evals.rust_values import signatures
from mens_exp.evals.task_files import tasks_in
from mens_exp.sandbox.batch import call_all
from mens_exp.sandbox.rust_toolchain import (
    Toolchain,
    find_clippy,
    find_rust,
    least_rust_limits,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.evals.rust_values import Signature
    from mens_exp.sandbox.program import Execution, Limits, Sandbox
    from mens_exp.sandbox.rust_toolchain import Clippy

__all__ = [
    "RustChecked",
    "RustTask",
    "Toolchain",
    "check_rust",
    "find_clippy",
    "find_rust",
    "least_rust_limits",
    "read_rust_tasks",
]

_FIELDS: Final = {"name": str, "prompt": str, "tests": str, "stop_tokens": list}
_FUNCTION: Final = re.compile(r"\bfn\s+(\w+)")
_MAIN: Final = re.compile(r"\bfn\s+main\s*\(\s*\)\s*\{")


@dataclass(frozen=True, kw_only=True, slots=True)
class RustTask:
    """A function to write, and the tests that it must pass."""

    id: str
    prompt: str
    entry_point: str
    tests: str  # from its main function on
    stop_tokens: tuple[str, ...]

    @property
    def signature(self) -> Signature | None:
        """The function's types; None where one is no plain value, and grading is *trusting*."""
        found = signatures(self.prompt, self.entry_point)
        return found[-1] if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RustChecked:
    """The verdict on one completion, and what it rests on."""

    task: str
    verdict: Verdict
    detail: str | None  # the compiler's or the panic's message
    source: str  # the answer's items
    execution: Execution  # of the answer's process
    linted: Linted | None = None  # None where nothing lints, or it does not compile


def read_rust_tasks(path: Path) -> list[RustTask]:
    """Read tasks in MultiPL-E's form, one JSON object a line, gzipped or not.

    Raises:
        DataError: the file cannot be read, or a line is no such task (``file:line``).
        Problems: several lines.
    """
    return tasks_in(path, _task)


def _task(row: Any, where: str) -> RustTask:
    for name, kind in _FIELDS.items():
        if not isinstance(row, dict) or not isinstance(row.get(name), kind):
            raise DataError(
                "not a task of MultiPL-E", where=where, expected=", ".join(_FIELDS), found=row
            )
    names = _FUNCTION.findall(row["prompt"])
    tests = row["tests"].lstrip()
    if not names or not tests.startswith("}") or _MAIN.search(tests) is None:
        raise DataError(
            "a task's tests do not go on where its prompt ends",
            where=where,
            found=tests[:40],
            expected="a prompt that ends within a function, tests that close it and have a main",
        )
    return RustTask(
        id=row["name"],
        prompt=row["prompt"],
        entry_point=names[-1],
        tests=tests[1:],
        stop_tokens=tuple(map(str, row["stop_tokens"])),
    )


def check_rust(  # as the checks of Python, and the compiler
    sandbox: Sandbox,
    toolchain: Toolchain,
    tasks: Sequence[RustTask],
    completions: Sequence[str],
    limits: Limits,
    workers: int | None = None,
    clippy: Clippy | None = None,
) -> list[RustChecked]:
    """Judge one completion of each task, several at once, in their order.

    Args:
        sandbox: compiles, lints and runs.
        toolchain: the compiler.
        tasks: one for each completion.
        completions: what the model wrote.
        limits: of each program.
        workers: how many run at once; None is one for each processor.
        clippy: lints what compiles; None lints nothing. The verdict is rustc's either way.

    Raises:
        SetupError: the sandbox broke.
    """
    solutions = [
        assemble_rust(text, prompt=task.prompt, entry_point=task.entry_point)
        for task, text in zip(tasks, completions, strict=True)
    ]
    jobs = list(map(_job, tasks, solutions))
    grade = partial(grade_rust, sandbox, toolchain, limits)
    graded = call_all([partial(grade, job) for job in jobs], workers)
    chosen = [n for n, one in enumerate(graded) if one.verdict is not Verdict.COMPILE_ERROR]
    linted: dict[int, Linted] = {}
    if clippy is not None:
        lintable = [_lintable(tasks[n], jobs[n]) for n in chosen]
        found = lint_rust(sandbox, clippy, lintable, limits, workers)
        linted = dict(zip(chosen, found, strict=True))
    return [
        RustChecked(
            task=task.id,
            verdict=graded[n].verdict,
            detail=graded[n].detail,
            source=jobs[n].items,
            execution=graded[n].execution,
            linted=linted.get(n),
        )
        for n, task in enumerate(tasks)
    ]


def _job(task: RustTask, items: str) -> RustJob:
    main = _MAIN.search(task.tests)
    assert main is not None, "a task without a main function is refused when it is read"
    begin, end = main.end(), task.tests.rindex("}")
    return RustJob(
        items=items,
        above=task.prompt[: head_of(task.prompt, task.entry_point)],
        tests=(task.tests[:begin], task.tests[begin:end], task.tests[end:]),
        signature=task.signature,
    )


def _lintable(task: RustTask, job: RustJob) -> Lintable:
    lines = job.items.count("\n") + (not job.items.endswith("\n"))
    source = "".join([job.items, *job.tests])
    return Lintable(source=source, answer_lines=lines, prompt=task.prompt)
