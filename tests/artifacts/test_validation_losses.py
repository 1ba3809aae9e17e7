"""Reading and writing validation.jsonl, and what the reader refuses."""

from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.telemetry import read_document_losses, write_document_losses
from mens_exp.errors import MensError

LINE = {"item_id": "9051486eb79614a2", "condition": "tuned", "loss": 41.5, "tokens": 7}


def test_lines_are_read_as_they_were_written(tmp_path):
    """One document under both conditions."""
    path = tmp_path / "validation.jsonl"
    lines = [LINE, {**LINE, "condition": "base"}]
    write_document_losses(path, lines)
    assert read_document_losses(path) == lines
    assert [json.loads(text) for text in path.read_text("utf-8").splitlines()] == lines


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ({**LINE, "tokens": 0}, "at least 1 token"),
        ({**LINE, "loss": -1.0}, "at least 0"),
        ({**LINE, "loss": "41.5"}, "loss"),
        ({"item_id": "a"}, "condition"),
        (LINE, "occurs twice"),
    ],
)
def test_a_line_that_no_validation_writes_is_refused_by_its_place(tmp_path, line, reason):
    """The message names the second of two lines."""
    path = tmp_path / "validation.jsonl"
    path.write_text(f"{json.dumps(LINE)}\n{json.dumps(line)}\n", "utf-8")
    with pytest.raises(MensError) as refused:
        read_document_losses(path)
    assert reason in str(refused.value)
    assert f"{path}:2" in str(refused.value)
