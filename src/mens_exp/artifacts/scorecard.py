"""scorecard.json, events.jsonl and samples.json: a suite's KPIs, its items, unscored answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypedDict

from mens_exp.artifacts.record import StoredRecord, read_lines, write_lines
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

EVENT_VERSION: Final = 3
UNSAFE: Final = "unsafe"
"""A scorecard's `sandbox` if programs ran without one; not valid for promotion."""


class Condition(StrEnum):
    """The model that answered: the base model alone, or with the adapter.

    A suite that specifies its own models also names its own conditions.
    """

    BASE = "base"
    TUNED = "tuned"


class _LintEvent(TypedDict, total=False):
    """Fields present only if the suite lints.

    Attributes:
        lint_clean: the last attempt compiles, and the linter finds nothing in it.
        lint_warnings: number of linter findings; null if it does not compile.
        lints: names of the findings, in source order.
    """

    lint_clean: bool | None
    lint_warnings: int | None
    lints: list[str]


class _OwnEvent(TypedDict, total=False):
    """A field present only if a user-defined suite measures KPIs that are not in the table.

    Attributes:
        values: KPI -> value of the last attempt, without KPIs that do not apply to the answer.
    """

    values: dict[str, float]


class ItemEvent(_LintEvent, _OwnEvent):
    """One sample of one item under one condition; null values are explained in `unknown`.

    Attributes:
        version: version of this layout.
        item_id: the suite's id of the item.
        condition: the model that answered.
        sample: index among the samples of the item, from 0.
        group: the part of the suite that the item belongs to; empty if there is only one.
        prompt: the first prompt.
        reference: the suite's own answer.
        completion: the answer of the last attempt.
        parses: whether that answer compiles, or parses.
        finished: whether it ended with the model's end marker, or at a stop string.
        error: error in the answer.
        tokens_in: prompt tokens of all attempts.
        tokens_out: generated tokens of all attempts.
        attempts: number of requested answers, 1 without a retry.
        compile_pass_1: the first attempt compiles.
        compile_pass_n: at least one attempt compiles.
        canonical_pass: the last attempt compiles and is formatted as formatters do.
        strictness: the last attempt is code only: no fences, no chatter.
        pass_1: the first attempt solves the task.
        task_success: at least one attempt solves the task.
        semantic_task_success: it does, without placeholder code.
        repair_depth: number of attempts before the first valid one; null if there is none.
        repair_stalled: two consecutive attempts have the same errors.
        error_count: number of errors in all attempts.
        latency_ms: time until the answer, over all attempts.
        time_to_first_valid_ms: time until the first valid attempt.
        placeholder_marker_hits: number of markers of unfinished code.
        trivial_placeholder_output: it consists only of placeholders.
        richness: score from 0 to 1 for the number of effective statements.
        anti_stub_pass: it is neither trivial nor marked.
        outcome: result of the execution, such as ``passed`` or ``timeout``.
        style: how grading interpreted the answer: as a ``continuation`` of the prompt's function,
            as the ``whole`` function, or as ``class Solution`` if it looks for one function;
            otherwise from the ``last block``, an ``open block`` or the whole ``completion``.
        unknown: null field -> reason.
    """

    version: int
    item_id: str
    condition: str
    sample: int
    group: str
    prompt: str
    reference: str
    completion: str
    parses: bool | None
    finished: bool
    error: str | None
    tokens_in: int | None
    tokens_out: int | None
    attempts: int
    compile_pass_1: bool | None
    compile_pass_n: bool | None
    canonical_pass: bool | None
    strictness: bool | None
    pass_1: bool | None
    task_success: bool | None
    semantic_task_success: bool | None
    repair_depth: int | None
    repair_stalled: bool | None
    error_count: int | None
    latency_ms: float | None
    time_to_first_valid_ms: float | None
    placeholder_marker_hits: int | None
    trivial_placeholder_output: bool | None
    richness: float | None
    anti_stub_pass: bool | None
    outcome: str | None
    style: str | None
    unknown: dict[str, str]


_SINCE_2: Final = (
    *("canonical_pass", "strictness", "pass_1", "task_success", "semantic_task_success"),
    *("repair_stalled", "latency_ms", "time_to_first_valid_ms"),
    *("placeholder_marker_hits", "trivial_placeholder_output", "richness", "anti_stub_pass"),
    "outcome",
)
_WITHOUT_STYLE: Final = 2  # the last version without styles
_NOT_RECORDED: Final = "written by version {}, which did not record it"


def _scorecard_of_1(value: dict[str, Any]) -> dict[str, Any]:
    generation = {"engine": "hf", "temperature": 0.0, "samples": 1, "max_retries": 0}
    return {**value, "generation": generation, "sandbox": None, "self_test": None}


def _scorecard_of_2(value: dict[str, Any]) -> dict[str, Any]:
    return {**value, "metrics": {}, "declared": {}}


