from __future__ import annotations

import json
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError, MissingExtra, Problems
from mens_exp.rows.readers import Reading, read_rows
from mens_exp.rows.schema import TrainingPair

PAIRS = {"prompt": ["p", "q"], "response": ["r", "s"], "rating": [5, None]}


def parquet(path, table):
    pq.write_table(table, path, row_group_size=1)


def arrow_file(path, table):
    with pa.ipc.new_file(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


def arrow_stream(path, table):
    with pa.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)


WRITERS = [(".parquet", parquet), (".arrow", arrow_file), (".arrow", arrow_stream)]


@pytest.fixture(params=WRITERS, ids=["parquet", "arrow file", "arrow stream"])
def stored(request, tmp_path):
    """Write a table in each format and return the file."""
    ending, write = request.param

    def written(columns):
        path = tmp_path / f"rows{ending}"
        write(path, columns if isinstance(columns, pa.Table) else pa.table(columns))
        return path

    return written


def test_rows_of_a_table_are_read_with_their_numbers(stored):
    """Numbers start at 1; a null means that the row lacks the field."""
    path = stored(PAIRS)
    pairs = read_rows(path).pairs
    assert pairs == [
        TrainingPair(prompt="p", response="r", rating=5),
        TrainingPair(prompt="q", response="s"),
    ]
    assert [pair.place for pair in pairs] == [f"{path}:1", f"{path}:2"]


def test_lists_of_turns_are_read(stored):
    """Chat datasets have a list of structs in one column."""
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]
    file = read_rows(stored({"messages": [turns, turns]}))
    assert (file.form, file.pairs) == (
        RowFormat.messages,
        [TrainingPair(prompt="p", response="r")] * 2,
    )


def test_nulls_that_a_table_adds_to_objects_are_left_out(stored):
    """A column of objects has the keys of all its rows; JSON Lines of the same rows has not."""
    rows = [{"terms": [2, 3]}, {"path": "a", "deep": [{"x": 1}]}, {"deep": [{"y": None}, {"x": 2}]}]
    turns = [
        [
            {"role": "user", "content": "u"},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": one}]},
            {"role": "tool", "content": "t"},
            {"role": "assistant", "content": "a"},
        ]
        for one in rows
    ]
    pairs = read_rows(stored({"messages": turns})).pairs
    calls = [json.loads(pair.conversation)["messages"][1]["tool_calls"][0] for pair in pairs]
    found = [call["function"]["arguments"] for call in calls]
    assert found == [rows[0], rows[1], {"deep": [{}, {"x": 2}]}]


def test_columns_may_be_named(stored):
    """Columns that are not named are counted."""
    how = Reading(columns={"prompt": "q", "response": "a"})
    file = read_rows(stored({"q": ["p"], "a": ["r"], "id": [1]}), how)
    assert (file.pairs, file.ignored) == ([TrainingPair(prompt="p", response="r")], {"id": 1})


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ({"prompt": ["a", "b"], "response": ["r", None]}, "the row has no 'response'"),
        ({"prompt": ["a", "b"], "response": ["r", " "]}, "'response' is empty"),
        (
            {"prompt": ["a", "b"], "response": ["r", "s"], "rating": [1, 9]},
            "'rating' is out of range",
        ),
        ({"prompt": ["a", "b"], "response": ["r", "s"], "x": [None, 1]}, "unknown key 'x'"),
    ],
)
def test_bad_row_of_a_table_is_refused_with_its_number(stored, columns, told):
    """The checks are those of JSON lines."""
    path = stored(columns)
    with pytest.raises(DataError, match=told) as caught:
        read_rows(path)
    assert caught.value.where == f"{path}:2"


def test_types_that_json_has_not_are_named(stored):
    """Bytes are not text, and a float is not a rating."""
    path = stored({"prompt": [b"p"], "response": ["r"], "rating": [4.0]})
    with pytest.raises(Problems) as caught:
        read_rows(path)
    told = str(caught.value)
    assert "'prompt' must be a string · found bytes" in told
    assert "'rating' must be an integer · found number 4.0" in told


def test_row_that_is_not_utf8_is_refused_with_its_number(tmp_path):
    """A string column may contain any bytes; other rows are read."""
    broken = pa.array([b"a", b"\xff", b"c"]).cast(pa.binary()).view(pa.utf8())
    path = tmp_path / "rows.arrow"
    arrow_file(path, pa.table({"prompt": broken, "response": ["r"] * 3}))
    with pytest.raises(DataError, match="the row is not UTF-8") as caught:
        read_rows(path)
    assert caught.value.where == f"{path}:2"


def test_column_that_stands_twice_is_refused(stored):
    """It is unclear which column is meant."""
    table = pa.table([["p"], ["q"], ["r"]], names=["prompt", "prompt", "response"])
    with pytest.raises(DataError, match="the column 'prompt' occurs twice"):
        read_rows(stored(table))


def test_table_without_rows_is_refused(stored):
    """An empty table has nothing to train on."""
    none = pa.array([], pa.utf8())
    with pytest.raises(DataError, match="the table is empty"):
        read_rows(stored({"prompt": none, "response": none}))


def test_damaged_table_is_refused(stored):
    """The file is truncated or has another format."""
    path = stored(PAIRS)
    whole = path.read_bytes()
    for data in (whole[: len(whole) // 2], b"", b'{"prompt": "p", "response": "r"}\n'):
        path.write_bytes(data)
        with pytest.raises(DataError, match="table, or it is damaged") as caught:
            read_rows(path)
        assert caught.value.where == str(path)


def test_absent_table_is_refused_with_the_nearest(stored):
    """The error is that of any missing file."""
    path = stored(PAIRS)
    with pytest.raises(DataError, match=f"the nearest there is {path.name}"):
        read_rows(path.with_name(f"row{path.suffix}"))


def test_table_without_pyarrow_names_the_extra(stored, monkeypatch):
    """The environment error exits with code 3."""
    path = stored(PAIRS)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"mens-exp\[datasets\]") as caught:
        read_rows(path)
    assert caught.value.exit_code == 3
