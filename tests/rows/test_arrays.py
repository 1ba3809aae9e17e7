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
    """Two arrays, of which the one that comes first is not the first by name."""
    files.store_arrays(tmp_path / "kept", PIECES, lambda sha256: {"told": sha256})
    return tmp_path / "kept"


def test_pieces_come_back_as_one_array(stored):
    """Of the same type; also where there is nothing in them."""
    found = files.open_arrays(stored)
    assert found is not None
    assert {name: one.tolist() for name, one in found[0].items()} == {"b": [1, 2, 3], "a": []}
    assert [one.dtype for one in found[0].values()] == [np.int32, np.bool_]


def test_the_hash_is_that_of_the_content_in_its_order(stored):
    """Little-endian numbers one after the other, no headers."""
    meta = files.arrays_meta(stored)
    assert meta is not None
    assert meta["told"] == hashlib.sha256(bytes([1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0])).hexdigest()


def test_arrays_are_mapped_and_cannot_be_written(stored):
    """They stay on the disk until they are read, and a slip cannot change the cache."""
    found = files.open_arrays(stored)
    assert found is not None
    assert isinstance(found[0]["b"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        found[0]["b"][0] = 5


def test_arrays_that_were_let_go_are_read_again(stored):
    """The same; an array that is not mapped, or empty, is left alone."""
    found = files.open_arrays(stored)
    assert found is not None
    plain = np.array([7])
    files.release_pages(found[0]["b"], found[0]["a"], plain)
    assert (found[0]["b"].tolist(), plain.tolist()) == ([1, 2, 3], [7])


@pytest.mark.parametrize("change", ["arrays", "content_sha256", "told"])
def test_a_changed_record_is_no_record(stored, change):
    """Its own hash covers each of its fields."""
    record = json.loads((stored / "meta.json").read_text("utf-8"))
    record[change] = "other"
    (stored / "meta.json").write_text(json.dumps(record), "utf-8")
    assert files.arrays_meta(stored) is None
    assert files.open_arrays(stored) is None


def test_bytes_behind_an_array_are_damage(stored):
    """Its size is on record."""
    with (stored / "b.npy").open("ab") as file:
        file.write(b"\0\0\0\0")
    assert files.open_arrays(stored) is None


def test_arrays_are_hashed_every_time(stored, monkeypatch):
    """So that even what a disk changed by itself is found."""
    assert files.open_arrays(stored) is not None
    monkeypatch.setattr(files, "_content", lambda *_: "not this")
    assert files.open_arrays(stored) is None


def test_a_flipped_bit_is_found_although_its_time_was_set_back(stored):
    """Size and times of the file are those of before."""
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
