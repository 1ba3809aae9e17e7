from __future__ import annotations

import gzip
import json
import os
import pickle
import tracemalloc

import pytest

from mens_exp.config.data import ColumnsConfig, FilterConfig, JsonlData, OnBadRow
from mens_exp.corpus import row_files
from mens_exp.corpus.row_files import Rows
from mens_exp.corpus.source import load_rows
from mens_exp.corpus.split import Side
from mens_exp.errors import DataError, MensError, SetupError
from mens_exp.rows import encode as shards
from mens_exp.rows.cache import RowsOnDisk, read_on_disk
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.readers import Reading, rows_digest
from mens_exp.tokenizer.implementations import VoxTokenizer

MARK = "\ufeff"


@pytest.fixture
def both_ways(tmp_path, monkeypatch):
    """Load the same rows in memory and from disk; return both results."""

    def outcome(config):
        try:
            return load_rows(config, tmp_path / "cache")
        except MensError as error:
            return error

    def loaded(path, **values):
        config = JsonlData(path=path, **{"val_frac": 0.2, "heldout_frac": 0.1, **values})
        monkeypatch.setattr(row_files, "_LARGE", 2**60)
        held = outcome(config)
        monkeypatch.setattr(row_files, "_LARGE", 0)
        return held, outcome(config)

    return loaded


@pytest.fixture
def write(tmp_path):
    """Write rows as JSON lines and strings as given; return the file's path."""

    def written(name, *lines, begin="", end="\n"):
        text = begin + "\n".join(
            line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)
            for line in lines
        )
        path = tmp_path / name
        data = (text + end).encode()
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return str(path)

    return written


def row(number, **more):
    labels = {"rating": number % 5 + 1} if number % 3 else {}
    group = {"group": f"g{number // 4}"} if number % 2 else {}
    return {"prompt": f"né {number}", "response": "r" * (number % 7 + 1), **labels, **group, **more}


def chat(number):
    turns = [f"a{number}", f"b{number}", f"c{number}", f"d{number}"]
    roles = ("user", "assistant", "user", "assistant")
    return {
        "messages": [{"role": r, "content": c} for r, c in zip(roles, turns, strict=True)],
        "system": "s",
    }


def assert_same(held, on_disk):
    """Assert that all fields of both are equal; return the rows on disk."""
    assert isinstance(held, Rows), held
    assert isinstance(on_disk, Rows), on_disk
    assert isinstance(held.train, list)
    for side in Side:
        a, b = getattr(held, side.value), getattr(on_disk, side.value)
        assert isinstance(b, RowsOnDisk) or not b
        assert list(b) == a
        assert [pair.place for pair in b] == [pair.place for pair in a]
        assert on_disk.side_sha256(side) == held.side_sha256(side) == rows_digest(b)
    for name in ("source", "sha256", "files", "taken", "bad", "streamed"):
        assert getattr(on_disk, name) == getattr(held, name), name
    return on_disk


def test_rows_on_disk_are_those_in_memory(both_ways, write):
    """Several files and formats with a byte order mark, CRLF and no final newline load equally."""
    names = [
        write("a.jsonl", *map(row, range(60)), begin=MARK),
        write("b.jsonl", *(json.dumps(row(n)) + "\r" for n in range(60, 90)), end=""),
        write("c.jsonl", *map(chat, range(40))),
        write("d.jsonl", *({"instruction": f"i{n}", "output": "o"} for n in range(9))),
    ]
    rows = assert_same(*both_ways(names))
    assert len(rows.train) + len(rows.val) + len(rows.heldout) == 139


def test_sides_of_few_groups_are_those_in_memory(both_ways, write):
    """Few groups are split by rank."""
    rows = assert_same(*both_ways(write("a.jsonl", *(row(n, group=f"g{n % 3}") for n in range(9)))))
    assert {len(side) for side in (rows.train, rows.val, rows.heldout)} == {3}


def test_rows_to_validate_on_are_those_in_memory(both_ways, write):
    """Rows of data.val_path are filtered and hashed like the others."""
    path, val = write("a.jsonl", *map(row, range(60))), write("v.jsonl", *map(row, range(100, 120)))
    assert_same(*both_ways(path, val_path=val))
    rows = assert_same(*both_ways(path, val_path=val, filter=FilterConfig(min_rating=3)))
    assert rows.taken["filtered"]["kept"] == len(rows.train) + len(rows.val) + len(rows.heldout)
    assert rows.taken["filtered"]["refused"]["min_rating"] > 0


