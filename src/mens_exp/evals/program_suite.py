"""suite=humaneval: functions to write, in the form of HumanEval or MBPP, and their tests run."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts.digest import digest
from mens_exp.evals.answer_text import code_of
from mens_exp.evals.completion_styles import assemble
from mens_exp.evals.humaneval import (
    humaneval_tasks,
    read_tasks,
    self_test,
    stubs_of,
    written_in_every_style,
)
from mens_exp.evals.program_checks import Verdict, check_all
from mens_exp.evals.reading import NO_SANDBOX, read
from mens_exp.evals.suite import Item, SelfTest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.suite import HumanEvalSuite
    from mens_exp.evals.completion_styles import Style
    from mens_exp.evals.program_checks import Checked, ProgramTask
    from mens_exp.evals.running import Runner
    from mens_exp.evals.suite import Answer, Judgement

__all__ = ["ProgramSuite", "humaneval", "judge_programs", "tested_programs"]

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
        MissingExtra: no file is named, and the package that has one is not installed.
        DataError: the file cannot be read, or holds what is no task.
        Problems: several lines do.
    """
    path = None if config.path is None else Path(config.path).expanduser()
    tasks = humaneval_tasks() if path is None else read_tasks(path)
    chosen = {task.id: task for task in tasks[: config.items]}
    return ProgramSuite(tasks=chosen, max_new_tokens=config.max_new_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramSuite:
    """The suite over tasks, by id."""

    tasks: dict[str, ProgramTask]
    max_new_tokens: int
    name: str = "humaneval"
    needs_sandbox: bool = True

    @property
    def items(self) -> list[Item]:
        """An item for each task; a signature is to be completed, a text to be turned into code."""
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
        """SHA-256 of the tasks, how they are asked, and the longest completion."""
        tasks = [[asdict(task), _asked(task)] for task in self.tasks.values()]
        return digest({"tasks": tasks, "max_new_tokens": self.max_new_tokens})

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Read each answer in whatever style it is written, and run its task's tests."""
        return judge_programs([(self.tasks[one.item.id], one.text) for one in answers], runner)

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Run every reference in every style, and every stub; None without a runner."""
        return tested_programs(list(self.tasks.values()), runner)


def judge_programs(
    asked: Sequence[tuple[ProgramTask, str]], runner: Runner | None
) -> list[Judgement]:
    """Judge one completion of each task, in their order; without a runner nothing is executed."""
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
    judgement = read(text, _code(task, text))
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
    """Return the fields of a judgement that say how an answer was read, or why it was not."""
    if style is None:
        return {"unknown": {"style": _NO_READING}}
    return {"style": style.value}


def _code(task: ProgramTask, text: str) -> str:
    return code_of(text, rf"\b(?:def|class)\s+{re.escape(task.entry_point)}\b")


def _error(checked: Checked) -> str:
    """Return what a model is told that repairs its answer."""
    if checked.test is not None:
        return f"This test fails: {checked.test}\n{checked.detail}"
    said = checked.verdict.value.replace("_", " ")
    return f"{said}: {checked.detail}" if checked.detail else said


def _unrun(task: ProgramTask, text: str) -> Judgement:
    """Say what can be told without running anything."""
    found = assemble(text, entry_point=task.entry_point, prompt=task.code)
    style = _style(found.style)
    unknown = dict.fromkeys(("success", "semantic", "outcome"), NO_SANDBOX)
    return replace(
        read(text, _code(task, text)),
        compiles=found.parses,
        errors=() if found.error is None else (found.error,),
        style=style.get("style"),
        unknown=unknown | style.get("unknown", {}),
    )
