"""Extended runs: steps taken under an earlier total, and what depends on the total."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import pytest

from mens_exp.config.schedule import CosineConfig, OwnSchedule
from mens_exp.planning.contract import Extension, contract_of, recorded_digest
from mens_exp.planning.extension import (
    ByAttempts,
    continued,
    differences,
    extension_words,
    extensions_of,
    with_extensions,
)

RATES = ["the learning rates of earlier steps"]


def pairs(extensions):
    return [(one.step, one.total) for one in extensions]


@pytest.mark.parametrize(
    ("earlier", "before", "after", "step", "expected"),
    [
        ([], 3, 6, 3, [(3, 3)]),
        ([], 6, 6, 3, []),  # only resumed
        ([], 3, 6, 0, []),  # every step is taken again
        ([(3, 3)], 6, 6, 5, [(3, 3)]),
        ([(3, 3)], 6, 6, 2, [(2, 3)]),  # step 3 is taken again
        ([(3, 3)], 6, 6, 0, []),
        ([(3, 3)], 6, 9, 6, [(3, 3), (6, 6)]),
        ([(3, 3)], 6, 9, 3, [(3, 3)]),  # no step was taken under 6
        ([(3, 3), (6, 6)], 9, 12, 5, [(3, 3), (5, 6)]),
    ],
)
def test_extensions_are_where_the_total_of_the_steps_that_remain_changes(
    earlier, before, after, step, expected
):
    """Steps after the resumed checkpoint are repeated, under the newest total."""
    known = [Extension(step=at, total=total) for at, total in earlier]
    assert pairs(continued(known, before, after, step)) == expected


def test_each_attempt_has_the_rates_of_its_own_total():
    """Half a cosine over three steps, then the second half of one over six."""
    schedule = CosineConfig(warmup_steps=0)
    laid = ByAttempts(
        kind=schedule.kind, schedule=schedule, extensions=[Extension(step=3, total=3)]
    )
    cosines = [(0, 3), (1, 3), (2, 3), (3, 6), (4, 6), (5, 6)]
    expected = [(1 + math.cos(math.pi * step / total)) / 2 for step, total in cosines]
    assert [laid.multiple(step, 6) for step in range(6)] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overrides", "step", "expected"),
    [
        (["schedule=cosine", "schedule.warmup_steps=0"], 10, RATES),
        (["schedule=linear", "schedule.warmup_steps=0"], 5, RATES),
        (["schedule=cosine", "schedule.warmup_steps=4"], 4, []),  # only warm-up
        (["schedule=cosine", "schedule.warmup_steps=4"], 6, RATES),
        (["schedule=constant", "schedule.warmup_steps=2"], 10, []),
        (["schedule=constant", "schedule.warmup_frac=0.2"], 10, RATES),  # of 2 steps, or of 4
        (["schedule=wsd", "schedule.warmup_steps=0"], 8, []),  # 2 of 10 steps decay
        (["schedule=wsd", "schedule.warmup_steps=0"], 10, RATES),
        (["schedule=one_cycle"], 10, RATES),
        (["schedule=one_cycle", "schedule.warmup_steps=4"], 4, []),  # only warm-up
        (["schedule=one_cycle", "schedule.warmup_steps=4"], 5, RATES),
        (["optim=schedule_free", "schedule=constant", "schedule.warmup_steps=0"], 10, []),
        (["schedule=constant", "schedule.warmup_steps=0", "lora=adalora"], 5, ["ranks"]),
    ],
    ids=str,
)
def test_only_what_depends_on_the_total_differs(tiny_config, overrides, step, expected):
    """A run of ten steps that was extended to twenty."""
    config = tiny_config("trainer.max_steps=20", *overrides)
    found = differences(config, [Extension(step=step, total=10)])
    assert found == (["the allocation of ranks"] if expected == ["ranks"] else expected)
    assert differences(config, []) == []


@pytest.mark.parametrize(
    ("overrides", "step", "differs"),
    [
        ([], 10, True),
        ([], 9, False),  # it had not ended
        (["trainer.val_check_interval=4", "trainer.accumulate_grad_batches=2"], 10, False),
        (["trainer.val_check_interval=8", "trainer.accumulate_grad_batches=2"], 10, True),
    ],
)
def test_the_validation_at_the_end_of_the_shorter_run_may_select_an_adapter(
    tiny_config, overrides, step, differs
):
    """20 micro-batches are a multiple of 4 but not of 8; without an interval, only ends count."""
    usual = ("trainer.max_steps=20", "schedule=constant", "schedule.warmup_steps=0")
    found = [Extension(step=step, total=10)]
    config = tiny_config(*usual, "adapter.select=best", *overrides)
    assert differences(config, found) == (["validations"] if differs else [])
    assert differences(tiny_config(*usual, *overrides), found) == []


def test_a_class_of_the_users_counts_if_it_is_given_the_number_of_steps(tiny_config):
    """OneCycleLR has an argument total_steps, StepLR does not."""
    usual = tiny_config("trainer.max_steps=20", "schedule=constant", "schedule.warmup_steps=0")
    found = [Extension(step=5, total=10)]
    for name, expected in (("StepLR", []), ("OneCycleLR", ["the schedule's total_steps"])):
        target = f"torch.optim.lr_scheduler.{name}"
        config = dataclasses.replace(usual, schedule=OwnSchedule(_target_=target))
        assert differences(config, found) == expected
    own = dataclasses.replace(usual, module=dataclasses.replace(usual.module, _target_="own.Mine"))
    assert differences(own, found) == ["the module's total_steps"]


def test_the_digest_covers_extensions(tiny_config):
    """Without an extension, the digest is that of a release which did not know them."""
    config = tiny_config("trainer.max_steps=6")
    usual = contract_of(config).record()
    older = {**usual, "exec": {k: v for k, v in usual["exec"].items() if k != "extensions"}}
    assert recorded_digest(older) == usual["digest"]
    found = [Extension(step=3, total=3)]
    extended = contract_of(config, found).record()
    assert extended["digest"] != usual["digest"]
    assert recorded_digest(with_extensions(older, found)) == extended["digest"]


def test_an_older_record_has_them_in_its_notes():
    """If the schedule was restarted from the first step, no step belongs to the other total."""
    laid = "the cosine schedule is laid over 6 steps from here on, so the rate of step"
    of_old = {"exec": {"max_steps": 6}}
    for step, expected in ((4, [(3, 3)]), (1, [])):
        note = f"trainer.max_steps went from 3 to 6: {laid} {step} is 0.0005 instead of 0"
        run = SimpleNamespace(contract=of_old, notes=["another", note])
        assert pairs(extensions_of(run)) == expected
        run.contract = {"exec": {"max_steps": 6, "extensions": None}}
        assert extensions_of(run) == ()


def test_words_name_both_totals():
    """The second extension starts from the first one's total."""
    found = [{"step": 3, "total": 3}, {"step": 5, "total": 6}]
    assert extension_words({"exec": {"max_steps": 9, "extensions": found}}) == [
        "extended from 3 to 6 steps after step 3",
        "extended from 6 to 9 steps after step 5",
    ]
