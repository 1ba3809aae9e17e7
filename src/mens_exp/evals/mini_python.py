"""suite=mini_python: small tasks of families that nothing is trained on, some of them repairs.

The generator verified every task: its solution passes its tests, and a broken version fails one.
The suite's own test shows the same of the way that answers are read and run here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import digest
from mens_exp.evals.program_checks import ProgramTask
from mens_exp.evals.program_suite import judge_programs, tested_programs
from mens_exp.evals.suite import Item

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.suite import MiniPythonSuite
    from mens_exp.corpus.generator.family import Task
    from mens_exp.evals.running import Runner
    from mens_exp.evals.suite import Answer, Judgement, SelfTest

__all__ = ["MiniPython", "mini_python"]


def mini_python(config: MiniPythonSuite) -> MiniPython:
    """Draw the tasks; the same ones wherever it is done.

    Raises:
        DataError: there are not so many different ones.
    """
    from mens_exp.corpus.generator.generate import benchmark_tasks

    tasks = benchmark_tasks(config.generator_seed, config.items, config.repair_frac)
    return MiniPython(tasks={task.id: task for task in tasks}, max_new_tokens=config.max_new_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniPython:
    """The suite over drawn tasks, by id."""

    tasks: dict[str, Task]
    max_new_tokens: int
    name: str = "mini_python"
    needs_sandbox: bool = True

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
        """SHA-256 of prompts, solutions, tests and the longest completion."""
        from mens_exp.corpus.generator.generate import tasks_digest

        tasks = tasks_digest(list(self.tasks.values()))
        return digest({"tasks": tasks, "max_new_tokens": self.max_new_tokens})

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Read each answer in whatever style it is written, and run its task's tests."""
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
