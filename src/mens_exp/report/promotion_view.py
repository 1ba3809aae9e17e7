"""A decision as people read it on the terminal: every rule, its figure and its threshold."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mens_exp.report import wording

if TYPE_CHECKING:
    from mens_exp.artifacts.decision_ledger import DecisionEntry

__all__ = ["decision_view"]

_COLORS = {"passed": "green", "failed": "bold red", "unknown": "yellow"}


def decision_view(policy: str, made: DecisionEntry) -> RenderableType:
    """Show the answer, and the rules that led to it."""
    table = Table(box=box.SIMPLE_HEAD, title_justify="left", show_edge=False, pad_edge=False)
    table.title = f"{policy}: {made['decision']}"
    for head in ("rule", "evidence", "KPI", "observed", "threshold", "outcome", "note"):
        table.add_column(head, overflow="fold")
    for rule in made["rules"]:
        where = "" if rule["evidence"] is None else PurePath(rule["evidence"]).parent.name
        cells = (rule["rule"], where, rule["kpi"] or "", _text(rule["observed"]))
        outcome = Text(str(rule["outcome"]), style=_COLORS[str(rule["outcome"])])
        shown = (wording.visible(cell) for cell in (*cells, _text(rule["threshold"])))
        table.add_row(*shown, outcome, wording.visible(rule["note"]))
    said = made["recommendation"]
    lines = [] if said is None else [Text(f"Recommended: {said}")]
    lines += [Text(wording.visible(text), style="yellow") for text in made.get("unverifiable", [])]
    return Group(table, *lines, Text())


def _text(value: float | str | None) -> str:
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else f"{value:.4g}"
