from __future__ import annotations

import json

import pytest

from mens_exp.config.data import JsonlData
from mens_exp.corpus.row_files import records
from mens_exp.corpus.source import load_rows
from mens_exp.errors import DataError, Problems


@pytest.fixture
def file(tmp_path):
    """Write rows, each a prompt or a dict, to a file of this name; return its path."""

    def written(name, *rows):
        path = tmp_path / name
        whole = [{"prompt": row, "response": "r"} if isinstance(row, str) else row for row in rows]
        path.write_text("".join(json.dumps(row) + "\n" for row in whole), "utf-8")
        return str(path)

    return written


def load(path, **values):
    from pathlib import Path

    shares = {"val_frac": 0.2, "heldout_frac": 0.2}
    return load_rows(JsonlData(path=path, **{**shares, **values}), Path("unused"))


def prompts(rows, *sides):
    return {pair.prompt for side in sides for pair in getattr(rows, side)}


def test_files_of_a_list_are_one_corpus(file):
    """The files are split together; the record has format, rows and digest of each."""
    chat = {"conversations": [{"from": "human", "value": "z"}, {"from": "gpt", "value": "r"}]}
    rows = load([file("a.jsonl", *"abcdef"), file("b.jsonl", chat)])
    assert prompts(rows, "train", "val", "heldout") == set("abcdefz")
    assert [(f.role, f.form, f.rows) for f in rows.files] == [
        ("rows", "pair", 6),
        ("rows", "sharegpt", 1),
    ]
    assert len({f.sha256 for f in rows.files}) == 2


def test_order_of_files_is_the_order_of_rows(file):
    """The order of files determines the order of rows, and enters the digest."""
    a, b = file("a.jsonl", *"abc"), file("b.jsonl", *"def")
    assert load([a, b]).sha256 != load([b, a]).sha256
    assert load([a, b]).sha256 == load(a.replace("a.jsonl", "*.jsonl")).sha256


def test_files_to_validate_on_leave_every_other_row_to_train_and_hold_out(
    file,
):
    """With data.val_path no row of data.path is used for validation."""
    rows = load(file("a.jsonl", *"abcdefghij"), val_path=file("v.jsonl", *"xy"))
    assert prompts(rows, "val") == set("xy")
    assert prompts(rows, "train", "heldout") == set("abcdefghij")
    assert rows.heldout
    assert [f.role for f in rows.files] == ["rows", "validation"]


def test_hash_of_all_rows_follows_those_to_validate_on(file):
    """The digest of all rows includes those of data.val_path."""
    path = file("a.jsonl", *"abcdef")
    first, second = (load(path, val_path=file(f"{n}.jsonl", n)) for n in "xy")
    assert first.sha256 != second.sha256


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"prompt": "b", "response": "r"}, "a validation row is trained on"),
        ({"prompt": " b\n", "response": "other"}, "shares its prompt"),
        ({"prompt": "new", "response": "s", "group": "g"}, "shares its group 'g'"),
    ],
)
def test_validation_row_that_is_trained_on_is_refused(file, row, told):
    """Validation loss on a training row means nothing; the error gives both places."""
    path = file("a.jsonl", "a", "b", "c", {"prompt": "d", "response": "r", "group": "g"})
    val = file("v.jsonl", "x", row)
    with pytest.raises(DataError, match=told) as caught:
        load(path, val_path=val)
    line = 4 if "group" in row else 2
    assert (caught.value.where, caught.value.found) == (f"{val}:2", f"the same in {path}:{line}")


def test_many_leaks_are_counted(file):
    """The message lists five leaks and the number of the rest."""
    letters = "abcdefgh"
    with pytest.raises(Problems, match="3 more such rows") as caught:
        load(file("a.jsonl", *letters), val_path=file("v.jsonl", *letters))
    assert len(caught.value.problems) == 6


def test_problems_of_all_files_come_together(file, tmp_path):
    """Problems of all files are reported together."""
    bad = file("a.jsonl", {"prompt": "p"})
    with pytest.raises(Problems) as caught:
        load([bad, str(tmp_path / "none.jsonl")], val_path=file("v.jsonl", {"response": "r"}))
    assert [p.where for p in caught.value.problems] == [
        f"{bad}:1",
        "data.path",
        f"{tmp_path / 'v.jsonl'}:1",
    ]


def test_absent_file_to_validate_on_is_named_by_its_setting(file, tmp_path):
    """The error names data.val_path, not data.path."""
    with pytest.raises(DataError) as caught:
        load(file("a.jsonl", *"abc"), val_path=str(tmp_path / "b.jsonl"))
    assert caught.value.where == "data.val_path"


def test_columns_left_out_are_in_the_record(file):
    """The record counts the rows that had each ignored column."""
    from mens_exp.config.data import ColumnsConfig

    rows = [{"q": letter, "a": "r", "lang": "en"} for letter in "abcdef"]
    loaded = load(file("a.jsonl", *rows), columns=ColumnsConfig(prompt="q", response="a"))
    assert [one["ignored"] for one in records(loaded.files).values()] == [{"lang": 6}]
    path = file("b.jsonl", *"abcdef")
    assert "ignored" not in records(load(path).files)[path]
