"""Garbage-collection thresholds of a starting process."""

from __future__ import annotations

import gc

import pytest

from mens_exp.artifacts import host


@pytest.fixture(autouse=True)
def put_back():
    before = gc.get_threshold()
    gc.set_threshold(*host._AS_USUAL)  # the tests' own are higher
    yield
    gc.set_threshold(*before)


def test_garbage_is_collected_rarely_until_tensors_take_memory():
    """Then the usual thresholds return, and imported objects are frozen."""
    before = gc.get_threshold()
    host.collect_rarely()
    assert gc.get_threshold()[0] > 10 * before[0]
    imported = [[] for _ in range(20_000)]  # an earlier test may have frozen all others
    frozen = gc.get_freeze_count()
    host.collect_as_usual()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() > frozen + 10_000
    assert len(imported) == 20_000


def test_a_process_that_is_not_ours_keeps_its_thresholds():
    """In a notebook, thresholds stay and nothing is frozen."""
    gc.set_threshold(5_000, 7, 7)
    frozen = gc.get_freeze_count()
    host.collect_as_usual()
    assert gc.get_threshold() == (5_000, 7, 7)
    assert gc.get_freeze_count() <= frozen  # frozen objects may end meanwhile
