"""Comparison records of older versions: the shipped comparison is version 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mens_exp.artifacts.comparison import Comparison
from mens_exp.errors import MensError
from mens_exp.report.comparison_view import findings, verdict_table

SHIPPED = Path(__file__).parents[2] / "notebooks" / "records" / "comparison" / "compare.json"


def test_a_record_of_version_1_is_read_with_what_it_knew(tmp_path):
    """One level, no MDE range, no sequential test; it is written again as version 2."""
    record = Comparison.read(SHIPPED)
    assert json.loads(SHIPPED.read_text("utf-8"))["version"] == 1
    kpi = record.contrasts[0]["kpis"][record.primary]
    assert (kpi["level"], kpi["mde_low"], record.sequential) == (0.95, None, "none")
    assert any("each arm alone" in note for note in record.notes)
    assert verdict_table(record).rows[0][5].startswith("about ")
    assert list(findings(record))
    record.write(tmp_path / "compare.json")
    assert Comparison.read(tmp_path / "compare.json") == record


def lacks_contrasts(value):
    del value["contrasts"]


def has_a_text_for_alpha(value):
    value["alpha"] = "0.05"


def has_a_list_for_kpis(value):
    value["contrasts"][0]["kpis"] = []


def has_a_number_for_a_kpi(value):
    value["contrasts"][0]["kpis"]["val_loss"] = 1.0


def has_a_number_for_notes(value):
    value["notes"] = 3


@pytest.mark.parametrize(
    "damage",
    [
        lacks_contrasts,
        has_a_text_for_alpha,
        has_a_list_for_kpis,
        has_a_number_for_a_kpi,
        has_a_number_for_notes,
    ],
)
def test_a_damaged_record_of_version_1_is_refused(tmp_path, damage):
    """The error is a `MensError`, not a traceback."""
    value = json.loads(SHIPPED.read_text("utf-8"))
    damage(value)
    path = tmp_path / "compare.json"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(MensError, match=r"wrong value|missing key"):
        Comparison.read(path)
