from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mens_exp.errors import DataError
from mens_exp.rows.decode import decoded_rows
from mens_exp.rows.readers import read_rows

ROW = {"prompt": "p", "response": "r"}


def located(path, text):
    path.write_text(text, "utf-8")
    found = decoded_rows(path, "data.path")
    return [(row.where.removeprefix(f"{path}:"), row.value) for row in found]


def test_array_is_read_with_the_line_of_each_element(tmp_path):
    """Alpaca files are one array with elements over several lines, or several on a line."""
    text = '[\n {"a": 1,\n  "b": 2},\n {"a": 3}, {"a": 4}\n]\n'
    assert located(tmp_path / "a.json", text) == [
        ("2", {"a": 1, "b": 2}),
        ("4", {"a": 3}),
        ("4", {"a": 4}),
    ]


@given(
    rows=st.lists(st.dictionaries(st.text(), st.text()), min_size=1), indent=st.none() | st.just(2)
)
def test_any_array_is_read_as_json_reads_it(tmp_path_factory, rows, indent):
    """Elements equal those of json.loads."""
    path = tmp_path_factory.mktemp("json") / "a.json"
    text = json.dumps(rows, indent=indent)
    assert [value for _, value in located(path, text)] == json.loads(text)


def test_lines_in_a_json_file_are_rows_too(tmp_path):
    """Some tools name JSON Lines files .json."""
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROW) + "\n" + json.dumps(ROW) + "\n", "utf-8")
    assert len(read_rows(path).pairs) == 2


def test_array_on_a_line_of_jsonl_is_no_row(tmp_path):
    """Only a .json file may contain an array of rows."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps([ROW]), "utf-8")
    with pytest.raises(DataError, match="a row must be a JSON object"):
        read_rows(path)


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[]", "1", "the array is empty"),
        ('[{"a": 1}\n {"a": 2}]', "1", "after a row comes a comma"),
        ('[{"a": 1},\n]', "1", "after a row comes a comma"),
        ('[{"a": 1},\n{"a": }]', "2", "the array is not JSON"),
        ('[{"a": 1}', "1", "after a row comes a comma"),
        ('[{"a": 1}] more', "1", "something follows the array"),
        ('[{"a": 1, "a": 2}]', "1", "the key 'a' occurs twice"),
        ("[" + "[" * 100_000, "1", "not usable JSON"),
    ],
)
def test_broken_array_is_refused_where_it_breaks(tmp_path, text, line, reason):
    """Earlier elements are read, and the error gives the line of the bad one."""
    where, problem = located(tmp_path / "a.json", text)[-1]
    assert (where, isinstance(problem, DataError)) == (line, True)
    assert reason in str(problem)


def test_array_that_is_not_utf8_is_refused(tmp_path):
    """The error gives the line of the first bad byte."""
    path = tmp_path / "a.json"
    path.write_bytes(b'[\n{"a": "\xff"}]')
    with pytest.raises(DataError, match=r"a\.json:2: the file is not UTF-8"):
        read_rows(path)
