"""Intervals and verdicts from the scores of two arms, per KPI."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts.comparison import KpiRecord, NoiseRecord, Verdict
from mens_exp.evals import sequential, statistics
from mens_exp.evals.kpis import Direction, Missing
from mens_exp.evals.observations import kpi_named

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.evals.kpis import Kpi
    from mens_exp.evals.observations import Score
    from mens_exp.evals.statistics import Interval, Power

_ROUNDING = 1e-5  # relative tolerance for a loss summed in f32; measured: 5e-8

ArmScores = dict[int, list[dict[str, "Score"]]]
"""Seed -> the scores of each of its runs, by KPI."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """The rule by which verdicts are given.

    Attributes:
        primary: the only KPI with a verdict.
        alpha: two-sided error rate over all arms together.
        test: ``t`` or ``sign_flip``.
        target: ``these_items``, or ``items_like_these``, of which these are a sample.
        power: power of the minimum detectable effect.
        arms: number of contrasts that share the error rate.
        sequential: ``none``, or ``always_valid`` to allow for several looks.
    """

    primary: str
    alpha: float
    test: str
    target: str
    power: float
    arms: int
    sequential: str = "none"

    @property
    def strictest(self) -> float:
        """The level that the smallest p-value must reach under Holm's correction."""
        return self.alpha / self.arms

    @property
    def is_always_valid(self) -> bool:
        """Whether p-values and intervals are valid at any number of looks."""
        return self.sequential != "none"

    @property
    def power_at(self) -> Power:
        """The power of the test."""
        if self.is_always_valid:
            return sequential.power_of
        return statistics.sign_flip_power if self.test == "sign_flip" else statistics.power_of

    def error_of(self, name: str) -> float:
        """Return the error rate of a KPI's interval.

        Intervals of the primary KPI hold for all arms simultaneously (Bonferroni). Holm's procedure
        has no such two-sided intervals: intervals at the level of each arm's step cover all of
        three clear differences in 93 % of studies instead of 95 %.
        """
        return self.strictest if name == self.primary else self.alpha


@dataclass(frozen=True, slots=True)
class _Pair:
    """One seed of both arms: the means, and the differences of the items, if there are any.

    ``unshared`` counts the items that only one arm has; ``weights`` is empty if all are equal.
    """

    arm: float
    reference: float
    items: dict[str, float]
    weights: dict[str, float]
    unshared: int

    @property
    def difference(self) -> float:
        """The arm's mean minus the reference's."""
        return statistics.difference(self.arm, self.reference)


def compared(
    name: str, arm: ArmScores, reference: ArmScores, noise: NoiseRecord, rule: Rule
) -> KpiRecord:
    """Compare two arms on one KPI, paired by seed and by item.

    `judge` sets the verdict later, over all arms together.

    Args:
        name: name of the KPI.
        arm: scores of one arm.
        reference: scores of the other.
        noise: spread of this KPI.
        rule: the rule of the verdicts.
    """
    kpi = _kpi(name, arm, reference)
    pairs = {
        seed: pair
        for seed in sorted(arm.keys() & reference.keys())
        if (pair := _paired(kpi, arm[seed], reference[seed])) is not None
    }
    record = _empty(kpi, arm_mean(name, arm), arm_mean(name, reference))
    if not pairs:
        record["why"] = _why_unknown(name, arm, reference)
        return record
    differences = [pair.difference for pair in pairs.values()]
    error = rule.error_of(name)
    fixed, why = _tested(list(pairs.values()), rule, error)
    main = sequential.always_valid(differences, error) if rule.is_always_valid else fixed
    apart = statistics.unpaired(
        [pair.arm for pair in pairs.values()],
        [pair.reference for pair in pairs.values()],
        error,
    )
    items = _by_item(list(pairs.values()), rule.alpha)
    signs = statistics.sign_flip_p(differences)
    spread = noise["seed"]
    record |= {
        "estimate": main.estimate,
        "arm_mean": _mean([pair.arm for pair in pairs.values()]),
        "reference_mean": _mean([pair.reference for pair in pairs.values()]),
        "seeds": list(pairs),
        "differences": differences,
        "items": min(len(pair.items) for pair in pairs.values()) or None,
        "level": 1 - error,
        "low": main.low,
        "high": main.high,
        "p": signs if rule.test == "sign_flip" else main.p,
        "p_sign_flip": signs,
        "unpaired_low": apart.low,
        "unpaired_high": apart.high,
        "width_ratio": fixed.width / apart.width
        if fixed.width is not None and apart.width
        else None,
        "item_low": None if items is None else items.low,
        "item_high": None if items is None else items.high,
        "in_seed_noise": main.estimate / spread if spread else None,
        "verdict": Verdict.SECONDARY,
        "why": why or (f"{rule.primary} is the primary KPI" if name != rule.primary else ""),
    }
    if rule.target == "these_items":  # for other items, more seeds alone do not suffice
        record["mde"], record["mde_low"], record["mde_high"] = _detectable(main, rule)
        record["seeds_needed"] = _needed(main, rule)
        record["seeds_needed_low"], record["seeds_needed_high"] = _needed_range(main, rule)
    return record


