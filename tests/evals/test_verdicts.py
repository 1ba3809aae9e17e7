"""Scores of two arms to a record with a verdict; every expected value by hand."""

from __future__ import annotations

import pytest

from mens_exp.artifacts.comparison import Verdict
from mens_exp.evals.observations import Observation, Score, scores
from mens_exp.evals.verdicts import Rule, compared, judge, noise_of

QUIET = {"seed": None, "rerun": None}


def rule(**changes):
    usual = {"alpha": 0.05, "test": "t", "target": "these_items", "power": 0.8, "arms": 1}
    return Rule(**{"primary": "task_success", **usual, **changes})


def arm(name, by_seed):
    """Scores of one run a seed: a number, or the values of items."""
    return {
        seed: [{name: Score(mean=value) if isinstance(value, float) else of_items(value)}]
        for seed, value in by_seed.items()
    }


def of_items(values):
    return Score(mean=sum(values.values()) / len(values), items=dict(values))


def verdict(name, one, other, **how):
    record = compared(name, arm(name, one), arm(name, other), QUIET, rule(primary=name, **how))
    judge([record], rule(primary=name, **how))
    return record


def test_lower_is_better_where_the_table_says_so():
    """A loss that falls in every seed is better, a success that falls is worse."""
    falling = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}
    before = {1: 2.0, 2: 2.0, 3: 2.3, 4: 2.3}
    assert verdict("val_loss", falling, before)["verdict"] == Verdict.BETTER
    assert verdict("task_success", falling, before)["verdict"] == Verdict.WORSE


def test_a_count_that_is_neither_good_nor_bad_gets_no_verdict():
    """More tokens, in every seed."""
    found = verdict("tokens", {1: 9.0, 2: 9.1, 3: 9.2}, {1: 1.0, 2: 1.0, 3: 1.1})
    assert (found["verdict"], found["why"][-24:]) == (
        Verdict.UNKNOWN,
        " but neither way is better"[-24:],
    )


def test_items_without_a_value_are_left_out_in_pairs():
    """Repair depth is of answers that became valid: only `b` did in both arms, 3 against 1."""
    found = verdict("repair_depth", {1: {"a": 9, "b": 3}}, {1: {"b": 1, "c": 5}})
    assert (found["estimate"], found["items"]) == (2, 1)
    assert (found["arm_mean"], found["reference_mean"]) == (3, 1)


def test_arms_that_share_no_item_have_no_difference():
    """And the reason."""
    found = verdict("repair_depth", {1: {"a": 9}}, {1: {"c": 5}})
    assert (found["verdict"], found["why"]) == (
        Verdict.UNKNOWN,
        "no item has a value in both arms",
    )


def test_arms_that_share_no_seed_have_no_difference():
    """Nothing is compared across seeds."""
    found = verdict("val_loss", {1: 1.0}, {2: 1.0})
    assert (found["estimate"], found["why"]) == (None, "the arms share no seed")


def test_a_share_counts_items_without_a_value_as_failed():
    """The denominator is all items of the suite: 1 of 4, not of the 1 or 2 that answered."""
    told = [("a", True), ("b", None)]
    found = scores(
        [
            Observation(arm="x", seed=1, run="r", item=item, values={"task_success": value})
            for item, value in told
        ],
        items=4,
    )
    assert found["task_success"].mean == 0.25


def test_a_kpi_that_no_item_has_is_unknown_not_zero():
    """Null with the reason."""
    one = Observation(arm="x", seed=1, run="r", item="a", values={"task_success": None})
    found = scores([one], items=1)["task_success"]
    assert (found.mean, found.why) == (None, "no item has a value")


def test_several_answers_to_an_item_are_their_mean():
    """Three samples, of which two pass, are one item of 2/3."""
    told = [
        Observation(arm="x", seed=1, run="r", item="a", values={"pass_at_1": value})
        for value in (1.0, 1.0, 0.0)
    ]
    assert scores(told, items=1)["pass_at_1"].mean == pytest.approx(2 / 3)


