"""Findings of task=doctor, as one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Finding", "State", "findings_table"]


class State(StrEnum):
    """The meaning of a finding for a run."""

    GOOD = "good"
    NOTE = "note"  # limits something
    BAD = "bad"  # stops something


_MARKS = {State.GOOD: ("✓", "green"), State.NOTE: ("!", "yellow"), State.BAD: ("✗", "bold red")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at, and what to do where it is not as it should be."""

    name: str
    state: State
    found: str
    remedy: str | None = None

    def to_json(self) -> dict[str, str | None]:
        """Return the finding as a JSON object."""
        return {
            "name": self.name,
            "state": self.state.value,
            "found": self.found,
            "remedy": self.remedy,
        }


def findings_table(findings: Iterable[Finding]) -> Table:
    """Put each finding on a line with its mark, its remedy under it."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.state]
        told = Text(finding.found)
        if finding.remedy is not None:
            told.append(f"\nNext: {finding.remedy}", style=style)
        table.add_row(Text(mark, style=style), Text(finding.name), told)
    return table
