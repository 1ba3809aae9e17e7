"""Rules of promotion policies: shared rules, and policy=burn_production.

burn_production decides whether one backend may replace the other.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import Verdict
from mens_exp.artifacts.decision_ledger import Answer, Outcome, RuleRecord
from mens_exp.artifacts.scorecard import UNSAFE
from mens_exp.config.data import ContractConfig
from mens_exp.evals.kpis import KPIS, Direction, KpiGroup

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.comparison import ArmRecord, Comparison, ContrastRecord, KpiRecord
    from mens_exp.artifacts.decision_ledger import CycleEntry, FrozenRun, Thresholds
    from mens_exp.config.promotion import BurnProductionPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """A comparison with its context for a decision.

    Attributes:
        name: name of its file.
        comparison: its content.
        problems: contradictions with its own records; empty for sound evidence.
        cycle: the cycle that registered it; None if it is exploratory.
        why_exploratory: the reason why no cycle registered it.
        shared_seeds: seeds that an earlier cycle has too.
        runs: the runs that the cycle freezes; empty for exploratory or contradicted evidence.
        unverifiable: parts that cannot be verified.
        trained_on_items: runs whose training rows contain items of the suite, with figures.
        rescored: runs whose own scorecard of the suite a later evaluation replaces.
    """

    name: str
    comparison: Comparison
    problems: Sequence[str] = ()
    cycle: CycleEntry | None = None
    why_exploratory: str = ""
    shared_seeds: Sequence[int] = ()
    runs: Sequence[FrozenRun] = ()
    unverifiable: Sequence[str] = ()
    trained_on_items: Sequence[str] = ()
    rescored: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """The given certificate: its name, and the problem for which it does not count."""

    name: str
    problem: str | None


def sound(one: Evidence) -> RuleRecord:
    """Require that a comparison matches its own records."""
    return rule_of(
        "evidence",
        one,
        observed="; ".join(one.problems) or "as recorded",
        threshold="as recorded",
        passed=not one.problems,
        leads_to=Answer.INSUFFICIENT,
        note="runs, scorecards and figures, read and computed again",
    )


def sandboxed(one: Evidence) -> RuleRecord:
    """Require that no program of the evidence was executed outside a sandbox."""
    kinds = {run["sandbox"] for run in one.comparison.runs} - {None}
    return rule_of(
        "sandbox",
        one,
        observed=", ".join(sorted(map(str, kinds))) or "nothing was executed",
        threshold=f"not {UNSAFE}",
        passed=UNSAFE not in kinds,
        leads_to=Answer.INSUFFICIENT,
        note="where generated programs ran",
    )


def unseen(one: Evidence) -> RuleRecord:
    """Require that no run was trained on the items that it is scored on."""
    return rule_of(
        "unseen items",
        one,
        observed="; ".join(one.trained_on_items) or "unseen",
        threshold=f"at most {ContractConfig().max_overlap_frac:.0%} of the items in training rows",
        passed=not one.trained_on_items,
        leads_to=Answer.INSUFFICIENT,
        note="as the runs and evaluations recorded",
    )


def complete(one: Evidence) -> RuleRecord:
    """Require that every arm has a scored run of every seed that any arm has.

    A seed missing from one arm is dropped from the pairs, which could hide a bad result.
    """
    scored = {(r["arm"], r["seed"]) for r in one.comparison.runs if r["suite_digest"] is not None}
    arms = dict.fromkeys(run["arm"] for run in one.comparison.runs)  # the base has no own runs
    lacking = [
        f"seed {seed} of {arm}"
        for arm in arms
        for seed in _seeds(one.comparison)
        if (arm, seed) not in scored
    ]
    return rule_of(
        "seeds",
        one,
        observed=f"missing: {', '.join(lacking)}" if lacking else "complete",
        threshold="a scored run of every seed in every arm",
        passed=not lacking,
        leads_to=Answer.INSUFFICIENT,
        note="a run that failed, was left out or was not scored is missing" if lacking else "",
    )


def clean(one: Evidence, arms: Collection[str]) -> RuleRecord:
    """Require that the contrasts of some arms with their reference are not confounded."""
    causes = [
        f"{contrast['arm']}: {_confounded(contrast)}"
        for contrast in one.comparison.contrasts
        if contrast["arm"] in arms and contrast["confounded_by"]
    ]
    return rule_of(
        "contrast",
        one,
        observed="confounded" if causes else "clean",
        threshold="clean: the arms differ in the declared factors alone",
        passed=not causes,
        leads_to=Answer.INSUFFICIENT,
        note=". ".join(causes),
    )


def unpaired(record: Comparison, kpi: KpiRecord) -> str:
    """List the seeds missing from a difference; empty if it includes all of them."""
    missing = [f"seed {seed}" for seed in _seeds(record) if seed not in kpi["seeds"]]
    return f"not both arms have a value for {', '.join(missing)}" if missing else ""


def _seeds(record: Comparison) -> list[int]:
    return sorted({seed for arm in record.arms for seed in arm["seeds"]})


def within(
    one: Evidence | None,
    arm: ArmRecord,
    floors: Mapping[str, float],
    ceilings: Mapping[str, float],
    *,
    missing: Answer,
) -> Iterator[RuleRecord]:
    """Yield a rule for each floor and ceiling of an arm's means."""
    limits = [(name, limit, True) for name, limit in sorted(floors.items())]
    limits += [(name, limit, False) for name, limit in sorted(ceilings.items())]
    for name, limit, is_floor in limits:
        value = arm["kpis"].get(name)
        met = None if value is None else value >= limit if is_floor else value <= limit
        yield rule_of(
            "floor" if is_floor else "ceiling",
            one,
            kpi=name,
            observed=value,
            threshold=limit,
            passed=met,
            leads_to=missing if met is None else Answer.REJECT,
            note="" if met is not None else "not measured, which never passes",
        )


