"""Paired statistics, compared with scipy and with values worked out by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from mens_exp.evals import statistics

REAL = [0.031, 0.012, 0.044, -0.008, 0.027]


def test_paired_interval_is_students_t():
    """The oracle is scipy's one-sample t test of the differences."""
    found = statistics.paired(REAL, 0.05)
    reference = stats.ttest_1samp(REAL, 0.0)
    low, high = reference.confidence_interval(0.95)
    assert found.estimate == pytest.approx(0.0212)
    assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))
    assert found.p == pytest.approx(reference.pvalue)


def test_paired_interval_by_hand():
    """By hand: 1, 2, 3 have mean 2 and sd 1; t(0.975, 2) = 4.303 from a table."""
    found = statistics.paired([1, 2, 3], 0.05)
    half = 4.303 / math.sqrt(3)
    assert found.low == pytest.approx(2 - half, rel=1e-3)
    assert found.high == pytest.approx(2 + half, rel=1e-3)
    assert found.sd == pytest.approx(1)


def test_one_seed_tells_no_interval():
    """With one seed there is an estimate, but no bounds and no p-value."""
    found = statistics.paired([0.25], 0.05)
    assert (found.estimate, found.low, found.high, found.p, found.width) == (
        0.25,
        None,
        None,
        None,
        None,
    )


def test_equal_differences_are_not_certain():
    """For five equal differences the t test would give p = 0; the sign test gives 2 / 32."""
    assert statistics.paired([0.1] * 5, 0.05).p == pytest.approx(2 / 32)


def test_no_difference_at_all_is_no_evidence():
    """Differences of zero have p = 1, not 0 / 0."""
    assert statistics.paired([0.0] * 6, 0.05).p == 1


def test_unpaired_interval_is_welchs():
    """The oracle is scipy's two-sample test with unequal variances."""
    rng = np.random.default_rng(1)
    arm, reference = rng.normal(1, 2, 6), rng.normal(0, 1, 5)
    found = statistics.unpaired(arm, reference, 0.1)
    theirs = stats.ttest_ind(arm, reference, equal_var=False)
    interval = theirs.confidence_interval(0.9)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert found.p == pytest.approx(theirs.pvalue)


def test_unpaired_of_single_values_tells_no_interval():
    """Two means of one seed each have no spread."""
    assert statistics.unpaired([1.0], [0.0], 0.05).low is None


def test_pairing_removes_what_the_seeds_share():
    """If the seeds move both arms together, the paired interval is far narrower."""
    seeds = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    arm = seeds + 0.5 + np.array([0.01, -0.01, 0.0, 0.02, -0.02])
    tight, wide = statistics.paired(arm - seeds, 0.05), statistics.unpaired(arm, seeds, 0.05)
    assert tight.width is not None
    assert wide.width is not None
    assert tight.width < wide.width / 50
    assert tight.estimate == pytest.approx(wide.estimate)


def test_sign_flip_by_hand():
    """By hand: for 1, 2, 3, two of eight sign patterns reach |sum| = 6."""
    assert statistics.sign_flip_p([1, 2, 3]) == pytest.approx(2 / 8)


def test_sign_flip_is_scipys_permutation_test():
    """The oracle is scipy's exact paired permutation test."""
    theirs = stats.permutation_test(
        (REAL,), lambda x, axis: np.mean(x, axis=axis), permutation_type="samples", vectorized=True
    )
    assert statistics.sign_flip_p(REAL) == pytest.approx(theirs.pvalue)


def test_sign_flip_counts_the_observed_signs_if_the_sum_is_rounding():
    """The sum is zero by hand, so that every pattern of signs reaches it."""
    assert statistics.sign_flip_p([-1.1, 1.5, -0.3, -0.8, 1.6, 0.2, -1, -0.1]) == 1.0


def test_sign_flip_of_many_seeds_is_sampled_near_t():
    """Beyond sixteen seeds a fixed sample of patterns is used: reproducible and near t's p."""
    values = np.random.default_rng(2).normal(0.4, 1, 24)
    found = statistics.sign_flip_p(values)
    assert found == pytest.approx(stats.ttest_1samp(values, 0).pvalue, abs=0.02)
    assert found == statistics.sign_flip_p(values)


