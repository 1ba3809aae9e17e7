from __future__ import annotations

import numpy as np
import pytest

from mens_exp.data import batch as module
from mens_exp.data.batch import cached_blocks, pack

LENGTHS = np.array([6, 5, 4, 3, 2])


@pytest.fixture(autouse=True)
def from_one(monkeypatch):
    """Keep blocks on disk however few they are."""
    monkeypatch.setattr(module, "_CACHED_FROM", 1)


def lists(blocks):
    return [block.tolist() for block in blocks]


def test_blocks_are_packed_once(tmp_path, monkeypatch):
    """6+4 and 5+3+2, by hand; the second time without packing."""
    assert lists(cached_blocks(tmp_path, "d", LENGTHS, 10)) == [[0, 2], [1, 3, 4]]
    monkeypatch.setattr(module, "pack", None)
    assert lists(cached_blocks(tmp_path, "d", LENGTHS, 10)) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize(
    ("sha256", "capacity", "method"),
    [("other", 10, "m"), ("d", 11, "m"), ("d", 10, "other")],
)
def test_documents_capacity_and_method_are_the_key(tmp_path, monkeypatch, sha256, capacity, method):
    """What was packed of something else is not opened."""
    monkeypatch.setattr(module, "PACKING_METHOD", "m")
    cached_blocks(tmp_path, "d", LENGTHS, 10)
    monkeypatch.setattr(module, "PACKING_METHOD", method)
    cached_blocks(tmp_path, sha256, LENGTHS, capacity)
    assert len(list((tmp_path / "packed").iterdir())) == 2


def test_damaged_blocks_are_packed_again(tmp_path):
    """And are whole afterwards."""
    cached_blocks(tmp_path, "d", LENGTHS, 10)
    (file,) = (tmp_path / "packed").glob("*/order.npy")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\x07")
    assert lists(cached_blocks(tmp_path, "d", LENGTHS, 10)) == lists(pack(LENGTHS, 10))
    assert file.read_bytes() == whole


def test_few_documents_leave_nothing_on_disk(tmp_path, monkeypatch):
    """Packing them is faster than opening a file."""
    monkeypatch.setattr(module, "_CACHED_FROM", 6)
    cached_blocks(tmp_path, "d", LENGTHS, 10)
    assert list(tmp_path.iterdir()) == []
