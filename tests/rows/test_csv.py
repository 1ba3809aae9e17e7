"""CSV files of rows; errors that all rows share are reported once."""

from __future__ import annotations

import csv
import gzip
import io
import json

import pytest

from mens_exp.errors import DataError, Problems
from mens_exp.rows.readers import Reading, read_rows

PAIRS = [
    {"prompt": 'Say "hi", twice.', "response": "hi,\nhi", "rating": "4", "system": ""},
    {"prompt": "Häh?", "response": "\n\n a  ", "rating": "", "system": "Be brief."},
]


def written(rows, **options):
    """Return rows as Python's csv module writes them."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), **options)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


@pytest.mark.parametrize("end", ["\r\n", "\n"])
@pytest.mark.parametrize("name", ["rows.csv", "rows.csv.gz", "ROWS.CSV"])
def test_what_a_csv_writer_wrote_is_read(tmp_path, name, end):
    """Cells may hold quotes, commas and newlines; numbers are converted, empty cells left out."""
    data = written(PAIRS, lineterminator=end)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = read_rows(path).pairs
    assert [(pair.prompt, pair.response) for pair in found] == [
        (row["prompt"], row["response"]) for row in PAIRS
    ]
    assert [(pair.rating, pair.system) for pair in found] == [(4, None), (None, "Be brief.")]
    assert found[1].place == f"{path}:4"  # after a cell with a line end


@pytest.mark.parametrize("end", ["\r\n", "\n"])
def test_line_ends_in_cells_are_those_of_the_file(tmp_path, end):
    """Line ends inside cells stay as they are, as in Python's own reader."""
    rows = [
        {"prompt": "a\r\nb", "response": "c\nd\r\n"},
        {"prompt": "e\rf", "response": "g\r\n\r\nh\n\n"},
    ]
    path = tmp_path / "rows.csv"
    path.write_bytes(written(rows, lineterminator=end, quoting=csv.QUOTE_ALL))
    found = [(pair.prompt, pair.response) for pair in read_rows(path).pairs]
    with path.open(encoding="utf-8", newline="") as file:
        assert found == [(row["prompt"], row["response"]) for row in csv.DictReader(file)]
    assert found == [(row["prompt"], row["response"]) for row in rows]


def test_conversations_stand_in_a_cell_as_json(tmp_path):
    """Tools that flatten rows export lists as JSON strings."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = tmp_path / "rows.csv"
    path.write_bytes(written([{"messages": json.dumps(turns)}]))
    [pair] = read_rows(path).pairs
    assert (pair.prompt, pair.response) == ("a", "b")


def test_columns_are_named_as_in_a_table(tmp_path):
    """Columns that are not named are counted."""
    path = tmp_path / "rows.csv"
    path.write_bytes(b"q,a,n\nwhat,this,1\n")
    found = read_rows(path, Reading(columns={"prompt": "q", "response": "a"}))
    assert found.pairs[0].prompt == "what"
    assert found.ignored == {"n": 1}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"prompt;response\na;b\n", "not separated by commas"),
        (b"prompt,prompt\na,b\n", "does not name the columns"),
        (b"prompt,response\na,b,c\n", "another number of cells"),
        (b'prompt,response\na,"b\n', "is not valid CSV"),
        (b"prompt,response\na,\xff\n", "not UTF-8"),
        (b"prompt,response\n,b\n", "the row has no 'prompt'"),
        (b"prompt,response,rating\na,b,9\n", "'rating' is out of range"),
    ],
    ids=["semicolons", "twice", "cells", "open quote", "bytes", "empty", "range"],
)
def test_a_damaged_csv_file_is_told_by_its_line(tmp_path, data, said):
    """The error gives the file and the row."""
    path = tmp_path / "rows.csv"
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"rows.csv:\d") as caught:
        read_rows(path)
    assert said in str(caught.value)


@pytest.mark.parametrize("levels", [101, 600, 5_000])
def test_a_conversation_in_a_cell_that_is_nested_too_deeply_is_refused(tmp_path, levels):
    """A hundred levels are read; `json` itself fails at about a thousand."""

    def of(levels):
        arguments = '{"a":' * (levels - 1) + "[]" + "}" * (levels - 1)
        call = f'{{"function": {{"name": "f", "arguments": {arguments}}}}}'
        turns = (
            f'[{{"role": "user", "content": "x"}}, {{"role": "assistant", "tool_calls": [{call}]}}]'
        )
        path = tmp_path / "rows.csv"
        path.write_bytes(written([{"messages": turns}]))
        return path

    assert len(read_rows(of(100)).pairs) == 1
    with pytest.raises((DataError, Problems)):
        read_rows(of(levels))


def test_a_row_that_json_is_just_able_to_read_is_refused(tmp_path):
    """Showing such a row could overflow Python's stack."""
    path = tmp_path / "rows.jsonl"
    for levels in range(800, 1000):
        path.write_text(f'{{"prompt": {"[" * levels + "]" * levels}, "response": "x"}}\n', "utf-8")
        with pytest.raises((DataError, Problems)):
            read_rows(path)


def test_rows_of_another_kind_are_told_once(tmp_path):
    """Two hundred rows of another format give one message."""
    row = {"prompt": "p", "chosen": "good"}
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for _ in range(200)), "utf-8")
    with pytest.raises((DataError, Problems)) as caught:
        read_rows(path)
    lines = str(caught.value).splitlines()
    assert len(lines) <= 2
    assert "train on the preferred answer alone" in lines[0]
    assert "here and in 199 more rows" in lines[0]
    assert "more problems" not in str(caught.value)
