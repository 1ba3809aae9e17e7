"""Verdicts on the scores of two arms; every expected value is worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from mens_exp.artifacts.comparison import Verdict
from mens_exp.evals.kpis import Direction, Kpi, KpiGroup
from mens_exp.evals.observations import Observation, Score, scores
from mens_exp.evals.verdicts import Rule, compared, judge, noise_of

QUIET = {"seed": None, "rerun": None}


def rule(**changes):
    usual = {"alpha": 0.05, "test": "t", "target": "these_items", "power": 0.8, "arms": 1}
    return Rule(**{"primary": "task_success", **usual, **changes})


def arm(name, by_seed):
    """Return the scores of one run per seed: a number, or the values of the items."""
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
    """A loss that falls in every seed is better; a success rate that falls is worse."""
    falling = {1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3}
    before = {1: 2.0, 2: 2.0, 3: 2.3, 4: 2.3}
    assert verdict("val_loss", falling, before)["verdict"] == Verdict.BETTER
    assert verdict("task_success", falling, before)["verdict"] == Verdict.WORSE


def test_a_count_that_is_neither_good_nor_bad_gets_no_verdict():
    """A higher token count in every seed is neither better nor worse."""
    found = verdict("tokens", {1: 9.0, 2: 9.1, 3: 9.2}, {1: 1.0, 2: 1.0, 3: 1.1})
    assert (found["verdict"], found["why"][-24:]) == (
        Verdict.UNKNOWN,
        " but neither way is better"[-24:],
    )


def test_runs_that_declare_a_metric_otherwise_get_no_verdict():
    """If both arms declare the same direction it is used; otherwise there is no verdict."""
    for of_arm, verdict_then in ((Direction.MIN, Verdict.BETTER), (Direction.MAX, Verdict.UNKNOWN)):
        sides = []
        for direction, values in ((of_arm, (1.0, 1.1, 1.2)), (Direction.MIN, (2.0, 2.0, 2.3))):
            kpi = Kpi(name="probe/x", group=KpiGroup.OTHER, direction=direction)
            made = [[{"probe/x": Score(mean=value, declared=kpi)}] for value in values]
            sides.append(dict(enumerate(made)))
        record = compared("probe/x", *sides, QUIET, rule(primary="probe/x"))
        judge([record], rule(primary="probe/x"))
        assert record["verdict"] == verdict_then


def test_items_without_a_value_are_left_out_in_pairs():
    """Repair depth exists only for valid answers; only `b` has one in both arms, 3 against 1."""
    found = verdict("repair_depth", {1: {"a": 9, "b": 3}}, {1: {"b": 1, "c": 5}})
    assert (found["estimate"], found["items"]) == (2, 1)
    assert (found["arm_mean"], found["reference_mean"]) == (3, 1)


def test_arms_that_share_no_item_have_no_difference():
    """The record gives the reason."""
    found = verdict("repair_depth", {1: {"a": 9}}, {1: {"c": 5}})
    assert (found["verdict"], found["why"]) == (
        Verdict.UNKNOWN,
        "no item has a value in both arms",
    )


def test_arms_that_share_no_seed_have_no_difference():
    """Values of different seeds are never compared."""
    found = verdict("val_loss", {1: 1.0}, {2: 1.0})
    assert (found["estimate"], found["why"]) == (None, "the arms share no seed")


def test_a_share_counts_items_without_a_value_as_failed():
    """The denominator is all items of the suite: 1 of 4, not of the 1 or 2 with a value."""
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
    """The value is null with a reason."""
    one = Observation(arm="x", seed=1, run="r", item="a", values={"task_success": None})
    found = scores([one], items=1)["task_success"]
    assert (found.mean, found.why) == (None, "no item has a value")


def test_several_answers_to_an_item_are_their_mean():
    """Two of three samples pass, so the item counts 2/3."""
    told = [
        Observation(arm="x", seed=1, run="r", item="a", values={"pass_at_1": value})
        for value in (1.0, 1.0, 0.0)
    ]
    assert scores(told, items=1)["pass_at_1"].mean == pytest.approx(2 / 3)


def study_of(means, seeds, rng, **how):
    """Draw arms around the means and a reference around 0; return their judged records."""
    drawn = [dict(enumerate(rng.normal(mean, 1, seeds).tolist())) for mean in (0.0, *means)]
    reference, *arms = (arm("task_success", one) for one in drawn)
    shared = rule(arms=len(means), **how)
    records = [compared("task_success", one, reference, QUIET, shared) for one in arms]
    judge(records, shared)
    return records


def test_intervals_of_several_arms_hold_at_once():
    """Intervals equal scipy's at 1 - 0.05 / 3; simulated, three clear differences get 95 %.

    Intervals at the level of each arm's step of Holm, which is why they are not shown, do not.
    """
    rng = np.random.default_rng(1)
    for record in study_of((1.0, 0.0, -2.0), 5, rng):
        theirs = stats.ttest_1samp(record["differences"], 0.0).confidence_interval(1 - 0.05 / 3)
        assert (record["low"], record["high"]) == pytest.approx((theirs.low, theirs.high))
        assert record["level"] == pytest.approx(1 - 0.05 / 3)
    noise = rng.normal(0, 1, (20_000, 4, 5))
    means = np.array([[40.0], [80.0], [120.0]])
    test = stats.ttest_1samp(noise[:, 1:] + means - noise[:, :1], 0.0, axis=2)
    ranks = np.argsort(np.argsort(test.pvalue, axis=1), axis=1)

    def covered(levels):
        bounds = np.stack([test.confidence_interval(level) for level in levels])
        low, high = (np.choose(ranks, bounds[:, end]) for end in (0, 1))
        return ((low <= means[:, 0]) & (means[:, 0] <= high)).all(axis=1).mean()

    assert covered([1 - 0.05 / 3] * 3) >= 0.95
    assert covered([1 - 0.05 / 3, 1 - 0.05 / 2, 1 - 0.05]) < 0.94


@pytest.mark.parametrize("how", [{}, {"sequential": "always_valid"}, {"test": "sign_flip"}])
def test_no_verdict_stands_next_to_an_interval_that_says_otherwise_unexplained(how):
    """Near the boundary Holm and the intervals may disagree; `why` then explains it."""
    rng, parted = np.random.default_rng(2), 0
    for _ in range(30):
        for record in study_of((1.5, 2.0, -2.5), 8, rng, **how):
            if record["low"] is None:
                continue
            has_zero = record["low"] <= 0 <= record["high"]
            is_found = record["verdict"] in {Verdict.BETTER, Verdict.WORSE}
            if has_zero == is_found:
                parted += 1
                assert "; the interval " in record["why"]
                if how.get("test") != "sign_flip":
                    assert is_found  # never "no difference" if the interval excludes 0
            elif record["verdict"] != Verdict.NOT_REACHABLE:
                assert "; the interval " not in record["why"]
    assert parted > 0


def test_one_arm_has_no_interval_that_says_otherwise():
    """With one arm, Holm's test and the interval always agree."""
    rng = np.random.default_rng(3)
    for how in ({}, {"sequential": "always_valid"}):
        for _ in range(40):
            (record,) = study_of((1.8,), 6, rng, **how)
            is_found = record["verdict"] in {Verdict.BETTER, Verdict.WORSE}
            assert is_found == (not record["low"] <= 0 <= record["high"])
            assert "; the interval " not in record["why"]


