from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from mens_exp.artifacts.comparison import Comparison
from mens_exp.report.comparison_plots import drawings
from mens_exp.report.comparison_view import verdict_table, verdicts_grid

pytestmark = pytest.mark.draws

SHIPPED = Path(__file__).parents[2] / "notebooks" / "records" / "comparison" / "compare.json"


def test_no_word_of_the_verdicts_is_broken_in_a_terminal_of_80_columns():
    """The page has two columns more; here they would leave a verdict to be read downwards."""
    record = Comparison.read(SHIPPED)
    console = Console(width=80, file=io.StringIO())
    console.print(verdict_table(record))
    shown = console.file.getvalue()
    heads, rows = verdicts_grid(record)
    assert len(heads) == len(rows[0]) == 9
    for row in rows:
        assert all(word in shown for word in row[-1].split())
        assert row[1] in shown
    assert "seed noise" not in shown


def test_forests_say_their_level_and_which_way_is_better():
    """At an alpha of 0.001 the interval is no 100 % one."""
    record = Comparison.read(SHIPPED)
    record.alpha = 0.001
    kpi = record.contrasts[0]["kpis"][record.primary]
    kpi["direction"] = "min"
    forest = drawings(record)[0]
    assert "99.9% interval" in forest.caption
    assert forest.caption.endswith("Lower is better.")
    assert verdicts_grid(record)[0][2] == "99.9% interval"
