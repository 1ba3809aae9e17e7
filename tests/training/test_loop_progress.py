"""Progress counts of a checkpoint, converted to another number of processes."""

from __future__ import annotations

import pytest

from mens_exp.training.module import for_processes


def saved(batches, **more):
    counts = dict.fromkeys(("ready", "started", "processed", "completed"), batches)
    progress = {"current": dict(counts), "total": dict(counts), "is_last_batch": False}
    return {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}, **more}


@pytest.mark.parametrize(("before", "after", "expected"), [(2, 1, 24), (1, 3, 4), (4, 2, 24)])
def test_all_processes_together_have_taken_the_same(before, after, expected):
    """In total the processes have taken twelve micro-batches of each of ``before``."""
    checkpoint = saved(12, world_size=before)
    for_processes(checkpoint, after)
    assert checkpoint["loops"] == saved(expected)["loops"]


@pytest.mark.parametrize(("before", "after", "expected"), [(2, 1, 24), (1, 3, 4), (4, 2, 24)])
def test_a_micro_batch_that_is_being_ended_is_one_for_any_number(before, after, expected):
    """A micro-batch that is not yet completed stays one, and Lightning completes it."""
    checkpoint = saved(12, world_size=before)
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        counts["completed"] = 11
    for_processes(checkpoint, after)
    for counts in (progress["current"], progress["total"]):
        assert counts.pop("completed") == expected - 1
        assert set(counts.values()) == {expected}


def test_a_checkpoint_that_says_nothing_is_of_one_process():
    """It continues unchanged with one process; with two, each has taken half."""
    checkpoint = saved(12)
    for_processes(checkpoint, 1)
    assert checkpoint == saved(12)
    for_processes(checkpoint, 2)
    assert checkpoint == saved(6)
