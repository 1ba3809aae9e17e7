from __future__ import annotations

import numpy as np
import pytest

from mens_exp.rows import packing as module
from mens_exp.rows.cache import CacheKey, encoded
from mens_exp.rows.documents import Encoded, Labelling
from mens_exp.rows.packing import cached_blocks, count_blocks, pack

LENGTHS = np.array([6, 5, 4, 3, 2])


@pytest.fixture(autouse=True)
def from_one(monkeypatch):
    """Store blocks on disk however few they are."""
    monkeypatch.setattr(module, "_CACHED_FROM", 1)


def lists(blocks):
    return [block.tolist() for block in blocks]


def test_blocks_are_packed_once(tmp_path, monkeypatch):
    """By hand: 6+4 and 5+3+2; the second call does not pack."""
    assert lists(cached_blocks(tmp_path, "d", LENGTHS, 10)) == [[0, 2], [1, 3, 4]]
    monkeypatch.setattr(module, "pack", None)
    assert lists(cached_blocks(tmp_path, "d", LENGTHS, 10)) == [[0, 2], [1, 3, 4]]


@pytest.mark.parametrize(
    ("sha256", "capacity", "method"),
    [("other", 10, "m"), ("d", 11, "m"), ("d", 10, "other")],
)
def test_documents_capacity_and_method_are_the_key(tmp_path, monkeypatch, sha256, capacity, method):
    """Another document set, capacity or method gives another entry."""
    monkeypatch.setattr(module, "PACKING_METHOD", "m")
    cached_blocks(tmp_path, "d", LENGTHS, 10)
    monkeypatch.setattr(module, "PACKING_METHOD", method)
    cached_blocks(tmp_path, sha256, LENGTHS, capacity)
    assert len(list((tmp_path / "packed").iterdir())) == 2


def test_damaged_blocks_are_packed_again(tmp_path):
    """The rebuilt entry is complete."""
    cached_blocks(tmp_path, "d", LENGTHS, 10)
    (file,) = (tmp_path / "packed").glob("*/order.npy")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + b"\x07")
    assert lists(cached_blocks(tmp_path, "d", LENGTHS, 10)) == lists(pack(LENGTHS, 10))
    assert file.read_bytes() == whole


def test_few_documents_leave_nothing_on_disk(tmp_path, monkeypatch):
    """Packing few documents is faster than opening a file."""
    monkeypatch.setattr(module, "_CACHED_FROM", 6)
    cached_blocks(tmp_path, "d", LENGTHS, 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("together", [1, 2])
def test_blocks_are_counted_without_opening_the_documents(tmp_path, monkeypatch, together):
    """Blocks are counted in memory or from a cache; without valid data the count is None."""
    monkeypatch.setattr(module, "_CACHED_FROM", 50_000)
    units = [4, 4, 6, 4, 4, 2]
    offsets = np.cumsum([0, *(units if together == 1 else np.repeat(np.array(units) // 2, 2))])
    documents = Encoded(
        ids=np.arange(offsets[-1], dtype=np.int32),
        supervised=np.ones(offsets[-1], bool),
        offsets=offsets,
        truncated=0,
        dropped=0,
        together=together,
    )
    labelling = Labelling(objective={1: "assistant", 2: "dpo"}[together], seq_len=10)
    key = CacheKey(
        **dict.fromkeys(("rows_sha256", "tokenizer_sha256", "template_sha256"), "a"),
        special_tokens_sha256="a",
        date=None,
        allow_control_text=False,
        labelling=labelling,
    )
    _, counts = encoded(tmp_path, key, lambda: documents)
    assert count_blocks(tmp_path, key, counts) == 3  # 6 + 4, 4 + 4 + 2, 4
    monkeypatch.setattr(module, "_CACHED_FROM", 1)
    assert count_blocks(tmp_path, key, counts) is None
    cached_blocks(tmp_path, counts.sha256, documents.units, 10, together=together)
    assert count_blocks(tmp_path, key, counts) == 3
    monkeypatch.setattr(module, "_CACHED_FROM", 50_000)
    file = key.directory(tmp_path) / "offsets.npy"
    whole = file.read_bytes()
    for damaged in (whole[:-8], whole[:-9] + b"\x07" + whole[-8:], b"", b"\x93NUMPY"):
        file.write_bytes(damaged)
        assert count_blocks(tmp_path, key, counts) is None
    file.unlink()
    assert count_blocks(tmp_path, key, counts) is None
