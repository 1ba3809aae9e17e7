"""scorecard.json and events.jsonl: what a suite measured, and the items it measured."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, TypedDict

from mens_exp.artifacts.record import StoredRecord, read_lines, write_lines
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Condition", "ItemEvent", "Scorecard", "read_item_events", "write_item_events"]


class Condition(StrEnum):
    """Which model answered: the base model alone, or with the adapter."""

    BASE = "base"
    TUNED = "tuned"


class ItemEvent(TypedDict):
    """One item under one condition; `finished` means it ended with its own end marker."""

    item_id: str
    condition: Condition
    prompt: str
    reference: str
    completion: str
    parses: bool
    finished: bool
    error: str | None
    tokens_in: int
    tokens_out: int


@dataclass(kw_only=True, slots=True)
class Scorecard(StoredRecord):
    """The KPIs of one run.

    Attributes:
        format: always ``mens_exp_scorecard``.
        version: of this layout.
        suite: the suite's name.
        suite_digest: SHA-256 of its items and settings.
        items: how many items each condition answered.
        conditions: condition -> KPI -> value; None where it is unknown.
        unknown: dotted KPI that is null -> why it is.
    """

    format: str = "mens_exp_scorecard"
    version: int = 1
    suite: str
    suite_digest: str
    items: int
    conditions: dict[str, dict[str, float | int | None]]
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
    """Write one line per item and condition, atomically.

    Raises:
        MensError: an event is not as ItemEvent declares; nothing is written.
    """
    write_lines(path, events, ItemEvent)


def read_item_events(path: Path) -> list[ItemEvent]:
    """Read the lines that `write_item_events` wrote.

    Raises:
        DataError: the file is missing, or a line is no such event (``file:line``).
        Problems: several are.
    """
    events: list[ItemEvent] = read_lines(path, ItemEvent)
    return events