def rule_of(
    rule: str,
    one: Evidence | None = None,
    *,
    observed: float | str | None,
    threshold: float | str | None,
    passed: bool | None,
    leads_to: Answer,
    kpi: str | None = None,
    note: str = "",
) -> RuleRecord:
    """Build the record of one rule; `passed` is None if unknown, which never passes."""
    outcome = {True: Outcome.PASSED, False: Outcome.FAILED, None: Outcome.UNKNOWN}[passed]
    return {
        "rule": rule,
        "evidence": None if one is None else one.name,
        "kpi": kpi,
        "observed": observed,
        "threshold": threshold,
        "outcome": outcome,
        "leads_to": leads_to,
        "note": note,
    }


_GROUPS = (KpiGroup.SYNTAX, KpiGroup.SEMANTIC, KpiGroup.REPAIR)


def burn_production(
    policy: BurnProductionPolicy,
    evidence: Sequence[Evidence],
    parity: Parity | None,
    opened: Iterable[CycleEntry],
) -> Iterator[RuleRecord]:
    """Yield every rule: cycles, contrast, superiority, non-inferiority, floors, certificate."""
    cycles = {one.cycle["cycle"] for one in evidence if one.cycle is not None and not one.problems}
    yield rule_of(
        "cycles",
        observed=float(len(cycles)),
        threshold=float(policy.min_cycles),
        passed=len(cycles) >= policy.min_cycles,
        leads_to=Answer.INSUFFICIENT,
        note=", ".join(sorted(cycles)) or "no comparison is of a registered cycle",
    )
    for cycle in opened:
        if is_about(policy, cycle):
            yield _finished(cycle, evidence)
    for one in evidence:
        yield from _registered(policy, one)
        contrast = _between(one.comparison, policy.challenger, policy.incumbent)
        yield rule_of(
            "contrast",
            one,
            observed=None if contrast is None else contrast["arm"],
            threshold=f"{policy.challenger} against {policy.incumbent}",
            passed=None if contrast is None else not contrast["confounded_by"],
            leads_to=Answer.INSUFFICIENT,
            note=_confounded(contrast),
        )
        if contrast is not None:
            yield from _of_contrast(policy, one, contrast)
    if policy.parity:
        yield rule_of(
            "parity certificate",
            observed=None if parity is None else parity.name,
            threshold="passed, of the challenger's adapter",
            passed=None if parity is None else parity.problem is None,
            leads_to=Answer.INSUFFICIENT,
            note="promote.parity names none" if parity is None else parity.problem or "",
        )