def _kpi(name: str, *arms: ArmScores) -> Kpi:
    """Return a KPI; it has no direction if runs declare it with different ones."""
    scores = [run[name] for arm in arms for runs in arm.values() for run in runs if name in run]
    declared = [one.declared for one in scores if one.declared is not None]
    if not declared:
        return kpi_named(name)
    is_one = len({one.direction for one in declared}) == 1
    return declared[0] if is_one else replace(declared[0], direction=Direction.NONE)


def incomparable(name: str, arm: ArmScores, reference: ArmScores, why: str) -> KpiRecord:
    """Return the record of a KPI that is not comparable between two arms.

    Args:
        name: name of the KPI.
        arm: scores of one arm.
        reference: scores of the other.
        why: the reason why it is not comparable.
    """
    kpi = _kpi(name, arm, reference)
    record = _empty(kpi, arm_mean(name, arm), arm_mean(name, reference))
    record["why"] = why
    return record


def judge(records: Sequence[KpiRecord], rule: Rule) -> None:
    """Set the verdicts on the primary KPI, one record per arm, with Holm's correction."""
    adjusted = statistics.holm([record["p"] for record in records])
    for record, p in zip(records, adjusted, strict=True):
        record["p_holm"] = p
        record["verdict"], record["why"] = _verdict(record, rule)


def noise_of(name: str, arms: Sequence[ArmScores]) -> NoiseRecord:
    """Return the spread of a KPI between seeds of an arm, and between reruns of one seed."""
    means = [
        [
            [
                scores[name].mean
                for scores in runs
                if name in scores and scores[name].mean is not None
            ]
            for runs in arm.values()
        ]
        for arm in arms
    ]
    known: list[list[list[float]]] = [
        [[one for one in runs if one is not None] for runs in arm if runs] for arm in means
    ]
    return {
        "seed": statistics.pooled_sd([[_mean(runs) for runs in arm] for arm in known]),
        "rerun": statistics.pooled_sd([runs for arm in known for runs in arm]),
    }


def arm_mean(name: str, arm: ArmScores) -> float | None:
    """Return the mean of a KPI over an arm's seeds; None unless every seed has it."""
    means = []
    for runs in arm.values():
        values = [scores[name].mean for scores in runs if name in scores]
        known = [value for value in values if value is not None]
        if not known:
            return None
        means.append(_mean(known))
    return _mean(means) if means else None


def _paired(
    kpi: Kpi, arm: Sequence[Mapping[str, Score]], reference: Sequence[Mapping[str, Score]]
) -> _Pair | None:
    """Pair the runs of one seed; a KPI that some items lack is averaged over the shared items."""
    mine, theirs = _averaged(kpi.name, arm), _averaged(kpi.name, reference)
    if mine is None or theirs is None:
        return None
    shared = sorted(mine[1].keys() & theirs[1].keys())
    items = {item: statistics.difference(mine[1][item], theirs[1][item]) for item in shared}
    if kpi.missing is Missing.ABSENT and mine[1]:
        if not shared:
            return None
        one, other = (_mean([side[1][item] for item in shared]) for side in (mine, theirs))
        return _Pair(one, other, items, {}, 0)
    unshared = len(mine[1].keys() ^ theirs[1].keys())
    return _Pair(mine[0], theirs[0], items, _weights(kpi.name, arm), unshared)


def _weights(name: str, runs: Sequence[Mapping[str, Score]]) -> dict[str, float]:
    """Return the items' weights, which depend on the text and so are the same in every run."""
    return next((dict(s.weights) for run in runs if (s := run.get(name)) and s.weights), {})


