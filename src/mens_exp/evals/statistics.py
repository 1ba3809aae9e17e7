"""Paired statistics on seed means: intervals, tests, and power.

The unit is the seed. A seed's difference is the mean over all items of one arm minus that of the
other; Student's t on these differences holds its level at five seeds, where a two-level percentile
bootstrap does not (benchmarks/calibration.py). These inferences hold only for these items.
`crossed` generalises to similar items, by treating the items as a sample too (benchmarks/items.py).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Critical = Callable[[int, float], float]
    """Maps the number of seeds and the two-sided error rate to the critical |t|."""
    Power = Callable[[float, float, int, float], float]
    """Maps effect, standard deviation, number of seeds and error rate to a test's power."""

_EXACT_SEEDS = 16  # 65,536 sign patterns; for more seeds, a fixed sample of as many
_MOST_SEEDS = 100_000
_FAR = 1e4  # for larger |t|, scipy's noncentral t loses precision (at two seeds from 6e5)
_SD_LEVEL = 0.8  # each bound individually holds in 90 % of studies, as in Browne (1995)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A mean difference with its interval.

    Attributes:
        estimate: the mean difference.
        low: lower bound of the two-sided interval; None with fewer than two seeds.
        high: upper bound; None likewise.
        p: two-sided p-value of the null hypothesis of no difference; None likewise.
        sd: standard deviation of the differences, with divisor n - 1; None likewise.
        n: number of differences.
    """

    estimate: float
    low: float | None
    high: float | None
    p: float | None
    sd: float | None
    n: int

    @property
    def width(self) -> float | None:
        """The width of the interval."""
        return None if self.low is None or self.high is None else self.high - self.low


def paired(differences: Sequence[float], alpha: float) -> Interval:
    """Return Student's t interval of the mean of paired differences.

    If all differences are equal, their spread is unknown: the interval is a point, and the p-value
    is that of the sign-flip test, since t would be infinite.

    Args:
        differences: one per seed, at least one.
        alpha: two-sided error rate; the interval covers 1 - alpha.
    """
    from scipy import special

    values = np.asarray(differences, float)
    n, mean = len(values), float(values.mean())
    if n == 1:
        return Interval(estimate=mean, low=None, high=None, p=None, sd=None, n=1)
    sd = _sd(values)
    if sd == 0:
        p = sign_flip_p(differences)
        return Interval(estimate=mean, low=mean, high=mean, p=p, sd=0.0, n=n)
    error = sd / math.sqrt(n)
    half = student(n, alpha) * error
    p = float(2 * special.stdtr(n - 1, -abs(mean) / error))
    return Interval(estimate=mean, low=mean - half, high=mean + half, p=p, sd=sd, n=n)


def crossed(
    differences_SI: np.ndarray, alpha: float, weights_I: np.ndarray | None = None
) -> Interval:
    """Return an interval of the mean difference over seeds and items like these ones.

    Seeds and items are crossed random factors. The variance of the mean is estimated by moments as
    (MS_seeds + MS_items - MS_residual) / (S * I), but not below MS_seeds or MS_items over S * I,
    with Satterthwaite's degrees of freedom. With three seeds that estimate is too noisy to hold its
    level, so the interval is never narrower than that of `paired` over the seeds, nor the p-value
    smaller (measured: benchmarks/items.py).

    Sources: F. Satterthwaite, "An approximate distribution of estimates of variance components"
    (1946); A. C. Cameron, J. Gelbach and D. Miller, "Robust inference with multiway clustering"
    (2011).

    Args:
        differences_SI: differences of S seeds on the same I items, at least one of each.
        alpha: two-sided error rate; the interval covers 1 - alpha.
        weights_I: weights of the items in a mean, such as tokens of a document; None: equal ones.

    Returns:
        The interval; its ``sd`` and ``n`` are those of the seeds. With one seed or one item, there
        is only an estimate.
    """
    from scipy import special

    values_SI = np.asarray(differences_SI, float)
    if weights_I is not None:
        values_SI = linearized(values_SI, np.asarray(weights_I, float))
    seeds = paired(values_SI.mean(axis=1).tolist(), alpha)
    if min(values_SI.shape) == 1:
        return replace(seeds, low=None, high=None, p=None)
    error, freedom = _crossed_error(values_SI)
    if error == 0:
        return seeds
    assert seeds.width is not None, "there are two seeds or more"
    assert seeds.p is not None, "there are two seeds or more"
    half = max(seeds.width / 2, -float(special.stdtrit(freedom, alpha / 2)) * error)
    p = max(seeds.p, float(2 * special.stdtr(freedom, -abs(seeds.estimate) / error)))
    return replace(seeds, low=seeds.estimate - half, high=seeds.estimate + half, p=p)


def linearized(values: np.ndarray, weights_I: np.ndarray) -> np.ndarray:
    """Return values whose plain mean and its standard error are those of the weighted mean.

    A weighted mean over a sample of items is a ratio of two sums, and so varies less than the
    weighted values do.

    Args:
        values: values of items, in the last dimension.
        weights_I: weights of the items, above 0.
    """
    weights = weights_I / weights_I.mean()
    estimate = (values * weights).mean()
    return np.asarray((values - estimate) * weights + estimate)


def _crossed_error(values_SI: np.ndarray) -> tuple[float, float]:
    """Return the standard error of the mean over seeds and items, and its degrees of freedom."""
    seeds, items = values_SI.shape
    mean, by_seed, by_item = values_SI.mean(), values_SI.mean(axis=1), values_SI.mean(axis=0)
    rest = values_SI - by_seed[:, None] - by_item[None] + mean
    of_seeds = items * float(((by_seed - mean) ** 2).sum()) / (seeds - 1)
    of_items = seeds * float(((by_item - mean) ** 2).sum()) / (items - 1)
    residual = float((rest**2).sum()) / ((seeds - 1) * (items - 1))
    total = max(of_seeds + of_items - residual, of_seeds, of_items)
    if total <= (1e-12 * max(1e-300, float(np.abs(values_SI).max()))) ** 2:  # only rounding
        return 0.0, 1.0
    freedom = total**2 / (
        of_seeds**2 / (seeds - 1)
        + of_items**2 / (items - 1)
        + residual**2 / ((seeds - 1) * (items - 1))
    )
    return math.sqrt(total / values_SI.size), max(1.0, freedom)


def unpaired(arm: Sequence[float], reference: Sequence[float], alpha: float) -> Interval:
    """Return Welch's interval of the difference of two means, as if the seeds were not shared.

    Args:
        arm: means of one arm, one per seed.
        reference: means of the other; the difference is `arm` minus `reference`.
        alpha: two-sided error rate.
    """
    from scipy import stats

    a, b = np.asarray(arm, float), np.asarray(reference, float)
    estimate, n = float(a.mean() - b.mean()), min(len(a), len(b))
    if n == 1:
        return Interval(estimate=estimate, low=None, high=None, p=None, sd=None, n=1)
    parts = [_sd(one) ** 2 / len(one) for one in (a, b)]
    variance = sum(parts)
    if variance == 0:
        return Interval(estimate=estimate, low=estimate, high=estimate, p=None, sd=0.0, n=n)
    pairs = zip(parts, (a, b), strict=True)
    freedom = variance**2 / sum(part**2 / (len(one) - 1) for part, one in pairs)
    error = math.sqrt(variance)
    half = float(stats.t.isf(alpha / 2, freedom)) * error
    return Interval(
        estimate=estimate,
        low=estimate - half,
        high=estimate + half,
        p=float(2 * stats.t.sf(abs(estimate) / error, freedom)),
        sd=error * math.sqrt(n),
        n=n,
    )


def difference(score: float, other: float) -> float:
    """Return ``score - other``; 0 if it is only rounding, as of means summed in another order."""
    found = score - other
    return 0.0 if abs(found) <= 1e-12 * max(abs(score), abs(other)) else found


def sign_flip_p(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the sign-flip test: under the null, signs are random.

    Exact up to sixteen differences; above that, over a fixed sample of sign patterns including the
    observed one (so that no p-value is zero).
    """
    values = np.asarray(differences, float)
    n = len(values)
    rounding = 1e-12 * np.abs(values).sum()  # sums in a different order round differently
    observed = abs(values.sum()) - rounding
    if n <= _EXACT_SEEDS:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        return float((np.abs((2 * patterns - 1) @ values) >= observed).mean())
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (2**_EXACT_SEEDS, n))
    reached = int((np.abs(signs @ values) >= observed).sum())
    return (reached + 1) / (len(signs) + 1)


