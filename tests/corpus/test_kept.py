from __future__ import annotations

import pytest

from mens_exp.corpus.row_files import load_stored_rows, store_rows
from mens_exp.errors import SetupError
from mens_exp.rows.schema import TrainingPair

HEADER = {"format": "own", "version": 1, "content_sha256": "c" * 64, "dropped": {"long": 2}}
PAIRS = [
    TrainingPair(prompt="p\u2028", response="r\n", category="c", group="g"),
    TrainingPair(prompt="q", response="s", rating=3, system=""),
]


def test_rows_come_back_with_what_they_are(tmp_path):
    """Rows round-trip; Unicode line separators inside a row do not end a line."""
    path = tmp_path / "cache" / "rows.jsonl"
    store_rows(path, HEADER, PAIRS)
    found = load_stored_rows(path, "c" * 64)
    assert found is not None
    header, pairs = found
    assert pairs == PAIRS
    assert header.items() >= HEADER.items()


def test_no_file_or_one_of_other_content_gives_nothing(tmp_path):
    """The header says what the rows were made from; if that differs, they are not used."""
    path = tmp_path / "rows.jsonl"
    assert load_stored_rows(path, "c" * 64) is None
    store_rows(path, HEADER, PAIRS)
    assert load_stored_rows(path, "d" * 64) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-2],
        lambda data: data.replace(b'"q"', b'"Q"'),
        lambda data: b"",
        lambda data: b"[]\n" + data,
        lambda data: b"\xff" + data,
        lambda data: data.replace(b"rows_sha256", b"rows_sha512"),
    ],
    ids=["cut", "changed row", "empty", "no header", "not UTF-8", "no hash"],
)
def test_damaged_file_gives_nothing(tmp_path, damage):
    """The rows are then made again."""
    path = tmp_path / "rows.jsonl"
    store_rows(path, HEADER, PAIRS)
    path.write_bytes(damage(path.read_bytes()))
    assert load_stored_rows(path, "c" * 64) is None


def test_cache_that_cannot_be_written_is_refused(tmp_path):
    """The cache directory's path is a file."""
    (tmp_path / "cache").write_text("")
    with pytest.raises(SetupError, match="the cache cannot be written") as caught:
        store_rows(tmp_path / "cache" / "rows.jsonl", HEADER, PAIRS)
    assert caught.value.where == str(tmp_path / "cache" / "rows.jsonl")