def test_five_seeds_never_reach_five_percent_by_signs():
    """2 / 32 is over 0.05, and 2 / 64 is below it."""
    assert statistics.least_sign_flip_p(5) == 0.0625
    assert statistics.least_sign_flip_p(6) == 0.03125
    assert statistics.seeds_for_sign_flip(0.05) == 6


@pytest.mark.parametrize(("alpha", "seeds"), [(0.5, 2), (0.0625, 5), (0.025, 7), (0.01, 8)])
def test_seeds_that_signs_need(alpha, seeds):
    """The result is the smallest n with 2 / 2^n <= alpha."""
    assert statistics.seeds_for_sign_flip(alpha) == seeds
    assert statistics.least_sign_flip_p(seeds) <= alpha < statistics.least_sign_flip_p(seeds - 1)


def test_holm_by_hand():
    """0.01·3, then max(0.03, 0.02·2), then 0.04·1 raised to 0.04, in the order given."""
    assert statistics.holm([0.04, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])


def test_holm_counts_a_test_that_could_not_be_made():
    """An arm without a test must not lower the p-values of the others."""
    assert statistics.holm([0.02, None]) == [pytest.approx(0.04), None]


def test_holm_never_exceeds_one():
    """Three p-values of 0.5 adjust to 1."""
    assert statistics.holm([0.5, 0.5, 0.5]) == [1, 1, 1]


def test_power_is_that_of_the_noncentral_t():
    """G*Power's textbook case: d = 0.5, n = 34 pairs, two-sided 0.05 gives 0.808."""
    assert statistics.power_of(0.5, 1, 34, 0.05) == pytest.approx(0.8078, abs=5e-4)


def test_minimum_detectable_effect_has_its_power():
    """At that effect the power is as requested; the effect scales with the spread."""
    found = statistics.minimum_detectable(1, 5, 0.05)
    assert found is not None
    assert statistics.power_of(found, 1, 5, 0.05) == pytest.approx(0.8)
    assert statistics.minimum_detectable(3, 5, 0.05) == pytest.approx(3 * found)


def rejected(differences_KN, alpha):
    """Return how often a sign-flip test rejects, by enumeration of the definition."""
    signs_PN = np.array(list(itertools.product([1, -1], repeat=differences_KN.shape[1])))
    means_KP = np.abs(differences_KN @ signs_PN.T)
    p_K = (means_KP >= means_KP[:, :1] - 1e-9).mean(1)  # the first pattern flips nothing
    return (p_K <= alpha + 1e-12).mean()


@pytest.mark.parametrize(("seeds", "alpha"), [(6, 0.05), (7, 0.05), (7, 0.02), (9, 0.05)])
def test_the_power_of_a_sign_flip_test_is_its_own(seeds, alpha):
    """With few seeds, it finds less than the t test: 63 % at that test's 80 %, with six."""
    of_t = statistics.minimum_detectable(1.0, seeds, alpha)
    power_at = statistics.sign_flip_power
    found = statistics.minimum_detectable(1.0, seeds, alpha, power_at=power_at)
    assert found > of_t
    drawn_KN = np.random.default_rng(7).standard_normal((8000, seeds))
    assert rejected(drawn_KN + found, alpha) == pytest.approx(0.8, abs=0.015)
    assert power_at(of_t, 1.0, seeds, alpha) == pytest.approx(
        rejected(drawn_KN + of_t, alpha), abs=0.015
    )
    least = statistics.seeds_for_effect(found * 1.01, 1.0, alpha, power_at=power_at)
    assert least == seeds
    assert statistics.minimum_detectable(1.0, 5, 0.05, power_at=power_at) is None


def test_with_many_seeds_the_sign_flip_test_has_the_power_of_t():
    """To 3 % of the effect."""
    for seeds in (12, 13):
        of_t = statistics.minimum_detectable(1.0, seeds, 0.05)
        found = statistics.minimum_detectable(1.0, seeds, 0.05, power_at=statistics.sign_flip_power)
        assert found == pytest.approx(of_t, rel=0.04)


