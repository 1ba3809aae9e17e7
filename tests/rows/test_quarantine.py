from __future__ import annotations

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mens_exp.config.data import JsonlData, OnBadRow, RowFormat
from mens_exp.corpus.source import load_rows
from mens_exp.errors import DataError, Problems
from mens_exp.rows import files
from mens_exp.rows.readers import Reading, quarantine_counts, read_rows, write_quarantine

GOOD = b'{"prompt": "p", "response": "r"}'
ASIDE = Reading(quarantine=True)


@pytest.fixture
def rows(tmp_path):
    return tmp_path / "rows.jsonl"


def read(path, *lines):
    path.write_bytes(b"\n".join([GOOD, *lines, GOOD]))
    return read_rows(path, ASIDE)


@pytest.mark.parametrize(
    ("line", "raw", "reason"),
    [
        (b"", "", "the line is blank"),
        (b"no \xe2\x82\xac", "no €", "the line is not JSON"),
        (b'{"prompt": "\xff"}', '{"prompt": "\\xff"}', "the line is not UTF-8"),
        (b"a\x00b\x00", "a\x00b\x00", "the line holds NUL bytes"),
        (b'{"a": 1, "a": 2}', '{"a": 1, "a": 2}', "the key 'a' occurs twice in one object"),
        (b"[1]\r", "[1]\r", "a row must be a JSON object"),
        (b'{"prompt": "p"}', '{"prompt": "p"}', "the row has no 'response'"),
    ],
)
def test_bad_line_is_put_aside_as_it_stands(rows, line, raw, reason):
    """File, line and reason are recorded, and the other rows are read."""
    file = read(rows, line)
    (bad,) = file.bad
    assert (bad.file, bad.line, bad.raw, bad.reasons) == (str(rows), 2, raw, (reason,))
    assert bad.problems[0].startswith(f"{rows}:2: ")
    assert [pair.place for pair in file.pairs] == [f"{rows}:1", f"{rows}:3"]


def test_reasons_are_counted_without_what_differs_from_row_to_row(rows):
    """Equal reasons with other numbers count together; a row may have two reasons."""
    turns = [{"role": "user", "content": "p"}, {"role": "assistant", "content": "r"}]
    twice = [{"messages": [*turns * n, turns[1]]} for n in (1, 2)]
    rows.write_text("".join(json.dumps(one) + "\n" for one in [{"messages": turns}, *twice]))
    file = read_rows(rows, ASIDE)
    assert quarantine_counts(file.bad) == {"turn N is out of order": 2}
    both = read(rows, b'{"prompt": " ", "response": 3}')
    assert quarantine_counts(both.bad) == {"'prompt' is empty": 1, "'response' must be a string": 1}


def test_bad_row_does_not_settle_the_format(rows):
    """Otherwise one bad chat at the start would quarantine every pair after it."""
    rows.write_bytes(b'{"messages": []}\n' + GOOD + b"\n" + GOOD)
    file = read_rows(rows, ASIDE)
    assert (file.form, len(file.pairs), len(file.bad)) == (RowFormat.pair, 2, 1)


def test_row_of_another_format_is_put_aside(rows):
    """Earlier rows have determined the format."""
    chat = b'{"conversations": [{"from": "human", "value": "p"}, {"from": "gpt", "value": "r"}]}'
    assert quarantine_counts(read(rows, chat).bad) == {"rows of two formats in one file": 1}