def is_about(policy: BurnProductionPolicy, cycle: CycleEntry) -> bool:
    """Return whether a cycle was opened for the policy's challenger against its incumbent.

    Its KPI, margin and rules are ignored. Otherwise an unfavourable cycle could be evaded by
    opening another one with a slightly different margin.
    """
    asked = {policy.challenger, policy.incumbent}
    frozen = cycle.get("frozen")
    if frozen is not None and {frozen["challenger"], frozen["incumbent"]} != asked:
        return False
    words = {word for arm in cycle["arms"] for word in re.split(r"[ ,=]+", arm)}
    return asked <= words


def _finished(cycle: CycleEntry, evidence: Sequence[Evidence]) -> RuleRecord:
    """Require a comparison of a cycle: a promotion depends on all cycles opened for it."""
    name = cycle["cycle"]
    found = [one.name for one in evidence if one.cycle is not None and one.cycle["cycle"] == name]
    return rule_of(
        "cycle",
        observed=", ".join(found) or None,
        threshold=f"a comparison of cycle {name}",
        passed=True if found else None,
        leads_to=Answer.INSUFFICIENT,
        note="" if found else "it was opened for this question, and counts finished or not",
    )


def thresholds(policy: BurnProductionPolicy) -> Thresholds:
    """Return the policy's part of a cycle's frozen rules, under the ledger's names."""
    return {
        "challenger": policy.challenger,
        "incumbent": policy.incumbent,
        "floors": dict(policy.floors),
        "ceilings": dict(policy.ceilings),
        "share_margin": policy.share_margin,
        "relative_margin": policy.relative_margin,
        "least_cycles": policy.min_cycles,
        "certificate": policy.parity,
    }


def _of_contrast(
    policy: BurnProductionPolicy, one: Evidence, contrast: ContrastRecord
) -> Iterator[RuleRecord]:
    if one.cycle is not None:
        yield _directed(one, one.cycle, contrast["kpis"].get(one.cycle["kpi"]))
        yield _superior(one, one.cycle, contrast["kpis"].get(one.cycle["kpi"]))
    for group in _GROUPS:
        yield from _none_worse(policy, one, contrast, group)
    arm = next(arm for arm in one.comparison.arms if arm["name"] == contrast["arm"])
    yield from within(one, arm, policy.floors, policy.ceilings, missing=Answer.INSUFFICIENT)


def _directed(one: Evidence, cycle: CycleEntry, kpi: KpiRecord | None) -> RuleRecord:
    """Require that the cycle was opened to show that the challenger is better."""
    wanted = {Direction.MAX.value: "higher", Direction.MIN.value: "lower"}
    better = None if kpi is None else wanted.get(kpi["direction"])
    return rule_of(
        "direction",
        one,
        kpi=cycle["kpi"],
        observed=cycle["direction"],
        threshold=better,
        passed=None if better is None else cycle["direction"] == better,
        leads_to=Answer.INSUFFICIENT,
        note="frozen when the cycle was opened",
    )


def _superior(one: Evidence, cycle: CycleEntry, kpi: KpiRecord | None) -> RuleRecord:
    """Require a verdict with the worse bound above the margin; an interval below 0 rejects.

    Bounds alone are not enough, because the interval of equal differences is a point even for very
    few seeds.
    """
    bounds = None if kpi is None else _oriented(one.comparison, kpi)
    worst, best = bounds or (None, None)
    note = "worse bound of the difference" if worst is not None else "no interval of this KPI"
    if kpi is not None and worst is None:
        note = _why_none(one.comparison, kpi) or note
    is_above = worst is not None and worst > cycle["margin"]
    if kpi is not None and is_above and kpi["verdict"] != Verdict.BETTER:
        note = f"{note}; {kpi['verdict']}, {kpi['why']}"
    return rule_of(
        "superiority",
        one,
        kpi=cycle["kpi"],
        observed=worst,
        threshold=cycle["margin"],
        passed=None
        if kpi is None or worst is None
        else is_above and kpi["verdict"] == Verdict.BETTER,
        leads_to=_unless(best, Answer.HOLD),
        note=note,
    )


