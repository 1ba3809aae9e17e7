from __future__ import annotations

import gzip
import json
import tracemalloc

import pytest
import zstandard

from mens_exp.errors import DataError
from mens_exp.rows import files
from mens_exp.rows.files import MAX_LINE_BYTES, Line, lines
from mens_exp.rows.readers import read_rows

ROW = b'{"prompt": "p", "response": "r"}\n'
COMPRESS = {
    ".gz": gzip.compress,
    ".zst": zstandard.compress,
}


@pytest.mark.parametrize("ending", COMPRESS)
@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL"])
def test_compressed_lines_are_read_as_plain_ones(tmp_path, ending, name):
    """Concatenated gzip members or zstd frames are one file, as for the command-line tools."""
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(COMPRESS[ending](b"\xef\xbb\xbf" + ROW) + COMPRESS[ending](ROW))
    assert [pair.place for pair in read_rows(path).pairs] == [f"{path}:1", f"{path}:2"]


def test_compressed_array_is_read(tmp_path):
    """The suffix before .gz gives the format."""
    path = tmp_path / "a.json.gz"
    path.write_bytes(gzip.compress(b"[" + ROW + b"," + ROW + b"]"))
    assert len(read_rows(path).pairs) == 2


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_file_that_is_cut_off_is_refused(tmp_path, ending):
    """Rows would be lost silently, since zstandard's own reader does not report it."""
    path = tmp_path / f"a.jsonl{ending}"
    text = b"".join(ROW.replace(b"p", str(n).encode()) for n in range(5_000))
    path.write_bytes(COMPRESS[ending](text)[:-9])
    with pytest.raises(DataError, match="damaged · found it ends too early") as caught:
        read_rows(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("ending", COMPRESS)
def test_file_that_is_not_compressed_as_named_is_refused(tmp_path, ending):
    """The error names the file as damaged."""
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(ROW)
    with pytest.raises(DataError, match="the compressed data is damaged"):
        read_rows(path)


@pytest.mark.parametrize("ending", COMPRESS)
def test_damage_in_the_middle_is_refused(tmp_path, ending):
    """Changed bytes are detected."""
    path = tmp_path / f"a.jsonl{ending}"
    text = b"".join(ROW.replace(b"p", str(n * 7919).encode()) for n in range(20_000))
    data = bytearray(COMPRESS[ending](text))
    middle = len(data) // 2
    data[middle : middle + 40] = bytes(40)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match="damaged"):
        read_rows(path)


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (gzip.compress(ROW, mtime=0), "gzip"),
        (zstandard.compress(ROW), "Zstandard"),
        (b"PAR1" + bytes(9), "Parquet"),
        (b"ARROW1" + bytes(9), "Arrow"),
    ],
)
def test_file_of_another_kind_than_its_name_is_told_its_kind(tmp_path, data, kind):
    """The error gives the kind, and not a hundred lines of bad UTF-8."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError, match=f"the file is {kind}, which its name does not say"):
        read_rows(path)


@pytest.mark.parametrize("ending", COMPRESS)
def test_empty_compressed_file_is_refused(tmp_path, ending):
    """An empty file has nothing to train on."""
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(COMPRESS[ending](b""))
    with pytest.raises(DataError, match="the file is empty"):
        read_rows(path)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 100])
def test_lines_do_not_depend_on_how_the_text_arrives(size):
    """Chunks of any size give the same lines as splitting the whole text."""
    text = b"a\n\nbcd\r\n\xc3\xa9\n\n"
    pieces = (text[start : start + size] for start in range(0, len(text), size))
    assert [line.raw for line in lines(pieces)] == text.removesuffix(b"\n").split(b"\n")


def test_line_at_the_limit_is_kept_and_one_over_it_is_not(monkeypatch):
    """For a longer line only its size and beginning are kept."""
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 2_000)
    text = b"x" * 2_000 + b"\n" + b"y" * 2_001 + b"\nz"
    for size in (7, 5_000):
        pieces = (text[start : start + size] for start in range(0, len(text), size))
        assert list(lines(pieces)) == [
            Line(b"x" * 2_000, 2_000),
            Line(b"y" * 1_000, 2_001),
            Line(b"z", 1),
        ]


def test_line_of_a_hundred_megabytes_is_refused_with_its_place_in_bounded_memory(
    tmp_path,
):
    """Its rest is counted without being stored, and the next row is read."""
    path = tmp_path / "a.jsonl"
    size = 100_000_000
    with path.open("wb") as file:
        file.write(ROW + b'"')
        for _ in range(100):
            file.write(b"x" * (size // 100))
        file.write(b"\n" + ROW)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="the line is too long") as caught:
            read_rows(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (caught.value.where, caught.value.found) == (f"{path}:2", "100,000,001 bytes")
    assert peak < 3 * MAX_LINE_BYTES  # the chunks and their join


def test_long_line_under_the_limit_is_a_row(tmp_path):
    """An answer of twenty megabytes is read."""
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"prompt": "p", "response": "r" * 20_000_000}), "utf-8")
    assert len(read_rows(path).pairs[0].response) == 20_000_000