def least_sign_flip_p(seeds: int) -> float:
    """Return the smallest possible p-value of a sign-flip test with this many seeds: 2 / 2^n."""
    return min(1.0, 2.0 ** (1 - seeds))


def seeds_for_sign_flip(alpha: float) -> int:
    """Return the smallest number of seeds whose sign-flip test can reach `alpha`."""
    return max(1, math.ceil(1 - math.log2(alpha) - 1e-12))


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Return Holm's adjusted p-values, in the given order.

    Args:
        p_values: one per arm; None, for a test that was not possible, counts as 1 in the family.
    """
    known = [1.0 if p is None else p for p in p_values]
    adjusted, highest = [0.0] * len(known), 0.0
    for rank, index in enumerate(sorted(range(len(known)), key=known.__getitem__)):
        highest = max(highest, min(1.0, (len(known) - rank) * known[index]))
        adjusted[index] = highest
    return [None if p is None else adjusted[i] for i, p in enumerate(p_values)]


def student(seeds: int, alpha: float) -> float:
    """Return the critical |t| of a single test of this many differences."""
    from scipy import special

    return -float(special.stdtrit(seeds - 1, alpha / 2))


def sd_factors(seeds: int, level: float = _SD_LEVEL) -> tuple[float, float]:
    """Return the factors from an estimated standard deviation to the bounds of the true one.

    The chi-square interval of normal differences. R. H. Browne, "On the use of a pilot sample for
    sample size determination", Statistics in Medicine 14 (1995), plans with its upper bound.

    Args:
        seeds: number of seeds, at least 2.
        level: level of the two-sided interval.
    """
    from scipy import stats

    freedom, tail = seeds - 1, (1 - level) / 2
    low, high = stats.chi2.isf(tail, freedom), stats.chi2.ppf(tail, freedom)
    return math.sqrt(freedom / low), math.sqrt(freedom / high)


def power_of(
    effect: float, sd: float, seeds: int, alpha: float, critical: Critical = student
) -> float:
    """Return the power of a two-sided paired t test.

    Args:
        effect: true mean of the differences.
        sd: true standard deviation of the differences, above 0.
        seeds: number of seeds, at least 2.
        alpha: two-sided error rate.
        critical: critical |t| of the test; infinite if the seeds are too few for any effect.
    """
    from scipy import stats

    freedom, shift = seeds - 1, abs(effect) / sd * math.sqrt(seeds)
    bound = critical(seeds, alpha)
    if math.isinf(bound):
        return 0.0
    if bound > _FAR:  # integrate over (Z + shift)^2 / bound^2 at the quadrature nodes of a normal Z
        nodes, weights = np.polynomial.hermite_e.hermegauss(32)
        chances = stats.chi2.cdf(freedom * ((nodes + shift) / bound) ** 2, freedom)
        return float(chances @ weights / weights.sum())
    upper, lower = stats.nct.sf(bound, freedom, shift), stats.nct.cdf(-bound, freedom, shift)
    # Far out, scipy returns NaN for a tail that is negligible.
    return float(np.nan_to_num(upper, nan=1.0) + np.nan_to_num(lower, nan=0.0))


_SIMULATED_SEEDS = 12  # for more, the t test's power is within 3 % of the effect (simulated)
_STUDIES = 10_000


def sign_flip_power(effect: float, sd: float, seeds: int, alpha: float) -> float:
    """Return the power of a two-sided sign-flip test of normal differences; see `power_of`.

    It is simulated with fixed draws up to twelve seeds; with more, it is that of the t test.
    """
    if seeds < seeds_for_sign_flip(alpha):
        return 0.0
    if seeds > _SIMULATED_SEEDS:
        return power_of(effect, sd, seeds, alpha)
    sums_KS, signs_S, totals_K = _flipped(seeds)
    shift = abs(effect) / sd
    observed_K1 = np.abs(totals_K + seeds * shift)[:, None] * (1 - 1e-5)  # f32 rounds by 1e-6
    p_K = (np.abs(sums_KS + signs_S * shift) >= observed_K1).mean(1)
    return float((p_K <= alpha).mean())


@functools.lru_cache(maxsize=2)
def _flipped(seeds: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw K studies without an effect.

    Returns:
        The sums of their differences under the S sign patterns of which no two are opposite, the
        sums of the patterns, and the sums without a flip.
    """
    drawn_KN = np.random.default_rng(0).standard_normal((_STUDIES, seeds)).astype(np.float32)
    patterns_SN = (np.arange(2 ** (seeds - 1))[:, None] >> np.arange(seeds)) & 1
    signs_SN = (2 * patterns_SN - 1).astype(np.float32)
    return drawn_KN @ signs_SN.T, signs_SN.sum(1), drawn_KN.sum(1)