def _averaged(
    name: str, runs: Sequence[Mapping[str, Score]]
) -> tuple[float, dict[str, float]] | None:
    """Return the mean over the reruns of one seed, as a whole and by item."""
    known = [(s.mean, s.items) for run in runs if (s := run.get(name)) and s.mean is not None]
    if not known:
        return None
    items = {
        item: _mean([values[item] for _, values in known if item in values])
        for item in {item for _, values in known for item in values}
    }
    return _mean([mean for mean, _ in known]), items


def _by_item(pairs: Sequence[_Pair], alpha: float) -> Interval | None:
    """Return the interval over items, using each item's mean over the seeds that have it."""
    values: dict[str, list[float]] = {}
    for pair in pairs:
        for item, value in pair.items.items():
            values.setdefault(item, []).append(value)
    if not values:
        return None
    items = sorted(values)
    means = np.array([_mean(values[item]) for item in items])
    weights = np.array([pairs[0].weights.get(item, 1.0) for item in items])
    return statistics.paired(statistics.linearized(means, weights).tolist(), alpha)


def _tested(pairs: Sequence[_Pair], rule: Rule, error: float) -> tuple[Interval, str]:
    """Return the interval of the mean difference for the rule's target, or why there is none."""
    main = statistics.paired([pair.difference for pair in pairs], error)
    if rule.target == "these_items" or len(pairs) == 1:
        return main, ""
    why = _no_sample(pairs)
    if why:
        return replace(main, low=None, high=None, p=None), why
    items = sorted(pairs[0].items)
    table_SI = np.array([[pair.items[item] for item in items] for pair in pairs])
    weights_I = np.array([pairs[0].weights.get(item, 1.0) for item in items])
    found = statistics.crossed(table_SI, error, weights_I)
    scale = max(abs(value) for pair in pairs for value in (pair.arm, pair.reference))
    if abs(found.estimate - main.estimate) > _ROUNDING * scale:
        why = "the run's value is not the mean of its items"
        return replace(main, low=None, high=None, p=None), why
    assert found.width is not None, "there are two seeds and two items or more"
    half = found.width / 2  # centre on the runs' own values, summed in a different order
    return replace(found, low=main.estimate - half, high=main.estimate + half), ""


def _no_sample(pairs: Sequence[_Pair]) -> str:
    """Return why the items are not a sample shared by all seeds; empty if they are."""
    items = pairs[0].items.keys()
    if not items:
        return "it has no items, so that nothing can be said of items like these"
    if any(pair.unshared or pair.items.keys() != items for pair in pairs):
        return "not every run has every item, so that nothing can be said of items like these"
    if len(items) == 1:
        return "one item is not a sample of items like it"
    return ""


def _detectable(main: Interval, rule: Rule) -> tuple[float | None, float | None, float | None]:
    """Return the minimum detectable effect at the estimated SD and at the bounds of the true SD."""
    found = statistics.minimum_detectable(
        main.sd, main.n, rule.strictest, rule.power, rule.power_at
    )
    if found is None:
        return None, None, None
    low, high = statistics.sd_factors(main.n)
    return found, found * low, found * high


def _needed_range(main: Interval, rule: Rule) -> tuple[int | None, int | None]:
    """Return the seeds needed to find the observed difference, at the bounds of the true SD."""
    if not main.sd or main.n < least_seeds(rule):
        return None, None
    low, high = (
        _needed(replace(main, sd=main.sd * factor), rule)
        for factor in statistics.sd_factors(main.n)
    )
    return low, high


def _needed(main: Interval, rule: Rule) -> int | None:
    """Return the seeds needed to reach alpha at all, or else to find the observed difference."""
    least = least_seeds(rule)
    if main.n < least:
        return least
    if main.sd is None:
        return None
    if main.sd == 0:  # the p-value is then that of the sign test
        needed = (
            sequential.seeds_of_equal_signs(rule.strictest)
            if rule.is_always_valid
            else statistics.seeds_for_sign_flip(rule.strictest)
        )
        return max(least, needed) if main.estimate else None
    found = statistics.seeds_for_effect(
        main.estimate, main.sd, rule.strictest, rule.power, rule.power_at
    )
    return None if found is None else max(found, least)


def least_seeds(rule: Rule) -> int:
    """Return the smallest number of seeds with which a rule can give a verdict."""
    if rule.is_always_valid:
        return sequential.least_seeds(rule.strictest)
    if rule.test == "sign_flip":
        return max(2, statistics.seeds_for_sign_flip(rule.strictest))
    return 2


