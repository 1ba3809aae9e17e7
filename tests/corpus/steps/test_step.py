from __future__ import annotations

import json

import pytest

from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.step import RowWriter, read_rows, read_sides
from mens_exp.errors import DataError
from mens_exp.rows.schema import TrainingPair

ROWS = [
    TrainingPair(
        prompt="p", response="é\n", rating=3, category="c", language="rust", group="g", difficulty=7
    ),
    TrainingPair(prompt="q", response="s", history=(("a", "b"),), system=""),
]


def test_rows_read_back_as_they_were_written(tmp_path):
    """All fields round-trip, including the difficulty; only the place differs."""
    with RowWriter(tmp_path) as writer:
        for row in ROWS:
            writer.write(row)
    assert writer.rows == {"rows.jsonl": 2}
    assert list(read_rows([tmp_path / "rows.jsonl"])) == ROWS
    assert next(read_rows([tmp_path / "rows.jsonl"])).place == f"{tmp_path}/rows.jsonl:1"


def test_rows_of_a_split_keep_their_sides(tmp_path):
    """There is a file for each side, and its name gives the side."""
    with RowWriter(tmp_path) as writer:
        writer.write(ROWS[0], Side.VAL)
        writer.write(ROWS[1], Side.TRAIN)
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["train.jsonl", "val.jsonl"]
    assert [side for side, _ in read_sides(files)] == [Side.TRAIN, Side.VAL]
    assert writer.total == 2


def test_a_bad_row_is_told_with_its_place_and_the_way_to_put_it_aside(tmp_path):
    """Reading stops at the first bad row, after yielding those before it."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "p", "response": "r"}) + '\n{"prompt": 3}\n', "utf-8")
    rows = read_rows([path])
    assert next(rows).prompt == "p"
    with pytest.raises(DataError, match=r"rows\.jsonl:2.*validate"):
        next(rows)
