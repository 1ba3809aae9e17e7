"""Does a Rust completion compile, and pass the tests of its task? Both happen in one sandbox.

Tasks are MultiPL-E's HumanEval in Rust: the prompt ends in an opening brace, and the tests close
it and bring the main function.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from mens_exp.errors import DataError
from mens_exp.evals.program_checks import OF_OUTCOME, Verdict
from mens_exp.evals.rust_lints import Lintable, Linted, lint_rust
from mens_exp.evals.rust_styles import assemble_rust
from mens_exp.evals.task_files import tasks_in
from mens_exp.sandbox.batch import run_all
from mens_exp.sandbox.program import Outcome, Program
from mens_exp.sandbox.rust_toolchain import (
    Toolchain,
    find_clippy,
    find_rust,
    least_rust_limits,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

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
# The message has a line of its own since Rust 1.73; before, it stood in quotes before the place.
_ASSERTION: Final = re.compile(r"panicked at (?:'|[^\n]*\n)assertion ")
_FUNCTION: Final = re.compile(r"\bfn\s+(\w+)")
_MAIN: Final = re.compile(r"\bfn\s+main\s*\(\s*\)\s*\{")
# The shell keeps the first line of its input, the program reads the second before the tests.
_SCRIPT: Final = """\
read word
"$0" --edition 2021 -C debuginfo=0 -o main main.rs 2>messages || {
  echo "$word compile" >&2
  head -c 4000 messages >&2
  exit 1
}
exec ./main
"""
_READ_WORD: Final = """
    let mut word_of_the_check = String::new();
    std::io::stdin().read_line(&mut word_of_the_check).unwrap();
"""
_TELL_WORD: Final = '\n    eprintln!("\\n{} passed", word_of_the_check.trim());\n}\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class RustTask:
    """A function to write, and the tests that it must pass."""

    id: str
    prompt: str
    entry_point: str
    tests: str  # from its main function on
    stop_tokens: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RustChecked:
    """The verdict on one completion, and what it rests on."""

    task: str
    verdict: Verdict
    detail: str | None  # the compiler's or the panic's message
    source: str
    execution: Execution
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
    word = secrets.token_hex(16)
    solutions = [
        assemble_rust(text, prompt=task.prompt, entry_point=task.entry_point)
        for task, text in zip(tasks, completions, strict=True)
    ]
    sources = list(map(_program, tasks, solutions))
    programs = [
        Program(
            argv=("/bin/sh", "-c", _SCRIPT, toolchain.rustc),
            files={"main.rs": source},
            stdin=f"{word}\n{word}\n",
            visible=(toolchain.sysroot,),
        )
        for source in sources
    ]
    executions = run_all(sandbox, programs, limits, workers)
    verdicts = [_verdict(execution, word) for execution in executions]
    chosen = [n for n, one in enumerate(verdicts) if one[0] is not Verdict.COMPILE_ERROR]
    linted: dict[int, Linted] = {}
    if clippy is not None:
        lintable = [_lintable(tasks[n], solutions[n], sources[n]) for n in chosen]
        found = lint_rust(sandbox, clippy, lintable, limits, workers)
        linted = dict(zip(chosen, found, strict=True))
    return [
        RustChecked(
            task=task.id,
            verdict=verdicts[n][0],
            detail=verdicts[n][1],
            source=sources[n],
            execution=executions[n],
            linted=linted.get(n),
        )
        for n, task in enumerate(tasks)
    ]


def _lintable(task: RustTask, items: str, source: str) -> Lintable:
    lines = items.count("\n") + (not items.endswith("\n"))
    return Lintable(source=source, answer_lines=lines, prompt=task.prompt)


def _program(task: RustTask, items: str) -> str:
    """Put the tests below a solution, whose main function tells that it came to its end."""
    main = _MAIN.search(task.tests)
    assert main is not None, "a task without a main function is refused when it is read"
    end = task.tests.rindex("}")
    return "".join(
        [items, task.tests[: main.end()], _READ_WORD, task.tests[main.end() : end], _TELL_WORD]
    )


def _verdict(execution: Execution, word: str) -> tuple[Verdict, str | None]:
    limit = OF_OUTCOME.get(execution.outcome)
    if limit is not None:
        return limit, None
    if f"{word} compile" in execution.stderr:
        message = execution.stderr.partition(f"{word} compile\n")[2]
        return Verdict.COMPILE_ERROR, message.strip()
    if execution.outcome is Outcome.ok and f"{word} passed" in execution.stderr:
        return Verdict.PASSED, None
    if "panicked at" in execution.stderr:
        message = execution.stderr[execution.stderr.index("panicked at") :].strip()
        failed = _ASSERTION.match(message)
        return (Verdict.ASSERTION if failed else Verdict.EXCEPTION), message
    return Verdict.EXITED, f"exit code {execution.exit_code}"
