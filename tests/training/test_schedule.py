from __future__ import annotations

import math
from itertools import pairwise

import pytest

from mens_exp.config.optim import ScheduleKind
from mens_exp.training.optimizer import multiplier

COSINE, LINEAR, CONSTANT = ScheduleKind.cosine, ScheduleKind.linear, ScheduleKind.constant


@pytest.mark.parametrize("kind", ScheduleKind)
def test_warm_up_rises_by_equal_parts_from_the_first_step_on(kind):
    """Four steps: a quarter, a half, three quarters, all of it; the first one moves."""
    found = [multiplier(kind, step, warmup_steps=4, total_steps=12) for step in range(5)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], abs=1e-12)


def test_cosine_follows_the_hand_table():
    """Eight steps after two of warm-up, in eighths of a half turn."""
    root = math.sqrt(2) / 2
    table = {
        0: 0.5,
        1: 1.0,
        2: 1.0,
        4: (1 + root) / 2,
        5: (1 + math.sqrt(2 - math.sqrt(2)) / 2) / 2,
        6: 0.5,
        8: (1 - root) / 2,
        10: 0.0,
    }
    for step, expected in table.items():
        found = multiplier(COSINE, step, warmup_steps=2, total_steps=10)
        assert found == pytest.approx(expected, abs=1e-12), step


def test_linear_follows_the_hand_table():
    """Five equal parts down after one step of warm-up."""
    found = [multiplier(LINEAR, step, warmup_steps=1, total_steps=6) for step in range(7)]
    assert found == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], abs=1e-12)


def test_constant_stays_at_its_peak():
    """After warm-up nothing moves, however long the run."""
    found = [multiplier(CONSTANT, step, warmup_steps=2, total_steps=5) for step in range(8)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1], abs=1e-12)


@pytest.mark.parametrize("kind", [COSINE, LINEAR])
def test_without_warm_up_the_first_step_has_the_peak(kind):
    """No step is wasted on a rate of zero."""
    assert multiplier(kind, 0, warmup_steps=0, total_steps=4) == 1.0


@pytest.mark.parametrize("kind", [COSINE, LINEAR])
def test_the_last_step_of_a_run_still_moves(kind):
    """Zero would be reached at the step after it, and stays zero from there."""
    last = multiplier(kind, 59, warmup_steps=3, total_steps=60)
    assert 0 < last < 0.02
    for step in (60, 61, 600):
        assert multiplier(kind, step, warmup_steps=3, total_steps=60) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", ScheduleKind)
def test_a_warm_up_as_long_as_the_run_never_falls(kind):
    """Three steps of three: the last has the peak, and nothing divides by zero."""
    found = [multiplier(kind, step, warmup_steps=3, total_steps=3) for step in range(4)]
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 1], abs=1e-12)


@pytest.mark.parametrize("kind", [COSINE, LINEAR])
def test_the_rate_never_rises_after_warm_up(kind):
    """Sixty steps, each at most the one before."""
    found = [multiplier(kind, step, warmup_steps=5, total_steps=60) for step in range(5, 65)]
    assert all(later <= earlier for earlier, later in pairwise(found))