def test_holm_shares_the_error_rate_over_arms():
    """One p-value of 0.03 is a verdict by itself, and none among three arms."""
    one = {1: 0.0, 2: 0.0, 3: 0.0, 4: 0.0}
    other = {1: 1.0, 2: 2.0, 3: 4.0, 4: 1.6}
    alone = verdict("task_success", other, one)
    assert 0.017 < alone["p"] < 0.05
    assert alone["verdict"] == Verdict.BETTER
    shared = rule(arms=3)
    records = [
        compared("task_success", arm("task_success", side), arm("task_success", one), QUIET, shared)
        for side in (other, one, one)
    ]
    judge(records, shared)
    assert records[0]["p_holm"] == pytest.approx(3 * alone["p"])
    assert [record["verdict"] for record in records] == [Verdict.NO_DIFFERENCE] * 3
    assert records[0]["seeds_needed"] is not None
    assert records[0]["seeds_needed"] > 4


def test_noise_is_told_apart_by_hand():
    """Seeds at 1 and 3 and 10 and 14 (means of reruns): variances 2 and 8; reruns ±0 and ±1."""
    first = {1: [score(1.0), score(1.0)], 2: [score(2.0), score(4.0)]}
    second = {1: [score(10.0)], 2: [score(14.0)]}
    found = noise_of("val_loss", [first, second])
    assert found["seed"] == pytest.approx(((2 + 8) / 2) ** 0.5)
    assert found["rerun"] == pytest.approx(((0 + 2) / 2) ** 0.5)


def score(value):
    return {"val_loss": Score(mean=value)}


def test_an_effect_is_told_in_multiples_of_seed_noise():
    """A difference of 3 over a noise of 1.5."""
    record = compared(
        "val_loss",
        arm("val_loss", {1: 5.0, 2: 6.0}),
        arm("val_loss", {1: 2.0, 2: 3.0}),
        {"seed": 1.5, "rerun": None},
        rule(),
    )
    assert (record["in_seed_noise"], record["verdict"]) == (2, Verdict.SECONDARY)


LIKE = {"target": "items_like_these"}
DISAGREE = {seed: {"a": 0.9 + seed / 100, "b": 0.9, "c": 0.9, "d": -0.8} for seed in range(1, 7)}
NOTHING = {seed: dict.fromkeys("abcd", 0.0) for seed in range(1, 7)}


def test_items_that_disagree_decide_about_these_items_only():
    """Six seeds agree that three of four items gain; the fourth loses as much."""
    assert verdict("richness", DISAGREE, NOTHING)["verdict"] == Verdict.BETTER
    found = verdict("richness", DISAGREE, NOTHING, **LIKE)
    assert found["verdict"] == Verdict.NO_DIFFERENCE
    assert found["low"] < 0 < found["high"]
    assert found["estimate"] == verdict("richness", DISAGREE, NOTHING)["estimate"]


def test_items_that_agree_decide_about_items_like_these_too():
    """All four items gain about as much under every seed."""
    one = {s: {i: 0.5 + s / 100 + k / 50 for k, i in enumerate("abcd")} for s in range(1, 7)}
    assert verdict("richness", one, NOTHING, **LIKE)["verdict"] == Verdict.BETTER


@pytest.mark.parametrize(
    ("one", "other", "why"),
    [
        ({1: 2.0, 2: 2.1}, {1: 1.0, 2: 1.0}, "it has no items"),
        ({1: {"a": 1.0}, 2: {"a": 0.9}}, {1: {"a": 0.0}, 2: {"a": 0.0}}, "one item is no sample"),
        (
            {1: {"a": 1.0, "b": 0.0}, 2: {"a": 0.9, "b": 0.1}},
            {1: {"a": 0.0, "b": 0.0}, 2: {"a": 0.0, "c": 0.0}},
            "not every run has every item",
        ),
    ],
)
def test_what_is_no_sample_of_items_gets_no_verdict_about_others(one, other, why):
    """The difference stands, without an interval and with the reason."""
    found = verdict("richness", one, other, **LIKE)
    assert (found["verdict"], found["low"], found["p"]) == (Verdict.UNKNOWN, None, None)
    assert why in found["why"]
    assert found["estimate"] is not None


def test_a_value_that_is_not_the_mean_of_its_items_gets_no_verdict():
    """Somebody typed the run's loss; its documents say otherwise."""
    losses = {"x": 1.0, "y": 3.0}
    weights = {"x": 10.0, "y": 30.0}

    def side(shift):
        score = Score(mean=2.5 + shift, items=losses, weights=weights)
        return {seed: [{"val_loss": score}] for seed in (1, 2, 3)}

    about = rule(primary="val_loss", **LIKE)
    found = compared("val_loss", side(0.5), side(0.0), QUIET, about)
    assert "not the mean of its items" in found["why"]
    assert compared("val_loss", side(0.0), side(0.0), QUIET, about)["why"] == ""
