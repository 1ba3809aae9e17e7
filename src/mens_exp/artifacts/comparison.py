"""compare.json: the arms of a study, paired by seed and by item, and the resulting verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar, TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError


class Verdict(StrEnum):
    """The result of a comparison; the first four are given for the primary KPI only."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference found"
    NOT_REACHABLE = "not reachable"
    SECONDARY = "secondary"
    UNKNOWN = "unknown"


class RunRecord(TypedDict):
    """One run of an arm, identified by the digests of the files that were read.

    ``scored_by`` is an evaluation; ``sandbox`` is where generated programs ran, if any did.
    """

    run_id: str
    path: str
    arm: str
    seed: int
    started_utc: str
    contract: str
    manifest_sha256: str
    scored_by: str | None
    scored_utc: str | None
    scorer_sha256: str | None
    scorecard_sha256: str | None
    events_sha256: str | None
    suite_digest: str | None
    sandbox: str | None


class ArmRecord(TypedDict):
    """One arm; ``kpis`` are means over its seeds, null if unknown.

    ``seeds`` are in increasing order without duplicates; ``values`` are those of the factors.
    """

    name: str
    backend: str | None
    values: dict[str, str]
    seeds: list[int]
    runs: int
    kpis: dict[str, float | None]


class KpiRecord(TypedDict):
    """One KPI of one contrast, arm minus reference.

    Attributes:
        seeds: seeds for which both arms have a value, in the order of ``differences``.
        differences: one per seed, each the mean over the paired items.
        items: paired items per seed (minimum over seeds); null for KPIs of a whole run.
        level: confidence level of the interval. For the primary KPI it holds for all arms
            simultaneously (Bonferroni); for any other KPI, individually.
        low, high: confidence interval of the mean difference.
        p: p-value of the chosen test; ``p_sign_flip`` of the sign test; ``p_holm`` over the arms.
        unpaired_low, unpaired_high: Welch's interval, ignoring that seeds are shared.
        width_ratio: width of the paired interval divided by that of the unpaired one.
        item_low, item_high: Student's t over items, using each item's mean over the seeds.
        mde: minimum detectable effect with these seeds at the stated power, assuming that the
            estimated standard deviation of the differences is the true one.
        mde_low, mde_high: the same at the bounds of the 80 % interval of the true standard
            deviation. In 90 % of studies, a difference of ``mde_high`` is detected with at least
            the stated power.
        seeds_needed: number of seeds needed to reach alpha if these cannot, otherwise to detect
            the observed difference at that power; null if no number suffices.
        seeds_needed_low, seeds_needed_high: the same at these bounds; null if these seeds cannot
            reach alpha, or no number suffices.
        in_seed_noise: the estimate in multiples of the spread between seeds.
        why: reason for the verdict.
    """

    group: str
    direction: str
    unit: str
    estimate: float | None
    arm_mean: float | None
    reference_mean: float | None
    seeds: list[int]
    differences: list[float]
    items: int | None
    level: float | None
    low: float | None
    high: float | None
    p: float | None
    p_sign_flip: float | None
    p_holm: float | None
    unpaired_low: float | None
    unpaired_high: float | None
    width_ratio: float | None
    item_low: float | None
    item_high: float | None
    mde: float | None
    mde_low: float | None
    mde_high: float | None
    seeds_needed: int | None
    seeds_needed_low: int | None
    seeds_needed_high: int | None
    in_seed_noise: float | None
    verdict: Verdict
    why: str


class ContrastRecord(TypedDict):
    """One arm compared with the reference; ``confounded_by`` is empty for a clean contrast."""

    arm: str
    reference: str
    differs_in: list[str]
    confounded_by: list[str]
    environment: list[str]
    moved_inputs: list[str]
    kpis: dict[str, KpiRecord]


class OtherLook(TypedDict):
    """Another comparison of runs of the same two arms: its location and its seeds."""

    path: str
    seeds: list[int]


class Looks(TypedDict):
    """All recorded looks at one contrast, including this one.

    Attributes:
        others: the other looks, each set of runs once.
        false: probability that a single-look test reports a difference at any of these looks when
            there is none, given the seeds of each; null if the test is for several looks, or if
            the probability is unknown.
    """

    others: list[OtherLook]
    false: float | None


class NoiseRecord(TypedDict):
    """The spread of a KPI: between seeds of an arm, and between runs with the same arm and seed."""

    seed: float | None
    rerun: float | None


class Curve(TypedDict):
    """A metric of one arm by step: mean, minimum and maximum over its runs."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


class FrozenBy(TypedDict):
    """The ledger entry that froze the last of a comparison's runs."""

    entry: int
    sha256: str


def _comparison_of_1(value: dict[str, Any]) -> dict[str, Any]:
    """Migrate a record of version 1 to version 2; it had a single level and no ranges."""
    absent = ("mde_low", "mde_high", "seeds_needed_low", "seeds_needed_high")
    try:
        for contrast in value["contrasts"]:
            for kpi in contrast["kpis"].values():
                level = None if kpi["low"] is None else 1 - value["alpha"]
                kpi.update(dict.fromkeys(absent), level=level)
        note = "it was written by an older version: its intervals hold for each arm alone"
        return {**value, "notes": [*value.get("notes", []), note]}
    except (AttributeError, KeyError, TypeError):  # reported by the check of keys and types
        return value


