from __future__ import annotations

import hashlib
import json
import os

import pytest

from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError, Problems, RequestError
from mens_exp.rows.readers import Reading, read_rows, rows_digest
from mens_exp.rows.schema import TrainingPair

GOOD = b'{"prompt": "p", "response": "r"}'
PAIR = TrainingPair(prompt="p", response="r")


@pytest.fixture
def rows(tmp_path):
    return tmp_path / "rows.jsonl"


def refusal(path, data):
    path.write_bytes(data)
    with pytest.raises(DataError) as caught:
        read_rows(path)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        GOOD + b"\n" + GOOD + b"\n",
        GOOD + b"\n" + GOOD,
        GOOD + b"\r\n" + GOOD + b"\r\n",
        b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD,
    ],
    ids=["final newline", "none", "CRLF", "byte order mark"],
)
def test_rows_are_read_in_file_order(rows, data):
    """CRLF, a missing final newline and a byte order mark do not matter."""
    rows.write_bytes(data)
    assert read_rows(rows).pairs == [PAIR, PAIR]


def test_unicode_line_separator_does_not_end_a_row(rows):
    """JSON strings may contain U+2028; only a newline ends a row."""
    rows.write_text('{"prompt": "a\u2028b", "response": "é"}\n', encoding="utf-8")
    assert read_rows(rows).pairs == [TrainingPair(prompt="a\u2028b", response="é")]


def test_line_that_is_not_json_is_refused(rows):
    """The message has file, line and the JSON decoder's error."""
    message = refusal(rows, GOOD + b"\n{'prompt': 1}\n")
    assert message.startswith(f"{rows}:2: the line is not JSON: Expecting property name")
    assert "at column 2" in message


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b"", "the line is blank"),
        (b"  \t", "the line is blank"),
        (b"[1, 2]", "a row must be a JSON object · found array [1, 2]"),
        (b'{"prompt": "p"}', "the row has no 'response'"),
        (b'{"prompt": "\xff", "response": "r"}', "the line is not UTF-8 · found byte 0xff"),
        (b'{"prompt": "a\x00b", "response": "r"}', "the line holds NUL bytes · found 1 of them"),
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' occurs twice"),
        (b"[" * 100_000, "not usable JSON"),
        (b'{"rating": ' + b"9" * 5_000 + b"}", "not usable JSON"),
    ],
)
def test_bad_line_is_refused_with_its_place(rows, line, told):
    """Each kind of bad line has its own message with file and line."""
    message = refusal(rows, GOOD + b"\n" + line + b"\n" + GOOD)
    assert message.startswith(f"{rows}:2: ")
    assert told in message


def test_blank_last_line_is_refused(rows):
    """A second newline at the end makes a blank row."""
    assert f"{rows}:2: the line is blank" in refusal(rows, GOOD + b"\n\n")


def test_empty_file_is_refused(rows):
    """An empty file has nothing to train on."""
    assert "the file is empty" in refusal(rows, b"")


def test_file_of_only_a_byte_order_mark_is_refused(rows):
    """The file is otherwise empty."""
    assert "the file is empty" in refusal(rows, b"\xef\xbb\xbf")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_file_gets_one_message(rows, encoding):
    """There is no message per line."""
    text = "\ufeff" + (GOOD.decode() + "\n") * 5
    assert "the file is UTF-16" in refusal(rows, text.encode(encoding))


def test_missing_file_is_refused_with_the_nearest(tmp_path):
    """The message has the setting, the given path and a file that exists."""
    (tmp_path / "training.jsonl").write_bytes(GOOD)
    (tmp_path / "notes.txt").write_bytes(b"")
    missing = tmp_path / "trainig.jsonl"
    with pytest.raises(DataError) as caught:
        read_rows(missing)
    assert (caught.value.where, caught.value.found) == ("data.path", str(missing))
    assert "the nearest there is training.jsonl" in str(caught.value)


def test_missing_file_in_a_directory_without_files_says_so(tmp_path):
    """Without any file there is no suggestion."""
    with pytest.raises(DataError, match="there is none in"):
        read_rows(tmp_path / "rows.jsonl")


def test_missing_directory_is_named(tmp_path):
    """The wrong directory is named rather than the file."""
    with pytest.raises(DataError, match="does not exist either"):
        read_rows(tmp_path / "nowhere" / "rows.jsonl")


def test_directory_is_refused_with_a_file_in_it(tmp_path, rows):
    """The message suggests a file in the directory."""
    rows.write_bytes(GOOD)
    with pytest.raises(DataError, match="this is a directory") as caught:
        read_rows(tmp_path)
    assert caught.value.where == "data.path"
    assert "the nearest there is rows.jsonl" in str(caught.value)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet", "rows.csv"])
