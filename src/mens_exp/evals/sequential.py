"""Sequential looks at a study as seeds are added: their error rate, and an always-valid test.

Under the null hypothesis, a p-value below 0.05 occurs in 5 % of studies if it is computed once,
after a number of seeds fixed in advance. If it is computed after every further seed until it is
below 0.05, it occurs in a quarter of them by twenty looks (benchmarks/looks.py).

The always-valid test may be read after any seed, as often as wanted. Under the null, the mixture
of likelihood ratios of t over a normal standardized effect is a martingale of mean 1, so that it
reaches 1 / alpha in at most a share alpha of studies (Ville), whatever the number of looks:
H. Wang and A. Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with
unknown variance", arXiv 2310.03722; M. F. Pérez-Ortiz et al., "E-statistics, group invariance and
anytime-valid testing", arXiv 2208.07610. It was chosen over alpha spending, because it requires no
maximum number of seeds in advance, and stays valid if that number is exceeded.

Neither test is valid if seeds are selected by their results: each look must contain all seeds of
the earlier ones.

Shapes: R studies, S seeds, L looks.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts.comparison import Looks
from mens_exp.config.promotion import CompareTest, Sequential
from mens_exp.evals import statistics
from mens_exp.evals.statistics import Interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mens_exp.artifacts.comparison import Comparison, ContrastRecord, OtherLook

    Side = frozenset[tuple[str, ...]]

# Standard deviation of the mixture over standardized effects. Its minimum detectable effect at 80 %
# power is within 3 % of the best that any value between 0.5 and 10 gives at 5 to 10 seeds, and
# within 6 % at 20; tests/evals/test_sequential.py computes them.
_EFFECTS = 2.0
_STUDIES = 20_000
_MOST_VALUES = 4_000_000  # over all studies; from 201 seeds on, fewer studies are simulated


def always_valid(differences: Sequence[float], alpha: float) -> Interval:
    """Return the interval and the p-value that are valid at any number of looks.

    The interval excludes 0 exactly if the p-value is below `alpha`. With too few seeds to exclude
    anything, it is infinite, and its bounds are None.

    Args:
        differences: one per seed, at least one.
        alpha: two-sided error rate over all looks together.
    """
    fixed = statistics.paired(differences, alpha)
    n, sd, mean = fixed.n, fixed.sd, fixed.estimate
    if sd is None:
        return fixed
    if sd == 0:  # t would be infinite, so only the signs are tested
        p = max(least_p(n), _least_p_of_signs(n)) if mean else 1.0
        return Interval(estimate=mean, low=mean, high=mean, p=p, sd=0.0, n=n)
    p = _p_value(mean / sd * math.sqrt(n), n)
    half = critical(n, alpha) * sd / math.sqrt(n)
    low, high = (None, None) if math.isinf(half) else (mean - half, mean + half)
    return Interval(estimate=mean, low=low, high=high, p=p, sd=sd, n=n)


def critical(seeds: int, alpha: float) -> float:
    """Return the critical |t| of the always-valid test; it may be infinite."""
    spread = 1 + seeds * _EFFECTS**2
    log_ratio = (math.log(spread) / 2 - math.log(alpha)) * 2 / seeds
    if log_ratio >= math.log(spread):
        return math.inf
    ratio = math.exp(log_ratio)
    return math.sqrt((seeds - 1) * (ratio - 1) / (1 - ratio / spread))


def power_of(effect: float, sd: float, seeds: int, alpha: float) -> float:
    """Return the power of the always-valid test; see `statistics.power_of`."""
    return statistics.power_of(effect, sd, seeds, alpha, critical)


def least_p(seeds: int) -> float:
    """Return the lower bound of the always-valid p-value for a number of seeds."""
    return math.exp(-math.log1p(seeds * _EFFECTS**2) * (seeds - 1) / 2)


def least_seeds(alpha: float) -> int:
    """Return the smallest number of seeds whose always-valid p-value can be below `alpha`."""
    seeds = 2
    while math.isinf(critical(seeds, alpha)):
        seeds += 1
    return seeds


def seeds_of_equal_signs(alpha: float) -> int:
    """Return the smallest number of equal nonzero differences with a p-value below `alpha`."""
    seeds = least_seeds(alpha)
    while max(least_p(seeds), _least_p_of_signs(seeds)) >= alpha:
        seeds += 1
    return seeds


@functools.lru_cache(maxsize=64)
def false_by_looks(looks: tuple[frozenset[int], ...], alpha: float) -> float:
    """Return the probability of a false positive of Student's t in any of several looks.

    Simulated over 20,000 studies of normal differences with a fixed seed. The rate is higher if
    seeds were left out because of their results.

    Args:
        looks: the seeds of each look, at least 2.
        alpha: two-sided error rate of a single look.
    """
    ordered = sorted(looks, key=lambda look: (len(look), sorted(look)))
    seeds = list(dict.fromkeys(seed for look in ordered for seed in sorted(look)))
    studies = min(_STUDIES, _MOST_VALUES // len(seeds))
    values_RS = np.random.default_rng(0).standard_normal((studies, len(seeds)))
    is_in_SL = np.array([[float(seed in look) for look in ordered] for seed in seeds])
    count_L = is_in_SL.sum(axis=0)
    mean_RL = values_RS @ is_in_SL / count_L
    variance_RL = (values_RS**2 @ is_in_SL - count_L * mean_RL**2) / (count_L - 1)
    critical_L = [statistics.student(len(look), alpha) for look in ordered]
    is_found_RL = np.abs(mean_RL) > critical_L * np.sqrt(variance_RL / count_L)
    return float(is_found_RL.any(axis=1).mean())


def looks_of(record: Comparison, others: Iterable[tuple[str, Comparison]]) -> dict[str, Looks]:
    """Find the looks at each contrast of a comparison, by arm.

    Another comparison is a look at the same contrast if it shares runs of both arms, in either
    direction. Every record shows every KPI, so its own primary KPI does not matter. The same runs
    compared again, or scored again, are the same look.

    Args:
        record: the comparison.
        others: other comparisons, each with its location.

    Returns:
        Arm -> its looks; arms without another look are omitted.
    """
    known = [(path, other) for path, other in others if other.condition == record.condition]
    found = {}
    for contrast in record.contrasts:
        ours = _sides(record, contrast, record.primary)
        seen: dict[Side, OtherLook] = {}
        for path, other in known:
            for one in other.contrasts:
                theirs = _sides(other, one, record.primary)
                if _share(ours, theirs) and theirs[0] | theirs[1] != ours[0] | ours[1]:
                    seeds = list(one["kpis"][record.primary]["seeds"])
                    seen.setdefault(theirs[0] | theirs[1], {"path": path, "seeds": seeds})
        if seen:
            looks = sorted(seen.values(), key=lambda one: (len(one["seeds"]), one["path"]))
            sets = {frozenset(one["seeds"]) for one in (contrast["kpis"][record.primary], *looks)}
            found[contrast["arm"]] = Looks(others=looks, false=_false(record, sets))
    return found


def _sides(record: Comparison, contrast: ContrastRecord, kpi: str) -> tuple[Side, Side]:
    """Return the runs of a contrast, identified independently of their location and scoring."""
    seeds = contrast["kpis"][kpi]["seeds"] if kpi in contrast["kpis"] else []
    arm, reference = (
        frozenset(
            (run["run_id"], run["contract"], str(run["seed"]), run["started_utc"])
            for run in record.runs
            if run["arm"] == contrast[side] and run["seed"] in seeds
        )
        for side in ("arm", "reference")
    )
    return arm, reference


def _share(ours: tuple[Side, Side], theirs: tuple[Side, Side]) -> bool:
    if not (ours[1] or theirs[1]):  # the base has no runs
        return bool(ours[0] & theirs[0])
    return any(ours[0] & one and ours[1] & other for one, other in (theirs, theirs[::-1]))


def _false(record: Comparison, looks: set[frozenset[int]]) -> float | None:
    """Return the false positive rate over all arms; an upper bound if there are several."""
    tests = tuple(sorted((look for look in looks if len(look) > 1), key=sorted))
    is_t = record.test == CompareTest.t.value and record.sequential == Sequential.none.value
    if not is_t or not tests:
        return None
    arms = len(record.contrasts)
    return min(1.0, arms * false_by_looks(tests, record.alpha / arms))


def _p_value(t: float, seeds: int) -> float:
    """Return the reciprocal of the mixture of likelihood ratios, at most 1."""
    spread, x = 1 + seeds * _EFFECTS**2, t * t / (seeds - 1)
    log_ratio = math.log1p(x) - math.log1p(x / spread)
    return math.exp(min(0.0, math.log(spread) / 2 - seeds / 2 * log_ratio))


def _least_p_of_signs(seeds: int) -> float:
    """Return the always-valid p-value of equal signs, for a uniform prior on their probability."""
    return min(1.0, math.exp(math.log(seeds + 1) - seeds * math.log(2)))