@dataclass(kw_only=True, slots=True)
class Comparison(StoredRecord):
    """A comparison and its results.

    Attributes:
        format: always ``mens_exp_comparison``.
        version: version of this layout.
        path: the path, as given.
        settings: settings of ``compare`` and the declared factors, so that it can be repeated.
        factors: factors that define the arms.
        declared: whether the command named them; otherwise they were derived from the overrides.
        reference: the arm that the others are compared with.
        primary: the KPI on which verdicts are given.
        alpha: two-sided error rate over all arms.
        test: the test that gives p: ``t`` or ``sign_flip``.
        target: population of verdicts and intervals: ``these_items`` or ``items_like_these``.
        sequential: ``none`` if p is for a single look, or ``always_valid``.
        power: statistical power assumed by ``mde``.
        condition: condition of the scorecards; both if base and tuned are the arms.
        arms: in the order of the runs, the reference first.
        runs: every run that was included.
        contrasts: one for each arm except the reference.
        noise: by KPI.
        curves: arm -> metric -> curve.
        scatter: run_id -> the KPIs shown in the cost-quality plot.
        left_out: run directory -> reason why it was excluded.
        exploratory: reason why this is not a registered result; null if it is one, or without a
            ledger.
        cycle: the cycle that registered it.
        frozen: the ledger entry with the digests of its runs; null if exploratory, or without a
            ledger.
        looks: arm -> every other recorded look at it.
        unknown: dotted path of a null field -> reason.
        notes: further remarks for the reader.
    """

    MIGRATIONS: ClassVar[dict[int, Any]] = {1: _comparison_of_1}

    format: str = "mens_exp_comparison"
    version: int = 2
    path: list[str]
    settings: dict[str, Any]
    factors: list[str]
    declared: bool
    reference: str
    primary: str
    alpha: float
    test: str
    sequential: str = "none"
    power: float
    condition: str
    arms: list[ArmRecord]
    runs: list[RunRecord]
    contrasts: list[ContrastRecord]
    noise: dict[str, NoiseRecord] = field(default_factory=dict)
    curves: dict[str, dict[str, Curve]] = field(default_factory=dict)
    scatter: dict[str, dict[str, float | None]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    exploratory: str | None = None
    cycle: str | None = None
    target: str = "these_items"
    frozen: FrozenBy | None = None
    looks: dict[str, Looks] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def problems(self, where: str) -> list[DataError]:
        """Return inconsistencies, such as unknown arms or means of other values."""
        names = {arm["name"] for arm in self.arms}
        told = {self.reference, *(one["arm"] for one in self.runs)}
        told |= {name for one in self.contrasts for name in (one["arm"], one["reference"])}
        found = [
            _wrong(f"{where}: arms", sorted(names), f"{name} among them")
            for name in sorted(told - names)
        ]
        for number, contrast in enumerate(self.contrasts):
            for name, kpi in contrast["kpis"].items():
                place = f"{where}: contrasts[{number}].kpis.{name}"
                if len(kpi["seeds"]) != len(kpi["differences"]):
                    found.append(_wrong(f"{place}.seeds", kpi["seeds"], "one a difference"))
                low, mean, high = kpi["low"], kpi["estimate"], kpi["high"]
                known = low is not None and mean is not None and high is not None
                if known and not low <= mean <= high:  # type: ignore[operator]
                    found.append(_wrong(f"{place}.estimate", mean, f"{low} to {high}"))
        return found

    def contrast(self, arm: str) -> ContrastRecord | None:
        """Return the contrast of an arm; None for the reference or an unknown arm."""
        return next((one for one in self.contrasts if one["arm"] == arm), None)

    def seeds_left_out(self, arm: str) -> set[int]:
        """Return seeds of the other recorded looks at an arm that this comparison lacks."""
        own, *others = self._looks_at(arm)
        return set().union(*others) - own

    def only_adds_seeds(self, arm: str) -> bool:
        """Return whether each look at an arm has all seeds of the smaller ones, this one last."""
        own, *others = self._looks_at(arm)
        return all(one <= more for one, more in pairwise([*sorted(others, key=len), own]))

    def sizes_of_looks(self, arm: str) -> list[int]:
        """Return the numbers of seeds of all recorded looks at an arm, in increasing order."""
        return sorted({len(look) for look in self._looks_at(arm)})

    def _looks_at(self, arm: str) -> list[set[int]]:
        """Return the seeds of each recorded look at an arm, those of this comparison first."""
        own, looks = self.contrast(arm), self.looks.get(arm)
        assert own is not None, "looks are of a contrast"
        others = [] if looks is None else looks["others"]
        return [set(one["seeds"]) for one in (own["kpis"][self.primary], *others)]


def _wrong(where: str, found: object, expected: str) -> DataError:
    return DataError("wrong value", where=where, found=found, expected=expected)
