"""scorecard.json and events.jsonl: what a suite measured, and the items it measured."""

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
"""A scorecard's `sandbox` where programs ran outside of any; no evidence for a promotion."""


class Condition(StrEnum):
    """The model that answered: the base model alone, or with the adapter.

    A suite that brings models of its own names its conditions itself.
    """

    BASE = "base"
    TUNED = "tuned"


class _LintEvent(TypedDict, total=False):
    """Fields that only a suite that lints has.

    Attributes:
        lint_clean: the last attempt compiles, and the linter finds nothing in it.
        lint_warnings: how many things the linter finds; null where it does not compile.
        lints: their names, in the order of the source.
    """

    lint_clean: bool | None
    lint_warnings: int | None
    lints: list[str]


class ItemEvent(_LintEvent):
    """One sample of one item under one condition; a null is explained in `unknown`.

    Attributes:
        version: of this layout.
        item_id: the suite's name for the item.
        condition: which model answered.
        sample: its number among the samples of the item, from 0.
        group: the part of the suite that the item belongs to; empty where there is one alone.
        prompt: what was asked first.
        reference: the suite's own answer.
        completion: the answer of the last attempt.
        parses: whether that answer compiles, or parses.
        finished: whether it ended with the model's own end marker, or at a stop string.
        error: what is wrong with it.
        tokens_in: tokens of the prompts of all attempts.
        tokens_out: tokens generated in all attempts.
        attempts: answers asked for, 1 without a retry.
        compile_pass_1: the first attempt compiles.
        compile_pass_n: one of the attempts compiles.
        canonical_pass: the last attempt compiles and is written as formatters write it.
        strictness: the last attempt is code only: no fences, no chatter.
        pass_1: the first attempt does the task.
        task_success: one of the attempts does the task.
        semantic_task_success: it does, and nothing in it holds the place of code.
        repair_depth: attempts before the first valid one; null where none is.
        repair_stalled: two attempts running have the same errors.
        error_count: errors of all attempts.
        latency_ms: until the answer was there, all attempts; that of a batch is each item's.
        time_to_first_valid_ms: until the first valid attempt was there.
        placeholder_marker_hits: places that say that something is left to write.
        trivial_placeholder_output: nothing is in it but what holds a place.
        richness: statements that do something, from 0 to 1, where there are enough of them.
        anti_stub_pass: it is neither trivial nor marked.
        outcome: how running it ended, such as ``passed`` or ``timeout``.
        style: how grading read that answer: as a ``continuation`` of the prompt's function, as the
            ``whole`` function or as ``class Solution`` where it looks for one function, else from
            the ``last block``, an ``open block`` or the whole ``completion``.
        unknown: field that is null -> why.
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
_WITHOUT_STYLE: Final = 2  # the last version that records none
_NOT_RECORDED: Final = "written by version {}, which did not record it"


def _scorecard_of_1(value: dict[str, Any]) -> dict[str, Any]:
    generation = {"engine": "hf", "temperature": 0.0, "samples": 1, "max_retries": 0}
    return {**value, "generation": generation, "sandbox": None, "self_test": None}


@dataclass(kw_only=True, slots=True)
class Scorecard(StoredRecord):
    """The KPIs of one run.

    Attributes:
        format: always ``mens_exp_scorecard``.
        version: of this layout.
        suite: the suite's name.
        suite_digest: SHA-256 of its items and settings.
        items: how many items each condition answered; the denominator of every share.
        conditions: condition -> KPI -> value; None where it is unknown.
        generation: how answers were made: engine, temperature, samples, retries.
        sandbox: what generated code was run in; None where none was run. ``unsafe`` is no
            evidence for a promotion.
        self_test: what the suite's own references and stubs came to, before anything was scored;
            None where the suite runs nothing that could be tested.
        unknown: dotted KPI that is null -> why it is.
    """

    MIGRATIONS: ClassVar[dict[int, Any]] = {1: _scorecard_of_1}

    format: str = "mens_exp_scorecard"
    version: int = 2
    suite: str
    suite_digest: str
    items: int
    conditions: dict[str, dict[str, float | int | None]]
    generation: dict[str, Any]
    sandbox: str | None = None
    self_test: dict[str, Any] | None = None
    unknown: dict[str, str] = field(default_factory=dict)

    def problems(self, where: str) -> list[DataError]:
        """Return what no scorecard can say."""
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
        MensError: an event is not as ItemEvent declares; nothing is written.
    """
    write_lines(path, events, ItemEvent)


def read_item_events(path: Path) -> list[ItemEvent]:
    """Read the lines that `write_item_events` wrote, also those of versions 1 and 2.

    Raises:
        DataError: the file is missing, or a line is no such event (``file:line``), or of a newer
            version.
        Problems: several are.
    """
    events: list[ItemEvent] = read_lines(path, ItemEvent, migrate=event_of_today)
    return events


def event_of_today(value: Any, where: str) -> Any:
    """Make a line of version 1, which has no version, or of version 2 one of today's."""
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
    """Say of a line that was written before styles were recorded that its style is unknown."""
    unknown = value.get("unknown")
    if not isinstance(unknown, dict):
        return value  # the check of its type says so
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
