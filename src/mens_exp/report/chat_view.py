"""Answers side by side: in columns on a terminal, in sections where the output is none."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["columns", "sections"]

_CURSOR = "▌"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and newline


def columns(answers: Mapping[str, tuple[str, bool]], titles: Mapping[str, str]) -> Table:
    """Lay answers beside each other.

    Args:
        answers: condition -> its text so far, and whether it is whole.
        titles: condition -> the head of its column.
    """
    table = Table(expand=True, show_lines=False)
    for name in answers:
        table.add_column(titles[name], ratio=1, overflow="fold")
    cells = [
        Text(_printable(text) if done else f"{_printable(text)}{_CURSOR}")
        for text, done in answers.values()
    ]
    table.add_row(*cells)
    return table


def sections(answers: Mapping[str, tuple[str, bool]], titles: Mapping[str, str]) -> str:
    """Write answers below each other, each under its title."""
    parts = [
        f"{titles[name]}\n{'-' * len(titles[name])}\n{_printable(text)}"
        for name, (text, _) in answers.items()
    ]
    return "\n\n".join(parts)


def _printable(text: str) -> str:
    """Keep what a model wrote from steering the terminal: control codes become U+FFFD."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)