def test_line_over_the_limit_is_put_aside_by_its_beginning(rows, monkeypatch):
    """Only the beginning of such a line is recorded."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 2_000)
    monkeypatch.setattr("mens_exp.rows.decode.MAX_LINE_BYTES", 2_000)
    (bad,) = read(rows, b"x" * 5_000).bad
    assert (bad.raw, bad.reasons) == ("x" * 1_000, ("the line is too long",))


def test_row_of_a_table_is_put_aside_as_json(tmp_path):
    """It is given by number; values that JSON lacks are written as Python shows them."""
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [b"a", b"b"], "response": ["r", "s"]}), path)
    bad = read_rows(path, ASIDE).bad
    assert [(one.line, json.loads(one.raw)) for one in bad] == [
        (1, {"prompt": "b'a'", "response": "r"}),
        (2, {"prompt": "b'b'", "response": "s"}),
    ]


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.json", b"[" + GOOD + b' {"prompt"', "the array is not JSON"),
        ("a.jsonl", b"", "the file is empty"),
        ("a.jsonl", "\ufeff{}".encode("utf-16-le"), "the file is UTF-16"),
        ("a.jsonl.gz", gzip.compress(GOOD * 9, mtime=0)[:-5], "the compressed data is damaged"),
    ],
)
def test_file_that_cannot_be_read_to_its_end_is_refused_all_the_same(tmp_path, name, data, told):
    """The number of rows missing after the damage is unknown."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises((DataError, Problems), match=told):
        read_rows(path, ASIDE)


def load(rows, good, *bad, **values):
    lines = [json.dumps({"prompt": f"p{n}", "response": "r"}).encode() for n in range(good)]
    rows.write_bytes(b"\n".join([*lines, *bad]))
    shares = {"val_frac": 0.2, "heldout_frac": 0.2, "on_bad_row": OnBadRow.quarantine}
    return load_rows(JsonlData(path=str(rows), **{**shares, **values}), rows.parent)


def test_rows_put_aside_are_recorded_by_reason(rows):
    """The rest is split and trained on."""
    loaded = load(rows, 18, b"{}", b"no", max_bad_frac=0.1)
    assert len(loaded.train) + len(loaded.val) + len(loaded.heldout) == 18
    assert loaded.record()["quarantined"] == {
        "rows": 20,
        "bad": 2,
        "reasons": {
            "the line is not JSON": 1,
            "the row has no 'prompt'": 1,
            "the row has no 'response'": 1,
        },
    }
    assert [row.line for row in loaded.bad] == [19, 20]


def test_record_says_so_where_none_was_bad(rows):
    """The record has a zero, unlike a run without quarantine."""
    assert load(rows, 9).record()["quarantined"] == {"rows": 9, "bad": 0, "reasons": {}}
    assert "quarantined" not in load(rows, 9, on_bad_row=OnBadRow.error).record()


def test_too_many_bad_rows_are_refused(rows):
    """The error gives the share, the first place and the reasons."""
    with pytest.raises(DataError, match="too many bad rows") as caught:
        load(rows, 17, b"no", b"no", b"{", max_bad_frac=0.1)
    assert caught.value.where == "data.max_bad_frac"
    assert caught.value.found == f"3 of 20, the first at {rows}:18: the line is not JSON (3)"


def test_bad_rows_are_refused_by_default(rows):
    """All bad rows are reported by line."""
    with pytest.raises(Problems) as caught:
        load(rows, 200, b"no", b"{", on_bad_row=OnBadRow.error)
    assert [problem.where for problem in caught.value.problems] == [f"{rows}:201", f"{rows}:202"]


def test_rows_put_aside_are_written_one_a_line(rows, tmp_path):
    """Each line has file, line, all problems and the row."""
    path = tmp_path / "quarantine.jsonl"
    write_quarantine(path, read(rows, b'{"prompt": "p"}', b"\xff").bad)
    first, second = (json.loads(line) for line in path.read_text("utf-8").splitlines())
    assert (first["file"], first["line"], first["raw"]) == (str(rows), 2, '{"prompt": "p"}')
    assert first["problems"][0].startswith(f"{rows}:2: the row has no 'response'")
    assert (second["line"], second["raw"]) == (3, "\\xff")


def test_share_without_quarantine_is_refused():
    """The setting would have no effect."""
    from mens_exp.config.overrides import check

    given = ("data=jsonl", "data.path=rows.jsonl", "data.max_bad_frac=0.5")
    (problem,) = check(given, multirun=False).problems
    assert problem.where == "data.max_bad_frac"
    assert check((*given, "data.on_bad_row=quarantine"), multirun=False).problems == ()