def test_minimum_detectable_effect_needs_a_spread():
    """One seed has no spread, and equal differences have a spread of 0: both give None."""
    assert statistics.minimum_detectable(None, 1, 0.05) is None
    assert statistics.minimum_detectable(0.0, 2, 0.05) is None


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_upper_bound_of_the_detectable_effect_is_found_as_often_as_it_says(seeds):
    """The bound has a true power of 80 % in 90 % of 2,000 studies, the plain estimate in half.

    The oracle is simulated: the difference that scipy's t test finds in 80 % of 40,000 studies.
    """
    rng = np.random.default_rng(seeds)
    noise = rng.normal(0, 1, (40_000, seeds))

    def power(effect):
        return (stats.ttest_1samp(noise + effect, 0.0, axis=1).pvalue < 0.05).mean()

    low, high = 0.0, 10.0
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= 0.8 else (middle, high)
    sds = rng.normal(0, 1, (2000, seeds)).std(axis=1, ddof=1)
    unit = statistics.minimum_detectable(1.0, seeds, 0.05, 0.8)
    least, most = statistics.sd_factors(seeds)
    assert np.mean(sds * unit * most >= high) == pytest.approx(0.9, abs=0.025)
    assert np.mean(sds * unit * least <= high) == pytest.approx(0.9, abs=0.025)
    assert 0.35 < np.mean(sds * unit >= high) < 0.5


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("alpha", [0.499, 0.05, 1e-6, 1e-9, 1e-9 / 50])
@pytest.mark.parametrize("power", [0.5, 0.8, 0.9999999])
def test_every_value_that_the_settings_allow_has_a_detectable_effect(alpha, power):
    """From two to 300 seeds the effect has the requested power, without a warning."""
    for seeds in (2, 3, 10, 300):
        found = statistics.minimum_detectable(1.0, seeds, alpha, power)
        assert statistics.power_of(found, 1.0, seeds, alpha) == pytest.approx(power, abs=1e-6)


def test_power_far_out_is_that_of_the_definition():
    """Two seeds at 1e-6, where scipy's noncentral t is off by 0.2: t is (Z + d) / |X| of normals.

    Shifted by the bound, t is significant where |X| is under 1: in 68.3 % of studies.
    """
    bound = float(stats.t.isf(5e-7, 1))
    found = statistics.power_of(bound / math.sqrt(2), 1.0, 2, 1e-6)
    assert found == pytest.approx(0.6827, abs=1e-3)


def test_bounds_of_the_spread_by_hand():
    """For five seeds the table gives deciles of chi-square (4 df) of 1.064 and 7.779."""
    low, high = statistics.sd_factors(5)
    assert low == pytest.approx(math.sqrt(4 / 7.779), rel=1e-3)
    assert high == pytest.approx(math.sqrt(4 / 1.064), rel=1e-3)


def test_seeds_for_an_effect_are_the_fewest():
    """An effect of 0.5 sd at 80 % needs 34 pairs; 33 have less power."""
    assert statistics.seeds_for_effect(0.5, 1, 0.05) == 34
    assert statistics.power_of(0.5, 1, 33, 0.05) < 0.8


@pytest.mark.parametrize(("effect", "sd"), [(0.0, 1.0), (1e-6, 1.0)])
def test_no_number_of_seeds_finds_nothing(effect, sd):
    """For no effect, or one too small, the result is None."""
    assert statistics.seeds_for_effect(effect, sd, 0.05) is None


def test_pooled_spread_by_hand():
    """By hand: (0, 2) and (1, 1, 4) have sums of squares 2 and 6 over 1 + 2 degrees of freedom."""
    assert statistics.pooled_sd([[0, 2], [1, 1, 4], [7]]) == pytest.approx(math.sqrt(8 / 3))


def test_pooled_spread_of_single_values_is_unknown():
    """Without repeated runs the pooled spread is unknown."""
    assert statistics.pooled_sd([[1.0], [2.0]]) is None


