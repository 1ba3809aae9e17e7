"""compare.json: arms of a study, paired by seed and by item, and the verdicts over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError


class Verdict(StrEnum):
    """The result of a comparison; only the primary KPI gets one of the first four."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference found"
    NOT_REACHABLE = "not reachable"
    SECONDARY = "secondary"
    UNKNOWN = "unknown"


class RunRecord(TypedDict):
    """One run of an arm, by the digests of what was read of it.

    ``scored_by`` is an evaluation; ``sandbox`` is what generated programs ran in, if any did.
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
    """One arm; ``kpis`` are means over its seeds, null where unknown.

    ``seeds`` are in rising order, each once; ``values`` are those of the factors.
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
        seeds: those that both arms have a value for, in the order of ``differences``.
        differences: one a seed, each the mean over the paired items.
        items: paired items of a seed, the fewest of any; null for what a run has as a whole.
        level: of the interval; that of the primary KPI holds for all arms at once (Bonferroni),
            that of any other for itself alone.
        low, high: the interval of the mean difference.
        p: of the chosen test; ``p_sign_flip`` of the signs alone; ``p_holm`` over the arms.
        unpaired_low, unpaired_high: Welch's interval, as if seeds were not shared.
        width_ratio: the paired interval's width over the unpaired one's.
        item_low, item_high: Student's t over items, each item's mean over the seeds.
        mde: difference that these seeds find at the power stated, were the differences' standard
            deviation the one that was estimated.
        mde_low, mde_high: the same at the bounds of the 80 % interval of the true one. In 90 % of
            studies a difference of ``mde_high`` is found at the power stated or above.
        seeds_needed: to reach alpha at all where these seeds cannot, else to find the
            observed difference at that power; null where no number would.
        seeds_needed_low, seeds_needed_high: to find it at these bounds; null where these seeds
            cannot reach alpha, or no number would.
        in_seed_noise: the estimate in multiples of the spread between seeds.
        why: of the verdict.
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
    """One arm against the reference; ``confounded_by`` is empty for a clean contrast."""

    arm: str
    reference: str
    differs_in: list[str]
    confounded_by: list[str]
    environment: list[str]
    moved_inputs: list[str]
    kpis: dict[str, KpiRecord]


class OtherLook(TypedDict):
    """Another comparison of runs of the same two arms: where it was found, and its seeds."""

    path: str
    seeds: list[int]


class Looks(TypedDict):
    """All looks at one contrast that there are records of, this one included.

    Attributes:
        others: the other ones, each set of runs once.
        false: how often a test made for one look calls no difference one at any of these; null
            where the test allows for them, or where that is not known.
    """

    others: list[OtherLook]
    false: float | None


class NoiseRecord(TypedDict):
    """The spread of a KPI: between seeds of an arm, and between runs of one arm and seed."""

    seed: float | None
    rerun: float | None


class Curve(TypedDict):
    """A metric of one arm by step: mean, lowest and highest of its runs."""

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]


class FrozenBy(TypedDict):
    """The ledger's entry that froze the last of a comparison's runs."""

    entry: int
    sha256: str


def _comparison_of_1(value: dict[str, Any]) -> dict[str, Any]:
    """Return a record of version 1 as one of version 2: it had one level, and no ranges."""
    absent = ("mde_low", "mde_high", "seeds_needed_low", "seeds_needed_high")
    try:
        for contrast in value["contrasts"]:
            for kpi in contrast["kpis"].values():
                level = None if kpi["low"] is None else 1 - value["alpha"]
                kpi.update(dict.fromkeys(absent), level=level)
        note = "it was written by an older version: its intervals hold for each arm alone"
        return {**value, "notes": [*value.get("notes", []), note]}
    except (AttributeError, KeyError, TypeError):  # the check of keys and types says what is wrong
        return value


@dataclass(kw_only=True, slots=True)
class Comparison(StoredRecord):
    """A comparison and its results.

    Attributes:
        format: always ``mens_exp_comparison``.
        version: of this layout.
        path: as asked for.
        settings: of ``compare`` and the declared factors, so that it can be made again.
        factors: that the arms are of.
        declared: whether the command named them; otherwise they were found in the runs' overrides.
        reference: the arm that the others are held against.
        primary: the one KPI that verdicts are given on.
        alpha: two-sided error rate over all arms.
        test: that gives p: ``t`` or ``sign_flip``.
        target: what verdicts and intervals are about: ``these_items`` or ``items_like_these``.
        sequential: ``none`` where p is of one look, or ``always_valid``.
        power: of ``mde``.
        condition: of the scorecards; both where base and tuned are the arms.
        arms: in the order of the runs, the reference first.
        runs: every run that counts.
        contrasts: one for each arm but the reference.
        noise: by KPI.
        curves: arm -> metric -> curve.
        scatter: run_id -> the KPIs that the cost-quality plot takes.
        left_out: run directory -> why it does not count.
        exploratory: why this is no registered result; null for one that is, or without a ledger.
        cycle: that registered it.
        frozen: the entry of the ledger that has the digests of its runs; null for an exploratory
            one, or without a ledger.
        looks: arm -> every look at it that there is another record of.
        unknown: dotted field that is null -> why.
        notes: what a reader should know besides.
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
        """Return what no comparison can say: arms that are not there, means of other values."""
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
        """Return the contrast of an arm, None for the reference and for no arm at all."""
        return next((one for one in self.contrasts if one["arm"] == arm), None)


def _wrong(where: str, found: object, expected: str) -> DataError:
    return DataError("wrong value", where=where, found=found, expected=expected)
