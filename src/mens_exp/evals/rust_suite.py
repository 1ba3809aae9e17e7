"""suite=rust: functions in MultiPL-E's form, compiled by rustc and their tests run."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import digest
from mens_exp.evals.answer_text import code_of
from mens_exp.evals.program_checks import Verdict
from mens_exp.evals.reading import NO_SANDBOX, read
from mens_exp.evals.rust_checks import (
    check_rust,
    find_clippy,
    find_rust,
    least_rust_limits,
    read_rust_tasks,
)
from mens_exp.evals.rust_lints import LINTS, probe_problem
from mens_exp.evals.rust_styles import style_of_rust
from mens_exp.evals.suite import Item, SelfTest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.suite import RustSuite
    from mens_exp.evals.running import Runner
    from mens_exp.evals.rust_checks import RustChecked, RustTask, Toolchain
    from mens_exp.evals.suite import Answer, Judgement
    from mens_exp.sandbox.rust_toolchain import Clippy

__all__ = ["RustProgramSuite", "rust_suite"]

_COMPLETE: Final = (
    "Complete this Rust function. Answer with the code of the whole function only.\n\n"
    "```rust\n{prompt}\n```"
)
_STUB: Final = "    unimplemented!()\n"
_MOST_CHARACTERS: Final = 1000  # of the compiler's message, fed back to a repair


def rust_suite(config: RustSuite) -> RustProgramSuite:
    """Read the tasks and find the compiler, and Clippy where it is asked for.

    Raises:
        DataError: the file cannot be read, or holds what is no task.
        Problems: several lines do.
        SetupError: there is no compiler, or no Clippy.
    """
    assert config.path is not None, "validation has asked for it"
    tasks = read_rust_tasks(Path(config.path).expanduser())[: config.items]
    toolchain = find_rust()
    return RustProgramSuite(
        tasks={task.id: task for task in tasks},
        toolchain=toolchain,
        max_new_tokens=config.max_new_tokens,
        clippy=find_clippy(toolchain) if config.clippy else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RustProgramSuite:
    """The suite over tasks, by name; it brings no references."""

    tasks: dict[str, RustTask]
    toolchain: Toolchain
    max_new_tokens: int
    clippy: Clippy | None = None
    name: str = "rust"
    needs_sandbox: bool = True

    @property
    def items(self) -> list[Item]:
        """An item for each task."""
        return [
            Item(
                id=name,
                messages=({"role": "user", "content": _asked(task)},),
            )
            for name, task in self.tasks.items()
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of the tasks, how they are asked, the longest completion, and what lints."""
        tasks = [[asdict(task), _asked(task)] for task in self.tasks.values()]
        content = {"tasks": tasks, "max_new_tokens": self.max_new_tokens}
        if self.clippy is not None:
            content["lints"] = [self.clippy.version, *LINTS]
        return digest(content)

    @property
    def tools(self) -> dict[str, str]:
        """Versions of what judges, for the scorecard."""
        found = {"rustc": self.toolchain.version}
        return found if self.clippy is None else {**found, "clippy": self.clippy.version}

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Compile each answer and run its task's tests; without a runner, neither."""
        if runner is None:
            return [self._judgement(self.tasks[one.item.id], one.text, None) for one in answers]
        tasks = [self.tasks[one.item.id] for one in answers]
        texts = [one.text for one in answers]
        checked = self._checked(tasks, texts, runner)
        return [self._judgement(*one) for one in zip(tasks, texts, checked, strict=True)]

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Compile and run a stub of every task: each must compile and fail.

        Clippy is given a program with known findings, and must report them.
        """
        if runner is None:
            return None
        tasks = list(self.tasks.values())
        stubs = self._checked(tasks, [_STUB] * len(tasks), runner)
        # The one thing that can be told without references: the task's own part compiles.
        broken = [one.task for one in stubs if one.verdict is Verdict.COMPILE_ERROR]
        references, failed = {"prompt and tests": len(tasks)}, {"prompt and tests": broken}
        if self.clippy is not None:
            limits = least_rust_limits(runner.limits)
            wrong = probe_problem(runner.sandbox, self.clippy, limits)
            references["lints"], failed["lints"] = 1, [wrong] if wrong else []
        return SelfTest(
            references=references,
            failed=failed,
            stubs=len(tasks),
            stubs_passed=[one.task for one in stubs if one.verdict is Verdict.PASSED],
        )

    def _checked(
        self, tasks: Sequence[RustTask], texts: Sequence[str], runner: Runner
    ) -> list[RustChecked]:
        limits = least_rust_limits(runner.limits)
        return check_rust(
            *(runner.sandbox, self.toolchain, tasks, texts, limits, runner.workers),
            clippy=self.clippy,
        )

    def _judgement(self, task: RustTask, text: str, checked: RustChecked | None) -> Judgement:
        judgement = _judgement(task, text, checked)
        if self.clippy is None:
            return judgement
        if checked is None:
            why = dict.fromkeys(("lint_clean", "lints"), NO_SANDBOX)
            return replace(judgement, unknown={**judgement.unknown, **why})
        if checked.linted is None:
            unknown = {**judgement.unknown, "lints": "it does not compile"}
            return replace(judgement, lint_clean=False, unknown=unknown)
        found = checked.linted
        return replace(judgement, lints=found.lints, lint_clean=found.is_clean)


def _asked(task: RustTask) -> str:
    return _COMPLETE.format(prompt=task.prompt.rstrip())


def _judgement(task: RustTask, text: str, checked: RustChecked | None) -> Judgement:
    judgement = read(text, code_of(text, r"\bfn\s"), is_python=False)
    unknown = {"canonical": "the layout of Rust is not judged"}
    if checked is None:
        unknown |= dict.fromkeys(("compiles", "success", "semantic", "outcome"), NO_SANDBOX)
    success = None if checked is None else checked.verdict is Verdict.PASSED
    return replace(
        judgement,
        compiles=None if checked is None else checked.verdict is not Verdict.COMPILE_ERROR,
        success=success,
        semantic=None if success is None else success and judgement.anti_stub,
        errors=_errors(checked),
        outcome=None if checked is None else checked.verdict.value,
        style=style_of_rust(text, entry_point=task.entry_point).value,
        unknown=unknown,
    )


def _errors(checked: RustChecked | None) -> tuple[str, ...]:
    if checked is None or checked.verdict is Verdict.PASSED:
        return ()
    said = checked.verdict.value.replace("_", " ")
    detail = (checked.detail or "")[:_MOST_CHARACTERS]
    return (f"{said}: {detail}" if detail else said,)