@dataclass(kw_only=True, slots=True)
class Scorecard(StoredRecord):
    """The KPIs of one run.

    Attributes:
        format: always ``mens_exp_scorecard``.
        version: version of this layout.
        suite: the suite's name.
        suite_digest: SHA-256 of its items and settings.
        items: number of items answered under each condition; the denominator of every share.
        conditions: condition -> KPI -> value; None if unknown.
        metrics: metric of the user's callbacks and modules -> its value for the run, as in the
            manifest's ``results.metrics``; None if no value was finite. Empty if the run trained
            nothing.
        declared: KPI of a user-defined suite, a mean over the answers that have it -> its unit,
            direction and meaning.
        generation: how answers were generated: engine, temperature, samples, retries.
        sandbox: where generated code ran; None if none was run. ``unsafe`` is not valid for
            promotion.
        self_test: results of the suite's own references and stubs, obtained before scoring; None
            if the suite runs nothing that could be tested.
        unknown: dotted path of a null KPI -> reason.
    """

    MIGRATIONS: ClassVar[dict[int, Any]] = {1: _scorecard_of_1, 2: _scorecard_of_2}

    format: str = "mens_exp_scorecard"
    version: int = 3
    suite: str
    suite_digest: str
    items: int
    conditions: dict[str, dict[str, float | int | None]]
    metrics: dict[str, float | int | None] = field(default_factory=dict)
    declared: dict[str, dict[str, str]] = field(default_factory=dict)
    generation: dict[str, Any]
    sandbox: str | None = None
    self_test: dict[str, Any] | None = None
    unknown: dict[str, str] = field(default_factory=dict)

    def problems(self, where: str) -> list[DataError]:
        """Return inconsistencies of the scorecard."""
        if self.items >= 0:
            return []
        return [
            DataError(
                "wrong value", where=f"{where}: items", found=self.items, expected="0 or more"
            )
        ]


def write_item_events(path: Path, events: Iterable[ItemEvent]) -> None:
    """Write one line per sample, item and condition, atomically.

    Raises:
        MensError: an event does not match ItemEvent; nothing is written.
    """
    write_lines(path, events, ItemEvent)


def read_item_events(path: Path) -> list[ItemEvent]:
    """Read lines written by `write_item_events`, including those of versions 1 and 2.

    Raises:
        DataError: the file is missing, or a line is not a valid event (``file:line``) or has a
            newer version.
        Problems: several lines are invalid.
    """
    events: list[ItemEvent] = read_lines(path, ItemEvent, migrate=event_of_today)
    return events


def event_of_today(value: Any, where: str) -> Any:
    """Migrate a line of version 1 (without a version field) or 2 to the current version."""
    if not isinstance(value, dict):
        return value
    if "version" not in value:
        return _with_style(_event_of_1(value), 1)
    version = value["version"]
    if isinstance(version, int) and version > EVENT_VERSION:
        raise DataError(
            "written by a newer version of this program",
            where=f"{where}: version",
            found=version,
            expected=f"at most {EVENT_VERSION}",
            remedy="upgrade mens-exp to read it",
        )
    return _with_style(value, 2) if version == _WITHOUT_STYLE else value


def _with_style(value: dict[str, Any], version: int) -> dict[str, Any]:
    """Mark the style of a line written before styles were recorded as unknown."""
    unknown = value.get("unknown")
    if not isinstance(unknown, dict):
        return value  # reported by the check of its type
    reason = {"style": _NOT_RECORDED.format(version)}
    return {"style": None, **value, "version": EVENT_VERSION, "unknown": reason | unknown}


def _event_of_1(value: dict[str, Any]) -> dict[str, Any]:
    parses = value.get("parses")
    return {
        "version": EVENT_VERSION,
        "sample": 0,
        "group": "",
        "attempts": 1,
        "compile_pass_1": parses,
        "compile_pass_n": parses,
        "repair_depth": 0 if parses is True else None,
        "error_count": int(value.get("error") is not None),
        **dict.fromkeys(_SINCE_2),
        "unknown": dict.fromkeys(_SINCE_2, _NOT_RECORDED.format(1))
        | ({} if parses is True else {"repair_depth": "no attempt is valid"}),
        **value,
    }


class SampleAnswer(TypedDict):
    """One answer, and whether it ended with the model's end marker."""

    text: str
    tokens: int
    finished: bool


class Sample(TypedDict):
    """One held-out row and the answers to it, by condition."""

    item_id: str
    prompt: str
    reference: str
    answers: dict[str, SampleAnswer]


@dataclass(kw_only=True, slots=True)
class Samples(StoredRecord):
    """Unscored answers, to be read.

    Attributes:
        format: always ``mens_exp_samples``.
        version: version of this layout.
        max_new_tokens: maximum length of an answer.
        items: in the order of their ids.
    """

    format: str = "mens_exp_samples"
    version: int = 1
    max_new_tokens: int
    items: list[Sample]

    def problems(self, where: str) -> list[DataError]:
        """Return the items that occur twice."""
        names = [one["item_id"] for one in self.items]
        twice = sorted({name for name in names if names.count(name) > 1})
        return [
            DataError("an item occurs twice", where=f"{where}: items", found=one) for one in twice
        ]
