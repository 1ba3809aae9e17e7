from __future__ import annotations

import hashlib
import json
import os

import numpy as np
import pytest

from mens_exp.rows import files

PIECES = {"b": [np.array([1, 2], np.int32), np.array([3], np.int32)], "a": [np.array([], np.bool_)]}


@pytest.fixture
def stored(tmp_path):
    """Return two arrays whose order differs from that of their names."""
    files.store_arrays(tmp_path / "kept", PIECES, lambda sha256: {"told": sha256})
    return tmp_path / "kept"


def test_pieces_come_back_as_one_array(stored):
    """Chunks are joined into one array of the same type, even if empty."""
    found = files.open_arrays(stored)
    assert found is not None
    assert {name: one.tolist() for name, one in found[0].items()} == {"b": [1, 2, 3], "a": []}
    assert [one.dtype for one in found[0].values()] == [np.int32, np.bool_]


def test_the_hash_is_that_of_the_content_in_its_order(stored):
    """The digest is over the little-endian values of each array in order, without headers."""
    meta = files.arrays_meta(stored)
    assert meta is not None
    assert meta["told"] == hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])).hexdigest()


def test_arrays_are_mapped_and_cannot_be_written(stored):
    """Arrays are memory-mapped read-only, so the cache cannot be changed by accident."""
    found = files.open_arrays(stored)
    assert found is not None
    assert isinstance(found[0]["b"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found[0]["b"][0] = 5


def test_arrays_that_were_let_go_are_read_again(stored):
    """Released arrays are mapped again; others, and empty ones, are left alone."""
    found = files.open_arrays(stored)
    assert found is not None
    plain = np.array([7])
    files.release_pages(found[0]["b"], found[0]["a"], plain)
    assert (found[0]["b"].tolist(), plain.tolist()) == ([1, 2, 3], [7])


@pytest.mark.parametrize("change", ["arrays", "content_sha256", "told"])
def test_a_changed_record_is_no_record(stored, change):
    """The record has a digest of all its fields."""
    record = json.loads((stored / "meta.json").read_text("utf-8"))
    record[change] = "other"
    (stored / "meta.json").write_text(json.dumps(record), "utf-8")
    assert files.arrays_meta(stored) is None
    assert files.open_arrays(stored) is None


def test_bytes_behind_an_array_are_damage(stored):
    """The record has the size of each array."""
    with (stored / "b.npy").open("ab") as file:
        file.write(b"\0\0\0\0")
    assert files.open_arrays(stored) is None


def test_arrays_are_hashed_every_time(stored, monkeypatch):
    """Digests are checked at each opening, which finds even silent disk errors."""
    assert files.open_arrays(stored) is not None
    monkeypatch.setattr(files, "_content", lambda *_: "not this")
    assert files.open_arrays(stored) is None


def test_a_flipped_bit_is_found_although_its_time_was_set_back(stored):
    """Size and modification time of the file are unchanged."""
    assert files.open_arrays(stored) is not None
    path = stored / "b.npy"
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (path.stat().st_mtime_ns, path.stat().st_size) == (before.st_mtime_ns, before.st_size)
    assert files.open_arrays(stored) is None
