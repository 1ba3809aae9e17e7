"""sync.json holds the latest outcome for each destination."""

from __future__ import annotations

import pytest

from mens_exp.artifacts.manifest import Destination, SyncRecord, delivery_at, note_delivery
from mens_exp.errors import DataError

HERE, THERE = Destination("http://w", None, "lab"), Destination("http://w", "us", "lab")


def test_what_was_noted_is_read_back(tmp_path):
    """A failure is not a delivery, and keeps its reason."""
    note_delivery(tmp_path / "sync.json", HERE, why="it does not answer")
    found = delivery_at(tmp_path / "sync.json", HERE)
    assert found is not None
    assert (found["digest"], found["sent_utc"], found["why"]) == (None, None, "it does not answer")


def test_a_later_word_takes_the_place_of_an_earlier_one(tmp_path):
    """Entries of other destinations stay."""
    path = tmp_path / "sync.json"
    note_delivery(path, HERE, why="refused")
    note_delivery(path, THERE, why="refused")
    note_delivery(path, HERE, digest="d" * 64)
    first, second = SyncRecord.read(path).deliveries
    assert (first["digest"], first["why"]) == ("d" * 64, None)
    assert first["sent_utc"] is not None
    assert (second["entity"], second["why"]) == ("us", "refused")


def test_nothing_was_sent_where_nothing_is_noted(tmp_path):
    """Without a record, or with one of another destination only."""
    assert delivery_at(tmp_path / "sync.json", HERE) is None
    note_delivery(tmp_path / "sync.json", HERE, digest="d" * 64)
    assert delivery_at(tmp_path / "sync.json", THERE) is None


def test_a_damaged_record_is_refused(tmp_path):
    """A damaged record must not cause a second delivery."""
    (tmp_path / "sync.json").write_text("{", encoding="utf-8")
    with pytest.raises(DataError, match=r"sync\.json"):
        delivery_at(tmp_path / "sync.json", HERE)