def test_crossed_error_is_that_of_two_way_clusters():
    """The oracle sums over pairs of cells that share a seed or an item, minus shared cells.

    This is the variance of Cameron, Gelbach and Miller, each of the three sums with its own
    degrees of freedom; no mean square is computed.
    """
    rng = np.random.default_rng(3)
    seeds, items = 6, 9
    study = rng.normal(size=(seeds, items)) + rng.normal(0, 2, (1, items)) + 0.3
    study += rng.normal(0, 1, (seeds, 1))
    by_seed, by_item = np.zeros(seeds), np.zeros(items)
    residual = 0.0
    for s in range(seeds):
        for i in range(items):
            by_seed[s] += (study[s, i] - study.mean()) / items
            by_item[i] += (study[s, i] - study.mean()) / seeds
    for s in range(seeds):
        for i in range(items):
            residual += (study[s, i] - study.mean() - by_seed[s] - by_item[i]) ** 2
    parts = [
        (by_seed @ by_seed) / (seeds * (seeds - 1)),
        (by_item @ by_item) / (items * (items - 1)),
        residual / (seeds * items * (seeds - 1) * (items - 1)),
    ]
    variance = parts[0] + parts[1] - parts[2]
    squares = (parts[0] ** 2 / 5, parts[1] ** 2 / 8, parts[2] ** 2 / 40)
    freedom = variance**2 / sum(squares)
    half = stats.t.ppf(0.975, freedom) * math.sqrt(variance)
    found = statistics.crossed(study, 0.05)
    assert found.estimate == pytest.approx(study.mean())
    assert found.high - found.estimate == pytest.approx(half)
    assert found.p == pytest.approx(
        2 * stats.t.sf(abs(study.mean()) / math.sqrt(variance), freedom)
    )


def test_items_that_agree_leave_the_interval_of_the_seeds():
    """If all items move with their seed, the interval is that of t over the seeds."""
    study = np.repeat(np.array(REAL)[:, None], 8, axis=1)
    found, seeds = statistics.crossed(study, 0.05), statistics.paired(REAL, 0.05)
    assert (found.low, found.high) == (pytest.approx(seeds.low), pytest.approx(seeds.high))
    assert found.p == pytest.approx(seeds.p)


def test_seeds_that_agree_do_not_hide_items_that_disagree():
    """Ten seeds agree on 16 items, but half of the items contradict the other half."""
    rng = np.random.default_rng(5)
    taste = np.where(np.arange(16) % 2, 1.2, -1.0)
    study = taste[None] + rng.normal(0, 0.01, (10, 16))
    assert statistics.paired(study.mean(axis=1).tolist(), 0.05).p < 1e-6
    assert statistics.crossed(study, 0.05).p > 0.5


def test_weighted_items_are_a_ratio_of_sums():
    """With documents of unequal length, the estimate is total loss over tokens."""
    weights = np.array([10.0, 30.0, 60.0])
    study = np.array([[0.1, 0.2, 0.3], [0.0, 0.4, 0.1]])
    found = statistics.crossed(study, 0.05, weights)
    assert found.estimate == pytest.approx((study @ weights / 100).mean())
    equal = statistics.crossed(study, 0.05, np.array([7.0, 7.0, 7.0]))
    assert equal == statistics.crossed(study, 0.05)


@pytest.mark.parametrize("shape", [(1, 5), (5, 1), (1, 1)])
def test_one_seed_or_one_item_is_no_sample(shape):
    """With one seed or one item there is an estimate, but no interval and no p-value."""
    found = statistics.crossed(np.ones(shape), 0.05)
    assert (found.estimate, found.low, found.high, found.p) == (1, None, None, None)


@pytest.mark.parametrize("alpha", [0.9, 0.05, 1e-12])
def test_crossed_interval_excludes_zero_exactly_where_p_is_below_alpha(alpha):
    """Interval and p-value agree at every level."""
    rng = np.random.default_rng(7)
    for shift in np.linspace(0, 3, 30):
        found = statistics.crossed(rng.normal(shift, 1, (4, 6)), alpha)
        assert (found.p < alpha) == (found.low > 0 or found.high < 0)


def test_a_study_without_any_spread_is_that_of_the_signs():
    """If all cells are equal, the interval is a point and p is that of the sign test."""
    found = statistics.crossed(np.full((5, 4), 0.2), 0.05)
    assert (found.low, found.high, found.p) == (0.2, 0.2, pytest.approx(2 / 32))