def test_what_seeds_find_is_a_range():
    """By hand: 1, 2, 3 have sd 1, and three seeds find 3.26 of it; deciles of chi-square, 2 df."""
    found = verdict("task_success", {1: 1.0, 2: 2.0, 3: 3.0}, {1: 0.0, 2: 0.0, 3: 0.0})
    assert found["mde"] == pytest.approx(3.26, abs=0.01)
    low, high = math.sqrt(2 / 4.605), math.sqrt(2 / 0.2107)
    assert found["mde_low"] == pytest.approx(low * found["mde"], rel=1e-3)
    assert found["mde_high"] == pytest.approx(high * found["mde"], rel=1e-3)
    assert "3 seeds find a true difference of 2.2 to 10 in 80% of studies" in found["why"]
    assert found["seeds_needed_low"] < found["seeds_needed"] < found["seeds_needed_high"]


@pytest.mark.parametrize("how", [{}, {"sequential": "always_valid"}, {"test": "sign_flip"}])
@pytest.mark.parametrize("exact", [0, 1])
def test_arms_with_the_same_score_have_no_difference(how, exact):
    """7 of 12 answers pass in each, but the means of the items' means differ in the last bit."""
    one = {f"i{at}": passed / 3 for at, passed in enumerate((0, 3, 3, 1))}
    other = {f"i{at}": passed / 3 for at, passed in enumerate((0, 1, 3, 3))}
    assert of_items(one).mean != of_items(other).mean
    scored = dict.fromkeys(range(12), one)
    against = {seed: one if seed < exact else other for seed in scored}
    for pair in ((scored, against), (against, scored)):
        found = verdict("task_success", *pair, **how)
        assert (found["estimate"], found["p"]) == (0.0, 1.0)
        assert set(found["differences"]) == {0.0}
        assert found["verdict"] not in {Verdict.BETTER, Verdict.WORSE}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [1e-9, 0.05, 0.499999])