def test_bad_rows_that_are_put_aside_are_those_in_memory(both_ways, write):
    """Line, content and reason are the same; later rows keep their line numbers."""
    lines = [
        *map(row, range(30)),
        "no JSON",
        "",
        {"prompt": "p"},
        chat(1),
        *map(row, range(30, 60)),
    ]
    path = write("a.jsonl", *lines)
    aside = {"on_bad_row": OnBadRow.quarantine, "max_bad_frac": 0.2}
    rows = assert_same(*both_ways(path, **aside))
    assert [one.line for one in rows.bad] == [31, 32, 33, 34]


def test_columns_and_group_column_are_read_as_in_memory(both_ways, write):
    """Ignored columns are counted the same way."""
    lines = [{"q": f"q{n}", "a": "r", "file": n // 2, "id": n} for n in range(40)]
    columns = ColumnsConfig(prompt="q", response="a")
    rows = assert_same(*both_ways(write("a.jsonl", *lines), columns=columns, group_column="file"))
    assert rows.files[0].ignored == {"id": 40}


def test_compressed_rows_are_copied_once(both_ways, write, tmp_path):
    """The cached copy is named by its content; messages and record name the original file."""
    path = write("a.jsonl.gz", *map(row, range(60)), begin=MARK)
    rows = assert_same(*both_ways(path))
    (copy,) = (tmp_path / "cache" / "decompressed").iterdir()
    assert rows.files[0].path == path
    assert rows.train[0].place.startswith(f"{path}:")
    before = copy.stat().st_ino
    assert_same(*both_ways(path))
    assert copy.stat().st_ino == before


@pytest.mark.parametrize(
    "wrong", ["json", "leak", "near", "filter", "bad", "columns", "one", "cut"]
)
def test_what_is_refused_in_memory_is_refused_on_disk(both_ways, write, wrong, tmp_path):
    """Messages and places are the same."""
    good = [*map(row, range(60))]
    path, values = write("a.jsonl", *good), {}
    if wrong == "json":
        keys = [{"promt": "p", "response": "r"}] * 5
        path = [write("b.jsonl", *good, *keys, *["x"] * 30), str(tmp_path / "none.jsonl")]
        values = {"val_path": write("v.jsonl", "[]")}
        (tmp_path / "none.jsonl").write_bytes(b"")
    elif wrong == "leak":
        values = {"val_path": write("v.jsonl", *good[3:40:4], row(99))}
    elif wrong == "near":
        near = [{"prompt": " né  2\n", "response": "other"}, row(98, group="g3")]
        values = {"val_path": write("v.jsonl", row(99, group="new"), *near)}
    elif wrong == "filter":
        values = {"filter": FilterConfig(language="rust")}
    elif wrong == "bad":
        path = write("b.jsonl", *good, *["x"] * 30)
        values = {"on_bad_row": OnBadRow.quarantine}
    elif wrong == "columns":
        values = {"columns": ColumnsConfig(prompt="prompt", response="response", rating="stars")}
    elif wrong == "one":
        path = write("b.jsonl", *(row(n, group="g") for n in range(9)))
    else:
        path = write("c.jsonl.gz", *good)
        (tmp_path / "c.jsonl.gz").write_bytes((tmp_path / "c.jsonl.gz").read_bytes()[:-9])
    held, on_disk = both_ways(path, **values)
    assert isinstance(held, MensError)
    assert (type(on_disk), str(on_disk)) == (type(held), str(held))
    assert getattr(on_disk, "remedy", None) == getattr(held, "remedy", None)


def loaded(path, monkeypatch, cache):
    monkeypatch.setattr(row_files, "_LARGE", 0)
    return load_rows(JsonlData(path=path, val_frac=0.2, heldout_frac=0.1), cache)


@pytest.mark.parametrize("change", ["append", "replace", "same_size", "silent", "remove"])
def test_file_that_is_changed_afterwards_is_refused(write, tmp_path, monkeypatch, change):
    """After any change the training rows would not be those of the record."""
    path = tmp_path / "a.jsonl"
    rows = loaded(write(path.name, *map(row, range(60))), monkeypatch, tmp_path)
    assert list(rows.train)
    text, times = path.read_bytes(), (path.stat().st_atime_ns, path.stat().st_mtime_ns)
    if change == "append":
        path.write_bytes(text + text)
    elif change == "remove":
        path.unlink()
    elif change == "replace":
        (tmp_path / "b").write_bytes(text)
        (tmp_path / "b").replace(path)
    else:
        path.write_bytes(text.replace(b"r", b"s"))
        if change == "silent":
            os.utime(path, ns=times)
    with pytest.raises(DataError, match="was changed while it was in use") as caught:
        list(rows.train)
    assert caught.value.where == str(path)
    with pytest.raises(DataError, match="was changed while it was in use"):
        _ = rows.val[0]


def test_damaged_copy_of_a_compressed_file_is_refused(write, tmp_path, monkeypatch):
    """Checksums are of the original file, so a damaged copy is detected."""
    path = write("a.jsonl.gz", *map(row, range(60)))
    loaded(path, monkeypatch, tmp_path)
    (copy,) = (tmp_path / "decompressed").iterdir()
    copy.write_bytes(copy.read_bytes().replace(b"prompt", b"pronpt"))
    with pytest.raises(DataError, match="delete this copy") as caught:
        list(loaded(path, monkeypatch, tmp_path).train)
    assert caught.value.where == str(copy)
    copy.unlink()
    assert list(loaded(path, monkeypatch, tmp_path).train)


def test_processes_that_encode_read_the_rows(write, tmp_path, monkeypatch):
    """Encoding in processes equals encoding in memory; a changed file is reported."""
    for name, value in {"_SHARD": 10, "_POOL_FROM": 20, "usable_cores": lambda: 2}.items():
        monkeypatch.setattr(shards, name, value)
    path = write("a.jsonl", *map(row, range(60)))
    train = loaded(path, monkeypatch, tmp_path).train
    labelling = Labelling(objective="assistant", seq_len=64)
    together = encode(list(train), VoxTokenizer(), labelling)
    parts = shards.encode_parts(train, VoxTokenizer(), labelling, tmp_path / "kept")
    assert len(parts) > 2
    assert [part.ids.tolist() for part in parts] == [
        encode(list(train[start : start + 10]), VoxTokenizer(), labelling).ids.tolist()
        for start in range(0, len(train), 10)
    ]
    assert sum(len(part) for part in parts) == len(together)
    os.utime(path)
    with pytest.raises(DataError, match="was changed while it was in use"):
        shards.encode_parts(train, VoxTokenizer(), labelling, tmp_path / "other")


def test_cache_that_cannot_be_written_is_told(write, tmp_path, monkeypatch):
    """The error suggests other ways."""
    (tmp_path / "decompressed").mkdir()
    path = write("a.jsonl.gz", *map(row, range(60)))

    def refused(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mens_exp.rows.cache.atomic.stream", refused)
    with pytest.raises(SetupError, match="No space left on device") as caught:
        loaded(path, monkeypatch, tmp_path)
    assert "MENS_EXP_CACHE" in str(caught.value.remedy)


def test_file_that_changes_while_it_is_read_is_refused(write, tmp_path, monkeypatch):
    """The rows would be partly of the old and partly of the new content."""
    path = tmp_path / "a.jsonl"
    write(path.name, *map(row, range(60)))

    def seen(_):
        os.utime(path, ns=(1, 1))

    with pytest.raises(DataError, match="was changed while it was in use"):
        read_on_disk(path, Reading(), tmp_path, seen)


def test_a_part_of_the_rows_is_named_and_not_read(write, tmp_path, monkeypatch):
    """Slices read nothing, also when pickled for another process; their rows are the same."""
    path = tmp_path / "a.jsonl"
    train = loaded(write(path.name, *map(row, range(60))), monkeypatch, tmp_path).train
    everyone = list(train)
    part = pickle.loads(pickle.dumps(train[5:20:3]))  # pickled above
    assert list(part) == everyone[5:20:3]
    assert (part[0], part[-1], train[-2]) == (everyone[5], everyone[17], everyone[-2])
    assert len(pickle.dumps(train[:2])) < 1_000
    with pytest.raises(IndexError):
        train[len(train)]
    path.unlink()
    assert len(train[:3]) == 3


def test_small_files_and_arrays_stay_in_memory(write, monkeypatch):
    """A JSON array cannot be read from the middle."""
    path = write("a.jsonl", *map(row, range(60)))
    assert not row_files.is_large(JsonlData(path=path))
    monkeypatch.setattr(row_files, "_LARGE", 1_000)
    assert row_files.is_large(JsonlData(path=path))
    assert row_files.is_large(JsonlData(path=write("c.jsonl.gz", *map(row, range(200)))))
    assert not row_files.is_large(JsonlData(path=[path, write("b.json", json.dumps([row(1)]))]))
    assert not row_files.is_large(JsonlData(path=f"{path}.none"))


def test_memory_does_not_hold_the_rows(tmp_path, write, monkeypatch):
    """Twelve megabytes of text would take several times as much as objects."""
    path = write("a.jsonl", *(row(n, response=f"{n} " * 100) for n in range(20_000)))
    size = (tmp_path / "a.jsonl").stat().st_size
    tracemalloc.start()
    try:
        rows = loaded(path, monkeypatch, tmp_path)
        assert sum(len(pair.response) for pair in rows.train) > size / 2
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < size / 2