def test_a_pipe_is_refused_and_not_waited_for(name, tmp_path):
    """Reading a pipe without a writer would block."""
    os.mkfifo(tmp_path / name)
    with pytest.raises(DataError, match=r"data\.path: this is not a file on a disk"):
        read_rows(tmp_path / name)


def test_unreadable_file_is_refused(tmp_path):
    """The message includes the operating system's error."""
    with pytest.raises(DataError, match=r"data.path: the file cannot be read: .*[Nn]ame too long"):
        read_rows(tmp_path / ("x" * 5_000))


def test_problems_of_all_lines_are_told_together(rows):
    """Three bad lines give three messages in order."""
    rows.write_bytes(b'{"prompt": "p"}\n' + GOOD + b"\n\nno\n")
    with pytest.raises(Problems) as caught:
        read_rows(rows)
    assert [problem.where for problem in caught.value.problems] == [
        f"{rows}:1",
        f"{rows}:3",
        f"{rows}:4",
    ]


def test_problems_of_one_kind_are_told_once(rows):
    """The first is given in full, with the count of the others and their first line."""
    rows.write_bytes(b"\n".join([GOOD, *[b"no"] * 10, b'{"prompt": "p"}']))
    with pytest.raises(Problems) as caught:
        read_rows(rows)
    first, second = caught.value.problems
    assert (first.where, first.found) == (f"{rows}:2", "no")
    assert first.what.endswith("at column 1, here and in 9 more rows (3, 4, 5, 6, 7, …)")
    assert (second.where, second.what) == (f"{rows}:12", "the row has no 'response'")


def test_problems_beyond_the_limit_are_counted(rows):
    """Ten kinds with a limit of four give four messages and "6 more"."""
    lines = [{"prompt": "p", "response": "r", f"key_{name}": 1} for name in "abcdefghij"]
    rows.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    with pytest.raises(Problems) as caught:
        read_rows(rows, max_problems=4)
    told = caught.value.problems
    assert len(told) == 5
    assert str(told[-1]) == f"{rows}: 6 more problems in this file"


def test_problems_at_the_limit_are_told_without_a_count(rows):
    """There is no count of further problems."""
    rows.write_bytes(b"\n".join([b"no"] * 4))
    with pytest.raises(RequestError) as caught:
        read_rows(rows, max_problems=4)
    assert "more problems" not in str(caught.value)


def test_digest_is_that_of_the_canonical_lines():
    """The digest is SHA-256 over JSON lines with sorted keys and no spaces."""
    pairs = [PAIR, TrainingPair(prompt="é", response="r", rating=2)]
    lines = '{"prompt":"p","response":"r"}\n{"prompt":"é","rating":2,"response":"r"}\n'
    assert rows_digest(pairs) == hashlib.sha256(lines.encode()).hexdigest()


def test_digest_depends_on_the_order():
    """The order of rows affects training."""
    other = TrainingPair(prompt="q", response="r")
    assert rows_digest([PAIR, other]) != rows_digest([other, PAIR])


def test_digest_does_not_depend_on_the_spelling_of_the_file(rows):
    """Aliases and key order do not matter."""
    rows.write_text(json.dumps({"output": "r", "instruction": "p"}))
    assert rows_digest(read_rows(rows).pairs) == rows_digest([PAIR])


ALPACA = {"instruction": "p", "input": "i", "output": "r"}
CHAT = {"messages": [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]}
QUESTION = {"question": "p", "answer": "r", "lang": "en", "n": 7}
COLUMNS = Reading(columns={"prompt": "question", "response": "answer"})


