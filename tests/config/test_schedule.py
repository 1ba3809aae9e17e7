from __future__ import annotations

import pytest

from mens_exp.config.overrides import check
from mens_exp.config.schedule import ScheduleConfig, ScheduleKind, warmup_steps


def schedule(steps=None, frac=None):
    return ScheduleConfig(kind=ScheduleKind.cosine, warmup_steps=steps, warmup_frac=frac)


@pytest.mark.parametrize(
    ("frac", "total", "steps"),
    [(0.0, 60, 0), (0.05, 60, 3), (0.07, 100, 7), (0.01, 60, 1), (0.5, 5, 3), (0.1, 30, 3)],
)
def test_a_fraction_is_rounded_up_to_whole_steps(frac, total, steps):
    """Floating-point error does not add a step: 0.07 * 100 is slightly above 7."""
    assert warmup_steps(schedule(frac=frac), total) == steps


def test_steps_are_taken_as_they_are():
    """The total number of steps has no influence."""
    assert [warmup_steps(schedule(steps=n), 60) for n in (0, 7)] == [0, 7]


def test_neither_is_a_twentieth():
    """3 of 60 steps, 1 of 4, 600 of 12,000."""
    assert [warmup_steps(schedule(), total) for total in (60, 4, 12_000)] == [3, 1, 600]


def test_a_decay_that_begins_within_warm_up_is_refused():
    """12 warm-up and 12 decay steps exceed 20; 8 and 12 fit, and one step is warm-up alone."""
    wsd = ["schedule=wsd", "schedule.decay_frac=0.6", "trainer.max_steps=20"]
    (problem,) = check([*wsd, "schedule.warmup_steps=12"]).problems
    assert problem.where == "schedule.decay_frac"
    assert "12 steps after 12 of warm-up" in str(problem)
    assert check([*wsd, "schedule.warmup_steps=8"]).problems == ()
    assert check(["schedule=wsd", "trainer.max_steps=1"]).problems == ()