def minimum_detectable(
    sd: float | None, seeds: int, alpha: float, power: float = 0.8, power_at: Power = power_of
) -> float | None:
    """Return the minimum detectable effect: the true difference found with the given power.

    Args:
        sd: true standard deviation of the seeds' differences; 0 or None if unknown.
        seeds: number of seeds.
        alpha: two-sided error rate.
        power: the required power, above `alpha`.
        power_at: returns the power of the test.

    Returns:
        None without a standard deviation, or if the seeds are too few for any effect.
    """
    from scipy.optimize import brentq

    if not sd or seeds < 2:  # noqa: PLR2004  # one difference has no spread, nor have equal ones
        return None
    if power_at(_FAR, 1.0, seeds, alpha) == 0:
        return None
    high = 1.0
    while power_at(high, 1.0, seeds, alpha) < power:
        high *= 2
    return sd * float(brentq(lambda x: power_at(x, 1.0, seeds, alpha) - power, 0, high))


def seeds_for_effect(
    effect: float, sd: float, alpha: float, power: float = 0.8, power_at: Power = power_of
) -> int | None:
    """Return the smallest number of seeds that finds a true difference with the given power.

    Args:
        effect: the difference.
        sd: standard deviation of the seeds' differences.
        alpha: two-sided error rate.
        power: the required power.
        power_at: returns the power of the test.

    Returns:
        None for an effect of 0, or one that would take over 100,000 seeds.
    """
    if effect == 0:
        return None
    low, high = 1, 2
    if sd == 0:
        return high
    while power_at(effect, sd, high, alpha) < power:
        low, high = high, high * 2
        if high > _MOST_SEEDS:
            return None
    while high - low > 1:  # power increases with the number of seeds
        middle = (low + high) // 2
        enough = power_at(effect, sd, middle, alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high


def pooled_sd(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the standard deviation within groups, pooled by their degrees of freedom.

    Groups of one value do not contribute; None if there are no others.
    """
    arrays = [np.asarray(group, float) for group in groups if len(group) > 1]
    freedom = sum(len(one) - 1 for one in arrays)
    if freedom == 0:
        return None
    return math.sqrt(sum(_sd(one) ** 2 * (len(one) - 1) for one in arrays) / freedom)


def _sd(values: np.ndarray) -> float:
    """Return the standard deviation; 0 if it is only rounding."""
    sd = float(values.std(ddof=1))
    return 0.0 if sd <= 1e-12 * max(1e-300, float(np.abs(values).max())) else sd