def written(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def test_format_of_a_file_is_told(rows):
    """Alpaca rows without `input` are still Alpaca rows."""
    assert read_rows(written(rows, CHAT, CHAT)).form is RowFormat.messages
    assert read_rows(written(rows, {"instruction": "p", "output": "r"}, ALPACA)).form is (
        RowFormat.alpaca
    )


def test_two_formats_in_one_file_are_refused(rows):
    """The error gives both lines, and later rows are still checked."""
    with pytest.raises(Problems) as caught:
        read_rows(written(rows, ALPACA, CHAT, {"prompt": "p"}))
    first, second = caught.value.problems
    assert (first.where, first.found, first.expected) == (
        f"{rows}:2",
        "messages",
        f"alpaca, as {rows}:1 has it",
    )
    assert second.where == f"{rows}:3"


def test_format_can_be_said(rows):
    """A row of another format is then reported for its missing keys."""
    assert read_rows(written(rows, CHAT), Reading(form=RowFormat.messages)).pairs == [PAIR]
    with pytest.raises(Problems, match="the row has no 'prompt'"):
        read_rows(rows, Reading(form=RowFormat.pair))


def test_columns_are_read_and_the_others_counted(rows):
    """Ignored columns are counted by rows."""
    file = read_rows(written(rows, QUESTION, {"question": "p", "answer": "r", "n": 1}), COLUMNS)
    assert file.pairs == [PAIR, PAIR]
    assert file.ignored == {"lang": 1, "n": 2}


def test_columns_may_hold_any_format(rows):
    """Columns may hold a list of turns or Alpaca's input."""
    turns = {"dialog": CHAT["messages"], "id": 3}
    assert read_rows(written(rows, turns), Reading(columns={"messages": "dialog"})).pairs == [PAIR]
    named = {"prompt": "q", "input": "about", "response": "a"}
    row = {"q": "p", "about": "i", "a": "r"}
    (pair,) = read_rows(written(rows, row), Reading(columns=named)).pairs
    assert pair.prompt == "p\n\ni"


def test_columns_may_hold_further_fields(rows):
    """Each field has the name that an objective reads."""
    how = Reading(columns={**COLUMNS.columns, "fields.worse": "lang", "fields.weight": "n"})
    (pair,) = read_rows(written(rows, QUESTION), how).pairs
    assert pair.fields == (("weight", 7), ("worse", "en"))
    with pytest.raises(DataError, match=r"data\.columns\.fields\.worse"):
        read_rows(rows, Reading(columns={**COLUMNS.columns, "fields.worse": "lagn"}))


def test_a_column_may_be_empty_in_every_row(rows):
    """Alpaca's `input` column often is empty; it still counts as present."""
    row = {"question": "a", "answer": "b", "context": ""}
    how = Reading(columns={**COLUMNS.columns, "input": "context"})
    assert [pair.prompt for pair in read_rows(written(rows, row, row), how).pairs] == ["a", "a"]


def test_column_that_no_row_has_is_refused_with_the_nearest(rows):
    """A misspelled optional column would otherwise be ignored silently."""
    how = Reading(columns={**COLUMNS.columns, "system": "lnag"})
    with pytest.raises(DataError, match="there is no column 'lnag'") as caught:
        read_rows(written(rows, QUESTION), how)
    assert "data.columns.system" in str(caught.value)
    assert "the nearest is lang" in str(caught.value)


def test_group_column_parts_rows_and_is_not_trained_on(rows):
    """The column's text is used only as the group; a number becomes its digits."""
    how = Reading(group_column="file")
    row = {"prompt": "p", "response": "r", "file": 3}
    assert read_rows(written(rows, row), how).pairs == [
        TrainingPair(prompt="p", response="r", group="3")
    ]


def test_field_may_part_rows_and_still_be_read(rows):
    """Rows about one passage stay together and keep the passage."""
    (pair,) = read_rows(written(rows, ALPACA), Reading(group_column="input")).pairs
    assert (pair.prompt, pair.group) == ("p\n\ni", "i")


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"prompt": "p", "response": "r"}, "there is no column 'file'"),
        ({"prompt": "p", "response": "r", "file": None}, "found null None"),
        ({"prompt": "p", "response": "r", "file": ""}, "must hold a text or a whole number"),
        ({"prompt": "p", "response": "r", "file": True}, "found boolean"),
    ],
)
def test_row_without_its_group_is_refused(rows, row, reason):
    """The error gives file and line."""
    good = {"prompt": "p", "response": "r", "file": "a"}
    with pytest.raises(DataError, match=reason) as caught:
        read_rows(written(rows, good, row), Reading(group_column="file"))
    assert caught.value.where == f"{rows}:2"


def test_place_of_each_row_is_kept(rows):
    """Later messages use the place."""
    assert [p.place for p in read_rows(written(rows, CHAT, CHAT)).pairs] == [
        f"{rows}:1",
        f"{rows}:2",
    ]


def test_key_that_many_rows_have_is_told_once(rows):
    """It is reported at its first row, with the columns setting that ignores it."""
    row = {"instruction": "p", "output": "r", "id": 7}
    with pytest.raises(DataError) as caught:
        read_rows(written(rows, ALPACA, row, row, row))
    assert str(caught.value).startswith(f"{rows}:2: unknown key 'id', here and in 2 more rows")
    assert "data.columns={prompt:instruction,response:output}" in str(caught.value)
    how = Reading(columns={"prompt": "instruction", "response": "output"})
    assert read_rows(written(rows, row, row), how).ignored == {"id": 2}
