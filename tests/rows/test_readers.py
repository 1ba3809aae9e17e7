from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

import pytest

from mens_exp.errors import DataError, Problems, RequestError
from mens_exp.rows.readers import read_rows, rows_digest
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from pathlib import Path

GOOD = b'{"prompt": "p", "response": "r"}'
PAIR = TrainingPair(prompt="p", response="r")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return tmp_path / "rows.jsonl"


def refusal(path: Path, data: bytes) -> str:
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
def test_rows_are_read_in_file_order(rows: Path, data: bytes) -> None:
    """Line ends, the last newline and a byte order mark do not matter."""
    rows.write_bytes(data)
    assert read_rows(rows).pairs == [PAIR, PAIR]


def test_unicode_line_separator_does_not_end_a_row(rows: Path) -> None:
    """JSON strings may hold U+2028 as it is; only a newline ends a row."""
    rows.write_text('{"prompt": "a\u2028b", "response": "é"}\n', encoding="utf-8")
    assert read_rows(rows).pairs == [TrainingPair(prompt="a\u2028b", response="é")]


def test_line_that_is_not_json_is_refused(rows: Path) -> None:
    """The message has file and line, and what the JSON decoder said."""
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
        (b'{"prompt": "a", "prompt": "b"}', "the key 'prompt' stands twice"),
        (b"[" * 100_000, "not usable JSON"),
        (b'{"rating": ' + b"9" * 5_000 + b"}", "not usable JSON"),
    ],
)
def test_bad_line_is_refused_with_its_place(rows: Path, line: bytes, told: str) -> None:
    """Each way in which a line can be wrong has its own message, with file and line."""
    message = refusal(rows, GOOD + b"\n" + line + b"\n" + GOOD)
    assert message.startswith(f"{rows}:2: ")
    assert told in message


def test_blank_last_line_is_refused(rows: Path) -> None:
    """Two newlines at the end are a blank row, one is not."""
    assert f"{rows}:2: the line is blank" in refusal(rows, GOOD + b"\n\n")


def test_empty_file_is_refused(rows: Path) -> None:
    """No rows is nothing to train on."""
    assert "the file is empty" in refusal(rows, b"")


def test_file_of_only_a_byte_order_mark_is_refused(rows: Path) -> None:
    """It holds no more than an empty one."""
    assert "the file is empty" in refusal(rows, b"\xef\xbb\xbf")


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_utf16_file_gets_one_message(rows: Path, encoding: str) -> None:
    """Not one message for each of its lines."""
    text = "\ufeff" + (GOOD.decode() + "\n") * 5
    assert "the file is UTF-16" in refusal(rows, text.encode(encoding))


def test_missing_file_is_refused_with_the_nearest(tmp_path: Path) -> None:
    """The message has the setting, the path as given and a file that is there."""
    (tmp_path / "training.jsonl").write_bytes(GOOD)
    (tmp_path / "notes.txt").write_bytes(b"")
    missing = tmp_path / "trainig.jsonl"
    with pytest.raises(DataError) as caught:
        read_rows(missing)
    assert (caught.value.where, caught.value.found) == ("data.path", str(missing))
    assert "the nearest there is training.jsonl" in str(caught.value)


def test_missing_file_in_a_directory_without_files_says_so(tmp_path: Path) -> None:
    """There is nothing to offer, and that is told."""
    with pytest.raises(DataError, match="there is none in"):
        read_rows(tmp_path / "rows.jsonl")


def test_missing_directory_is_named(tmp_path: Path) -> None:
    """A wrong directory is the first thing to correct."""
    with pytest.raises(DataError, match="does not exist either"):
        read_rows(tmp_path / "nowhere" / "rows.jsonl")


def test_directory_is_refused_with_a_file_in_it(tmp_path: Path, rows: Path) -> None:
    """Whoever names the directory is told the file."""
    rows.write_bytes(GOOD)
    with pytest.raises(DataError, match="this is a directory") as caught:
        read_rows(tmp_path)
    assert caught.value.where == "data.path"
    assert "the nearest there is rows.jsonl" in str(caught.value)


def test_unreadable_file_is_refused(tmp_path: Path) -> None:
    """What the operating system says is passed on, as a problem of the request."""
    with pytest.raises(DataError, match=r"data.path: the file cannot be read: .*[Nn]ame too long"):
        read_rows(tmp_path / ("x" * 5_000))


def test_problems_of_all_lines_are_told_together(rows: Path) -> None:
    """Three bad lines make three messages, in order."""
    rows.write_bytes(b'{"prompt": "p"}\n' + GOOD + b"\n\nno\n")
    with pytest.raises(Problems) as caught:
        read_rows(rows)
    assert [problem.where for problem in caught.value.problems] == [
        f"{rows}:1",
        f"{rows}:3",
        f"{rows}:4",
    ]


def test_problems_beyond_the_limit_are_counted(rows: Path) -> None:
    """Ten bad lines with a limit of four: four messages and "6 more"."""
    rows.write_bytes(b"\n".join([b"no"] * 10))
    with pytest.raises(Problems) as caught:
        read_rows(rows, max_problems=4)
    told = caught.value.problems
    assert len(told) == 5
    assert str(told[-1]) == f"{rows}: 6 more problems in this file"


def test_problems_at_the_limit_are_told_without_a_count(rows: Path) -> None:
    """Nothing is left to count."""
    rows.write_bytes(b"\n".join([b"no"] * 4))
    with pytest.raises(RequestError) as caught:
        read_rows(rows, max_problems=4)
    assert "more problems" not in str(caught.value)


def test_digest_is_that_of_the_canonical_lines() -> None:
    """SHA-256 over sorted-key JSON without spaces, one row a line."""
    pairs = [PAIR, TrainingPair(prompt="é", response="r", rating=2)]
    lines = '{"prompt":"p","response":"r"}\n{"prompt":"é","rating":2,"response":"r"}\n'
    assert rows_digest(pairs) == hashlib.sha256(lines.encode()).hexdigest()


def test_digest_depends_on_the_order() -> None:
    """The same rows in another order train another model."""
    other = TrainingPair(prompt="q", response="r")
    assert rows_digest([PAIR, other]) != rows_digest([other, PAIR])


def test_digest_does_not_depend_on_the_spelling_of_the_file(rows: Path) -> None:
    """Aliases and key order are the file's, not the rows'."""
    rows.write_text(json.dumps({"output": "r", "instruction": "p"}))
    assert rows_digest(read_rows(rows).pairs) == rows_digest([PAIR])
