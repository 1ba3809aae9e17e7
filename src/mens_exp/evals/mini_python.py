"""suite=mini_python: small tasks of families that nothing is trained on, some of them repairs.

The generator verified every task: its solution passes its tests, and a broken version fails one.
The suite's own test shows the same of the way that answers are read and run here.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import digest
from mens_exp.evals.answer_quality import code_of, parsed, quality_of
from mens_exp.evals.python_tests import check_all
from mens_exp.evals.suite import Item, Judgement, SelfTest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.config.suite import MiniPythonSuite
    from mens_exp.corpus.generator.family import Task
    from mens_exp.evals.python_tests import Checked
    from mens_exp.evals.running import Runner
    from mens_exp.evals.suite import Answer

__all__ = ["NO_SANDBOX", "STYLES", "MiniPython", "mini_python", "stub_of"]

_HELPERS: Final = (
    "from __future__ import annotations\n\nimport math\nfrom typing import Any\n\n\n"
    "def _helper_of_answer(value: Any) -> Any:\n    return math.floor(value)\n\n\n"
)
# Every way in which models write an answer that counts.
STYLES: Final[dict[str, Callable[[str], str]]] = {
    "whole": lambda code: code,
    "fenced": lambda code: f"```python\n{code}\n```",
    "chatter": lambda code: f"Here is the code:\n\n```python\n{code}\n```\n\nIt should work.",
    "indented": lambda code: textwrap.indent(code, "    "),
    "imports_and_helpers": lambda code: _HELPERS + code,
}
NO_SANDBOX: Final = (
    "no sandbox: install bubblewrap, or say sandbox=unsafe to run generated code without one"
)


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
        """Read each answer, and run its task's tests."""
        codes = [code_of(one.text) for one in answers]
        checked: Sequence[Checked | None] = [None] * len(codes)
        if runner is not None:
            tests = [self.tasks[one.item.id].tests for one in answers]
            checked = check_all(codes, tests, runner)
        return [
            _judgement(one.text, code, result)
            for one, code, result in zip(answers, codes, checked, strict=True)
        ]

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Run every reference in every style, and every stub; None without a runner."""
        if runner is None:
            return None
        failed: dict[str, list[str]] = {}
        for style, written in STYLES.items():
            codes = [code_of(written(task.solution)) for task in self.tasks.values()]
            failed[style] = [n for n, ok in self._passed(codes, runner).items() if not ok]
        stubs = self._passed([stub_of(task) for task in self.tasks.values()], runner)
        return SelfTest(
            references=dict.fromkeys(STYLES, len(self.tasks)),
            failed=failed,
            stubs=len(self.tasks),
            stubs_passed=[name for name, ok in stubs.items() if ok],
        )

    def _passed(self, codes: Sequence[str], runner: Runner) -> dict[str, bool]:
        checked = check_all(codes, [task.tests for task in self.tasks.values()], runner)
        return {name: one.is_passed for name, one in zip(self.tasks, checked, strict=True)}


def stub_of(task: Task) -> str:
    """Return an answer to a task that does nothing."""
    if task.solution.startswith("class ") or f"\nclass {task.entry_point}" in task.solution:
        return f"class {task.entry_point}:\n    pass"
    return f"def {task.entry_point}(*args, **kwargs):\n    pass"


def _judgement(completion: str, code: str, checked: Checked | None) -> Judgement:
    tree = parsed(code)
    compiles = not isinstance(tree, str) and bool(tree.body)
    quality = quality_of(completion, code)
    error = checked.error if checked else tree if isinstance(tree, str) else None
    if error is None and not compiles:
        error = "there is no code"
    success = None if checked is None else checked.is_passed
    return Judgement(
        compiles=compiles,
        success=success,
        semantic=None if success is None else success and quality.anti_stub,
        canonical=quality.canonical,
        strict=quality.strictness,
        errors=() if error is None else (error,),
        placeholder_hits=quality.placeholder_hits,
        trivial=quality.trivial,
        richness=quality.richness,
        anti_stub=quality.anti_stub,
        outcome=None if checked is None else checked.outcome,
        unknown=dict.fromkeys(("success", "semantic", "outcome"), NO_SANDBOX)
        if checked is None
        else {},
    )