@pytest.mark.parametrize("power", [0.5, 0.9999999999])
@pytest.mark.parametrize("how", [{}, {"sequential": "always_valid"}, {"test": "sign_flip"}])
def test_every_value_of_the_settings_gives_a_verdict(alpha, power, how):
    """All settings give a verdict for one to six seeds, equal and zero differences, nine arms."""
    draws = [0.3, -0.1, 0.4, 0.2, 0.25, 1e6]
    for seeds in (1, 2, 3, 6):
        for values in (draws[:seeds], [0.25] * seeds, [0.0] * seeds):
            one = dict(enumerate(values))
            told = {"alpha": alpha, "power": power, "arms": 9, **how}
            found = verdict("task_success", one, dict.fromkeys(one, 0.0), **told)
            assert found["verdict"] in Verdict
            numbers = [value for value in found.values() if isinstance(value, float)]
            assert all(map(math.isfinite, numbers))


def test_few_seeds_get_no_always_valid_verdict():
    """Three seeds reach 1/13 at best; a fourth can bring p under 0.05."""
    wide = {1: 1.0, 2: 1.01, 3: 1.02}
    found = verdict("task_success", wide, dict.fromkeys(wide, 0.0), sequential="always_valid")
    assert (found["verdict"], found["seeds_needed"]) == (Verdict.NOT_REACHABLE, 4)
    assert found["low"] is None
    assert found["mde"] is None
    assert "at least 0.07692, never under 0.05; 4 are needed" in found["why"]
    wide[4] = 1.03
    found = verdict("task_success", wide, dict.fromkeys(wide, 0.0), sequential="always_valid")
    assert found["verdict"] == Verdict.BETTER
    assert "at any number of looks" in found["why"]


def test_holm_shares_the_error_rate_over_arms():
    """A single p-value of 0.03 gives a verdict; one among three arms does not."""
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
    """Means of reruns 1, 3 and 10, 14 have variances 2 and 8; reruns differ by ±0 and ±1."""
    first = {1: [score(1.0), score(1.0)], 2: [score(2.0), score(4.0)]}
    second = {1: [score(10.0)], 2: [score(14.0)]}
    found = noise_of("val_loss", [first, second])
    assert found["seed"] == pytest.approx(((2 + 8) / 2) ** 0.5)
    assert found["rerun"] == pytest.approx(((0 + 2) / 2) ** 0.5)


def score(value):
    return {"val_loss": Score(mean=value)}


def test_an_effect_is_told_in_multiples_of_seed_noise():
    """A difference of 3 over a seed noise of 1.5 is reported as 2."""
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
    """Six seeds agree that three of four items gain, but the fourth loses as much."""
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
        (
            {1: {"a": 1.0}, 2: {"a": 0.9}},
            {1: {"a": 0.0}, 2: {"a": 0.0}},
            "one item is not a sample",
        ),
        (
            {1: {"a": 1.0, "b": 0.0}, 2: {"a": 0.9, "b": 0.1}},
            {1: {"a": 0.0, "b": 0.0}, 2: {"a": 0.0, "c": 0.0}},
            "not every run has every item",
        ),
    ],
)
def test_what_is_no_sample_of_items_gets_no_verdict_about_others(one, other, why):
    """The estimate is kept, without an interval and with the reason."""
    found = verdict("richness", one, other, **LIKE)
    assert (found["verdict"], found["low"], found["p"]) == (Verdict.UNKNOWN, None, None)
    assert why in found["why"]
    assert found["estimate"] is not None


def test_a_value_that_is_not_the_mean_of_its_items_gets_no_verdict():
    """A run's loss must equal the weighted mean of its documents."""
    losses = {"x": 1.0, "y": 3.0}
    weights = {"x": 10.0, "y": 30.0}

    def side(shift):
        score = Score(mean=2.5 + shift, items=losses, weights=weights)
        return {seed: [{"val_loss": score}] for seed in (1, 2, 3)}

    about = rule(primary="val_loss", **LIKE)
    found = compared("val_loss", side(0.5), side(0.0), QUIET, about)
    assert "not the mean of its items" in found["why"]
    assert compared("val_loss", side(0.0), side(0.0), QUIET, about)["why"] == ""