def _none_worse(
    policy: BurnProductionPolicy, one: Evidence, contrast: ContrastRecord, group: KpiGroup
) -> Iterator[RuleRecord]:
    names = [name for name, kpi in KPIS.items() if kpi.group is group]
    known = {n: contrast["kpis"][n] for n in names if n in contrast["kpis"]}
    if not any(kpi["estimate"] is not None for kpi in known.values()):
        yield rule_of(
            f"non-inferiority: {group}",
            one,
            observed=None,
            threshold=f"at least one {group} KPI",
            passed=None,
            leads_to=Answer.INSUFFICIENT,
            note="the comparison has none",
        )
        return
    for name, kpi in known.items():
        margin = policy.share_margin
        if kpi["unit"] != "1":
            margin = policy.relative_margin * abs(kpi["reference_mean"] or 0.0)
        worst, best = _oriented(one.comparison, kpi) or (None, None)
        conclusive = best is not None and best < -margin
        yield rule_of(
            "non-inferiority",
            one,
            kpi=name,
            observed=worst,
            threshold=-margin,
            passed=None if worst is None else worst >= -margin,
            leads_to=Answer.INSUFFICIENT
            if worst is None
            else Answer.REJECT
            if conclusive
            else Answer.HOLD,
            note="worse bound of the difference"
            if worst is not None
            else _why_none(one.comparison, kpi),
        )


def _registered(policy: BurnProductionPolicy, one: Evidence) -> Iterator[RuleRecord]:
    cycle = one.cycle
    yield rule_of(
        "registered",
        one,
        observed=None if cycle is None else cycle["cycle"],
        threshold="a cycle that was opened before its runs",
        passed=None if cycle is None else True,
        leads_to=Answer.INSUFFICIENT,
        note=f"exploratory: {one.why_exploratory}" if cycle is None else "",
    )
    if cycle is not None:
        yield _as_frozen(policy, one, cycle)
    yield rule_of(
        "separate seeds",
        one,
        observed=", ".join(map(str, one.shared_seeds)) or "none shared",
        threshold="none shared with an earlier cycle",
        passed=not one.shared_seeds,
        leads_to=Answer.INSUFFICIENT,
    )
    yield rule_of(
        "first scores",
        one,
        observed="; ".join(one.rescored) or "of the first scorecards",
        threshold="no run scored again after its own scorecard of the suite",
        passed=not one.rescored,
        leads_to=Answer.INSUFFICIENT,
        note="otherwise answers could be drawn again until they pass",
    )


def _as_frozen(policy: BurnProductionPolicy, one: Evidence, cycle: CycleEntry) -> RuleRecord:
    """Require that the policy has the values registered in the cycle."""
    asked: dict[str, Any] = dict(thresholds(policy))
    frozen: dict[str, Any] = dict(cycle.get("frozen", {}))
    others = [name for name in asked if asked[name] != frozen.get(name)]
    note = ""
    if not frozen:
        note = f"unverifiable: {cycle['cycle']} was opened by a version that froze none of them"
    elif others:
        now = ", ".join(f"{name} {asked[name]}" for name in others)
        note = f"the policy has {now}; other values are another cycle"
    was = ", ".join(f"{name} {frozen.get(name)}" for name in others)
    return rule_of(
        "frozen",
        one,
        observed=None if not frozen else was or "as frozen",
        threshold="the values that the cycle was opened with",
        passed=None if not frozen else not others,
        leads_to=Answer.INSUFFICIENT,
        note=note,
    )


def _between(record: Comparison, challenger: str, incumbent: str) -> ContrastRecord | None:
    """Return the only contrast of one backend's arm against the other's; None otherwise."""
    backends = {arm["name"]: arm["backend"] for arm in record.arms}
    if backends[record.reference] != incumbent:
        return None
    found = [one for one in record.contrasts if backends[one["arm"]] == challenger]
    return found[0] if len(found) == 1 else None


def _confounded(contrast: ContrastRecord | None) -> str:
    if contrast is None:
        return "the comparison has no such contrast, or several"
    causes = "; ".join(contrast["confounded_by"])
    return f"confounded by {causes}" if causes else ""


def _oriented(record: Comparison, kpi: KpiRecord) -> tuple[float, float] | None:
    """Return the interval oriented so that higher is better; None unless it includes every seed."""
    low, high = kpi["low"], kpi["high"]
    if low is None or high is None or unpaired(record, kpi):
        return None
    return (-high, -low) if kpi["direction"] == Direction.MIN else (low, high)


def _why_none(record: Comparison, kpi: KpiRecord) -> str:
    return kpi["why"] if kpi["estimate"] is None else unpaired(record, kpi)


def _unless(best: float | None, usual: Answer) -> Answer:
    if best is None:
        return Answer.INSUFFICIENT
    return Answer.REJECT if best < 0 else usual
