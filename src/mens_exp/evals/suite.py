"""Suites: frozen items, grading of answers, and a self-test.

:mod:`mens_exp.config.suite` declares a suite's properties before it is opened, and names its class.

The module also contains the sandbox runner for programs, and the reader of benchmark files (one
JSON object per line, gzipped or not).
"""

from __future__ import annotations

import gzip
import io
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from mens_exp.artifacts.record import parse_json, read_bytes
from mens_exp.config.plugins import named_class
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.evals.completion_styles import code_of, outside_reasoning
from mens_exp.evals.kpis import KPIS, group_kpi
from mens_exp.rows.files import bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.config.evaluation import EvalConfig
    from mens_exp.config.suite import SuiteConfig, SuiteSpec
    from mens_exp.evals.engines import Engine, GraphEngine
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.sandbox.program import Execution, Limits, Program, Sandbox
    from mens_exp.tokenizer.load import Tokenizer
    from mens_exp.tokenizer.templates import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Runner:
    """A sandbox with the limits of a suite's programs.

    Attributes:
        sandbox: the sandbox, fresh for each program.
        limits: limits of each program.
        workers: number of programs to run at once; None means one per processor.
    """

    sandbox: Sandbox
    limits: Limits
    workers: int | None = None

    @property
    def kind(self) -> str:
        """The sandbox's kind; ``unsafe`` isolates nothing."""
        return self.sandbox.kind

    def run(self, programs: Sequence[Program], *, limits: Limits | None = None) -> list[Execution]:
        """Run programs and return their results, in order.

        Args:
            programs: the programs.
            limits: limits of each, instead of the runner's; a compiler needs more.
        """
        from mens_exp.sandbox.program import run_all

        return run_all(self.sandbox, programs, limits or self.limits, self.workers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """An item of a suite.

    Attributes:
        id: the suite's id of the item.
        messages: the turns before the answer, ending with a user turn.
        reference: a correct answer; empty if the suite has none.
        group: the part of the suite that it belongs to; empty if there is only one.
        stop: texts that end an answer and are not part of it.
    """

    id: str
    messages: tuple[Message, ...]
    reference: str = ""
    group: str = ""
    stop: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """The content of the user's last turn."""
        return str(self.messages[-1]["content"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A model's answer to an item; ``text`` is the part outside reasoning.

    Every suite grades only this text, so that drafts in the reasoning never count.
    """

    item: Item
    text: str

    def __post_init__(self) -> None:
        """Remove the reasoning."""
        object.__setattr__(self, "text", outside_reasoning(self.text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The judgement of an answer; null means not measured, and `unknown` gives the reason.

    Attributes:
        compiles: whether it compiles, or parses.
        success: whether it solves the task.
        semantic: whether it solves the task without placeholder code.
        canonical: whether it is formatted as formatters do.
        strict: whether it is code only.
        errors: its errors, in the form used in repair prompts.
        placeholder_hits: number of markers of unfinished code.
        trivial: whether it consists only of placeholders.
        richness: score from 0 to 1 for the number of effective statements.
        anti_stub: whether it is neither trivial nor marked as unfinished.
        outcome: result of the execution.
        style: style in which the answer was read; see `ItemEvent`.
        lints: names of the linter's findings, in source order; None if the suite does not lint, or
            the answer does not compile.
        lint_clean: whether it compiles and the linter finds nothing; None if the suite does not
            lint.
        values: KPIs that are not in the table, by name; declare them with ``@declares`` on the
            suite's class. Omit KPIs that the answer does not have.
        unknown: null field -> reason.
    """

    compiles: bool | None = None
    success: bool | None = None
    semantic: bool | None = None
    canonical: bool | None = None
    strict: bool | None = None
    errors: tuple[str, ...] = ()
    placeholder_hits: int | None = None
    trivial: bool | None = None
    richness: float | None = None
    anti_stub: bool | None = None
    outcome: str | None = None
    style: str | None = None
    lints: tuple[str, ...] | None = None
    lint_clean: bool | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def is_valid(self) -> bool:
        """Whether no repair is needed: the task is solved or, if that is unknown, it compiles."""
        return bool(self.compiles if self.success is None else self.success)


@dataclass(frozen=True, kw_only=True, slots=True)
class SelfTest:
    """The result of judging the suite's own answers.

    Attributes:
        references: number of judged references, by style of the answer.
        failed: ids of items whose reference was judged wrong, by style.
        stubs: number of judged stubs.
        stubs_passed: ids of items whose stub was judged right.
    """

    references: dict[str, int]
    failed: dict[str, list[str]]
    stubs: int
    stubs_passed: list[str]

    @property
    def problem(self) -> str | None:
        """The reason why this suite must not score, or None if it may."""
        wrong = sorted({name for names in self.failed.values() for name in names})
        if wrong:
            return f"references judged wrong: {', '.join(wrong[:5])} ({len(wrong)} in all)"
        if self.stubs_passed:
            few = ", ".join(self.stubs_passed[:5])
            return f"empty answers judged right: {few} ({len(self.stubs_passed)} in all)"
        return None


class Suite:
    """A frozen set of items and the grading of their answers.

    The defaults are those of a suite that our engines answer and that judges without execution.
    """

    __slots__ = ()

    @classmethod
    def opened(cls, settings: Any, *, calls_functions: bool) -> Suite:
        """Freeze the items that the suite's settings choose.

        Args:
            settings: the `suite` group.
            calls_functions: whether Python that the user's files name may run in this process.

        Raises:
            MensError: its files cannot be read, or there are too few items.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, settings: Any, *, calls_functions: bool) -> None:
        """Read the suite's files before any work; see :meth:`opened`."""
        _without_taken_groups(cls.opened(settings, calls_functions=calls_functions))

    @classmethod
    def of_rows(
        cls,
        settings: Any,
        heldout: Sequence[TrainingPair],
        tokenizer: Tokenizer,
        *,
        max_positions: int,
    ) -> Suite | str:
        """Freeze items built from a run's held-out rows, or return the reason why there are none.

        Args:
            settings: the `suite` group.
            heldout: the rows.
            tokenizer: the tokenizer, with the chat template of training.
            max_positions: maximum number of tokens of the model.
        """
        raise NotImplementedError

    @classmethod
    def of_lines(cls, lines: Sequence[Mapping[str, Any]], generation: Mapping[str, Any]) -> Suite:
        """Rebuild a suite from a run's event lines, if these determine it completely.

        Args:
            lines: the lines of events.jsonl.
            generation: the generation settings in the scorecard.
        """
        raise NotImplementedError

    @property
    def name(self) -> str:
        """The suite's name, as in `suite=<name>`."""
        raise NotImplementedError

    @property
    def digest(self) -> str:
        """SHA-256 of everything that scores depend on: items, tests, limits."""
        raise NotImplementedError

    @property
    def items(self) -> Sequence[Item]:
        """The items, in a fixed order."""
        raise NotImplementedError

    @property
    def needs_sandbox(self) -> bool:
        """Whether judging executes what models write."""
        return False

    @property
    def retries(self) -> int | None:
        """Number of times that an answer is sent back with its errors; None leaves it to `eval`."""
        return None

    @property
    def conditions(self) -> list[dict[str, Any]]:
        """Descriptions of the models that the suite specifies, for the scorecard."""
        return []

    @property
    def tools(self) -> dict[str, str]:
        """Versions of the programs used in judging, for the scorecard."""
        return {}

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Judge answers, in order; without a runner, nothing is executed."""
        raise NotImplementedError

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Grade the suite's own references and empty stubs; None if there are none."""
        del runner
        return None

    def answered(self, engine: GraphEngine, condition: str) -> Answered | None:
        """Generate and judge answers with the suite's own code; None leaves both to the caller.

        Args:
            engine: the model.
            condition: the model's name in the events.
        """
        del engine, condition
        return None

    def engines(self, settings: Any, sampling: EvalConfig) -> dict[str, Engine]:
        """Return engines for the models that the suite specifies, by condition.

        Args:
            settings: the `suite` group.
            sampling: the `eval` section.
        """
        raise NotImplementedError

    def check_keeping(self) -> None:
        """Check that equal answers can be detected when answers are kept as rows.

        Raises:
            SetupError: a required program is not installed.
        """

    def canonical(self, events: Sequence[ItemEvent], runner: Runner | None) -> list[str]:
        """Return the code of answers in a canonical form, so that duplicates can be detected."""
        del runner
        return [code_of(outside_reasoning(event["completion"])) for event in events]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answered:
    """The answers to a suite that generates them itself.

    Attributes:
        events: one for each item.
        figures: the suite's own figures, in addition to our KPIs.
    """

    events: list[ItemEvent]
    figures: dict[str, float]


def suite_class(spec: SuiteSpec) -> type[Suite]:
    """Return the class of a suite that scores.

    Raises:
        SetupError: it cannot be imported, or is not a class of a suite.
    """
    assert spec.suite is not None, "the caller has asked whether it scores"
    return named_class(spec.suite, Suite, of=f"the suite {spec.name}")


def frozen_suite(settings: SuiteConfig, *, calls_functions: bool = False) -> Suite:
    """Return a suite whose items depend only on its own settings; see :meth:`Suite.opened`."""
    opened = suite_class(settings.spec).opened(settings, calls_functions=calls_functions)
    return _without_taken_groups(opened)


def _without_taken_groups(suite: Suite) -> Suite:
    """Return a suite none of whose groups has a KPI with the name of another one.

    Raises:
        DataError: a group does.
    """
    for item in suite.items:
        if item.group and group_kpi(item.group) in KPIS:
            raise DataError(
                "the KPI of this group would have the name of another KPI",
                where=f"suite: {item.id}",
                found=f"group {item.group!r}: {group_kpi(item.group)}",
                expected="another name for the group",
            )
    return suite


def file_problems(settings: SuiteConfig, *, calls_functions: bool = False) -> list[MensError]:
    """List problems of a suite's files, before any work is done; see :meth:`Suite.opened`."""
    if not settings.spec.scores or not settings.spec.reads_files(settings):
        return []
    try:
        suite_class(settings.spec).check(settings, calls_functions=calls_functions)
    except Problems as several:
        return list(several.problems)
    except MensError as error:
        return [error]
    return []


_MOST_PROBLEMS: Final = 20
_CHUNK: Final = 2**20


class _Named(Protocol):
    @property
    def id(self) -> str: ...


Task = TypeVar("Task", bound=_Named)


def tasks_in(path: Path, task_of: Callable[[Any, str], Task]) -> list[Task]:
    """Read the tasks of a file.

    Args:
        path: a JSONL file, plain or gzipped.
        task_of: builds a task from a line's value and its location (``file:line``).

    Raises:
        DataError: the file cannot be read or contains no task, or a line is not such a task or
            repeats an earlier one.
        Problems: several lines are faulty.
    """
    tasks: dict[str, Task] = {}
    problems: list[DataError] = []
    for number, line in enumerate(io.BytesIO(_unpacked(path)), 1):
        if not line.strip():
            continue
        if len(problems) >= _MOST_PROBLEMS:
            break
        try:
            task = task_of(parse_json(line, f"{path}:{number}"), f"{path}:{number}")
        except DataError as error:
            problems.append(error)
            continue
        if tasks.setdefault(task.id, task) is not task:
            where = f"{path}:{number}"
            problems.append(DataError("this task already exists", where=where, found=task.id))
    Problems.raise_if(problems)
    if not tasks:
        raise DataError("the file contains no task", where=str(path))
    return list(tasks.values())


def _unpacked(path: Path) -> bytes:
    content = read_bytes(path)
    if path.suffix != ".gz":
        return content
    try:
        with gzip.open(io.BytesIO(content)) as file:
            return b"".join(bounded(iter(lambda: file.read(_CHUNK), b""), path))
    except (OSError, EOFError, zlib.error) as error:
        raise DataError("the file is not gzipped", where=str(path), found=str(error)) from error
