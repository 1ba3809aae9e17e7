from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch

from mens_exp.config.schedule import (
    DecayShape,
    LrRangeConfig,
    OneCycleConfig,
    ScheduleConfig,
    ScheduleKind,
    WsdConfig,
)

COSINE, LINEAR, CONSTANT = ScheduleKind.cosine, ScheduleKind.linear, ScheduleKind.constant
PLAIN = (COSINE, LINEAR, CONSTANT)


def multiplier(kind, step, *, warmup_steps, total_steps):
    return ScheduleConfig(kind=kind, warmup_steps=warmup_steps).multiple(step, total_steps)


@pytest.mark.parametrize("kind", PLAIN)
def test_warm_up_rises_by_equal_parts_from_the_first_step_on(kind):
    """Four warm-up steps have 1/4, 1/2, 3/4 and 1 of the rate, so the first one moves."""
    found = [multiplier(kind, step, warmup_steps=4, total_steps=12) for step in range(5)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0], abs=1e-12)


def test_cosine_follows_the_hand_table():
    """By hand: eight cosine steps, after two of warm-up, in eighths of a half turn."""
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
    """By hand: five equal decrements after one warm-up step."""
    found = [multiplier(LINEAR, step, warmup_steps=1, total_steps=6) for step in range(7)]
    assert found == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.0], abs=1e-12)


def test_constant_stays_at_its_peak():
    """After warm-up the rate is constant."""
    found = [multiplier(CONSTANT, step, warmup_steps=2, total_steps=5) for step in range(8)]
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 1], abs=1e-12)


@pytest.mark.parametrize("kind", [COSINE, LINEAR])
def test_without_warm_up_the_first_step_has_the_peak(kind):
    """No step has a rate of zero."""
    assert multiplier(kind, 0, warmup_steps=0, total_steps=4) == 1.0


@pytest.mark.parametrize("kind", [COSINE, LINEAR])
def test_the_last_step_of_a_run_still_moves(kind):
    """Zero is reached one step after the last, and stays."""
    last = multiplier(kind, 59, warmup_steps=3, total_steps=60)
    assert 0 < last < 0.02
    for step in (60, 61, 600):
        assert multiplier(kind, step, warmup_steps=3, total_steps=60) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("kind", PLAIN)
def test_a_warm_up_as_long_as_the_run_never_falls(kind):
    """With three warm-up steps of three the last has the peak, without division by zero."""
    found = [multiplier(kind, step, warmup_steps=3, total_steps=3) for step in range(4)]
    assert found == pytest.approx([1 / 3, 2 / 3, 1, 1], abs=1e-12)


@pytest.mark.parametrize("kind", [COSINE, LINEAR])
def test_the_rate_never_rises_after_warm_up(kind):
    """Over sixty steps each rate is at most the one before."""
    found = [multiplier(kind, step, warmup_steps=5, total_steps=60) for step in range(5, 65)]
    assert all(later <= earlier for earlier, later in pairwise(found))


def rates(scheduler, steps):
    """Return the rates that a scheduler with a peak of 1 sets, step by step."""
    found = []
    for _ in range(steps):
        found.append(scheduler.optimizer.param_groups[0]["lr"])
        scheduler.optimizer.step()
        scheduler.step()
    return found


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize(
    ("shape", "theirs"), [(DecayShape.linear, "linear"), (DecayShape.sqrt, "1-sqrt")]
)
def test_wsd_decays_as_transformers_does(shape, theirs):
    """Forty steps, ten of decay; without warm-up, as transformers gives its first step rate 0."""
    from transformers import get_wsd_schedule

    ours = WsdConfig(warmup_steps=0, decay_frac=0.25, decay=shape)
    reference = get_wsd_schedule(optimizer(), 0, 10, num_training_steps=40, decay_type=theirs)
    found = [ours.multiple(step, 40) for step in range(40)]
    assert found == pytest.approx(rates(reference, 40), abs=1e-12)
    assert found[30] == 1.0
    assert 0 < found[39] < found[38] < found[31] < 1.0
    assert ours.multiple(40, 40) == 0.0


def test_wsd_runs_of_two_lengths_share_their_steps_up_to_the_decay():
    """A longer run can continue from the stable phase of a shorter one."""
    short, long = (
        [WsdConfig(warmup_steps=5).multiple(step, total) for step in range(80)]
        for total in (100, 200)
    )
    assert short == long
    assert short[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def one_cycle_of_torch(total, share):
    """The rates of all steps under torch's schedule, with divisors of 10 and 100."""
    reference = torch.optim.lr_scheduler.OneCycleLR(
        optimizer(),
        max_lr=1.0,
        total_steps=total,
        pct_start=share,
        div_factor=10.0,
        final_div_factor=100.0,
        cycle_momentum=False,
    )
    return [*rates(reference, total - 1), reference.get_last_lr()[0]]


@pytest.mark.parametrize("frac", [None, 0.0, 0.05, 0.25, 0.3, 0.37, 0.999])
def test_one_cycle_is_torch_s_own(frac):
    """Every step agrees in runs of many lengths, whether or not warm-up has whole steps."""
    share = 0.3 if frac is None else frac
    ours = OneCycleConfig(warmup_frac=frac, div_factor=10.0, final_div_factor=100.0)
    for total in (*range(1, 41), 99, 100, 101, 1000):
        if share * total == 1:
            continue  # torch divides by zero
        found = [ours.multiple(step, total) for step in range(total)]
        assert found == pytest.approx(one_cycle_of_torch(total, share), abs=1e-12), total
        assert ours.multiple(total, total) == pytest.approx(1 / 1000)


@pytest.mark.parametrize(("total", "warmup"), [(40, 12), (10, 3), (7, 2), (7, 0), (5, 5), (1, 0)])
def test_warmup_steps_of_one_cycle_are_torch_s_share_of_all_steps(total, warmup):
    """Every step agrees; a warm-up of W steps is torch's pct_start of W over all steps."""
    ours = OneCycleConfig(warmup_steps=warmup, div_factor=10.0, final_div_factor=100.0)
    found = [ours.multiple(step, total) for step in range(total)]
    assert found == pytest.approx(one_cycle_of_torch(total, warmup / total), abs=1e-12)


@pytest.mark.parametrize("warmup", [{"warmup_steps": 1}, {"warmup_frac": 0.25}])
def test_one_cycle_with_a_single_step_of_warmup_begins_at_the_peak(warmup):
    """Torch divides by zero there; half a cosine over the three other steps follows."""
    ours = OneCycleConfig(**warmup, div_factor=1.0, final_div_factor=1e12)
    found = [ours.multiple(step, 4) for step in range(4)]
    assert found == pytest.approx([1.0, 0.75, 0.25, 0.0], abs=1e-9)


def test_one_cycle_rises_over_three_tenths_unless_told_otherwise():
    """That is torch's pct_start; other schedules default to a twentieth."""
    found = [OneCycleConfig().multiple(step, 40) for step in range(40)]
    assert found.index(max(found)) == 11
    assert found[0] == pytest.approx(1 / 25)


@pytest.mark.parametrize("total", [2, 30])
def test_a_range_test_grows_by_one_factor(total):
    """The oracle is NumPy's geometric progression from the lowest to the highest multiple."""
    schedule = LrRangeConfig(lowest=1e-4, highest=10.0)
    found = [schedule.multiple(step, total) for step in range(total)]
    assert found == pytest.approx(np.geomspace(1e-4, 10, total))