def _verdict(record: KpiRecord, rule: Rule) -> tuple[Verdict, str]:
    n, least = len(record["seeds"]), least_seeds(rule)
    if record["estimate"] is None:
        return Verdict.UNKNOWN, record["why"]
    if n < least:
        return Verdict.NOT_REACHABLE, unreachable(n, least, rule)
    if record["p"] is None:
        return Verdict.UNKNOWN, record["why"]
    p = record["p_holm"]
    assert p is not None, "two seeds have a p-value"
    said = f"p = {p:.3g} after Holm{', at any number of looks' if rule.is_always_valid else ''}"
    if p >= rule.alpha:
        detail = _found(record, rule)
        if record["estimate"] and record["low"] == record["high"]:
            detail = "; all differences are equal, so there is no spread"
        return Verdict.NO_DIFFERENCE, f"{said}{_note_on_interval(record, rule)}{detail}"
    if record["direction"] == Direction.NONE:
        return Verdict.UNKNOWN, f"{said}, but neither way is better"
    is_better = (record["estimate"] > 0) == (record["direction"] == Direction.MAX)
    verdict = Verdict.BETTER if is_better else Verdict.WORSE
    return verdict, f"{said}{_note_on_interval(record, rule)}"


def _found(record: KpiRecord, rule: Rule) -> str:
    low, high = record["mde_low"], record["mde_high"]
    if low is None or high is None:
        return ""
    found = f"a true difference of {low:.2g} to {high:.2g}"
    return f"; {len(record['seeds'])} seeds find {found} in {100 * rule.power:.6g}% of studies"


def _note_on_interval(record: KpiRecord, rule: Rule) -> str:
    """Explain an interval that seems to contradict the verdict."""
    low, high, p = record["low"], record["high"], record["p_holm"]
    assert p is not None, "a verdict has a p-value"
    if low is None or high is None or low == high:
        return ""
    has_zero = low <= 0 <= high
    if has_zero == (p >= rule.alpha):
        return ""
    if rule.test == "sign_flip":
        return "; the interval is Student's t, and the verdict is of the signs"
    return (
        "; the interval holds for all arms at once and includes 0, and Holm's "
        "step-down test finds more than such intervals do"
    )


def unreachable(n: int, least: int, rule: Rule) -> str:
    """Explain why `n` seeds give no verdict, where `least` are needed."""
    seeds = "1 seed" if n == 1 else f"{n} seeds"
    if n > 1 and rule.is_always_valid:
        return (
            f"{seeds} give an always-valid p of at least {sequential.least_p(n):.4g}, never under "
            f"{rule.strictest:.4g}; {least} are needed"
        )
    if rule.test == "sign_flip":
        reached = statistics.least_sign_flip_p(n)
        return (
            f"{seeds} give a sign-flip p of at least {reached:.4g}, never {rule.strictest:.4g}; "
            f"{least} are needed"
        )
    return f"{seeds} {'gives' if n == 1 else 'give'} no spread; {least} are needed"


def _why_unknown(name: str, arm: ArmScores, reference: ArmScores) -> str:
    if not arm.keys() & reference.keys():
        return "the arms share no seed"
    for scores in (run for side in (arm, reference) for runs in side.values() for run in runs):
        if name not in scores:
            return "not every run has it"
        if scores[name].why is not None:
            return str(scores[name].why)
    return "no item has a value in both arms"


def _empty(kpi: Kpi, arm: float | None, reference: float | None) -> KpiRecord:
    return {
        "group": kpi.group.value,
        "direction": kpi.direction.value,
        "unit": kpi.unit,
        "estimate": None,
        "arm_mean": arm,
        "reference_mean": reference,
        "seeds": [],
        "differences": [],
        "items": None,
        "level": None,
        "low": None,
        "high": None,
        "p": None,
        "p_sign_flip": None,
        "p_holm": None,
        "unpaired_low": None,
        "unpaired_high": None,
        "width_ratio": None,
        "item_low": None,
        "item_high": None,
        "mde": None,
        "mde_low": None,
        "mde_high": None,
        "seeds_needed": None,
        "seeds_needed_low": None,
        "seeds_needed_high": None,
        "in_seed_noise": None,
        "verdict": Verdict.UNKNOWN,
        "why": "",
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
