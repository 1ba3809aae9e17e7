"""The rules of policy=burn_production: may one backend take the other's place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.comparison import Verdict
from mens_exp.artifacts.decision_ledger import Answer, RuleRecord
from mens_exp.evals.kpi_table import KPIS, Direction, KpiGroup
from mens_exp.evals.promotion_rules import rule_of, unpaired, within

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.comparison import Comparison, ContrastRecord, KpiRecord
    from mens_exp.config.policy import BurnProductionPolicy
    from mens_exp.evals.promotion_rules import Evidence, Parity

__all__ = ["burn_production"]

_GROUPS = (KpiGroup.SYNTAX, KpiGroup.SEMANTIC, KpiGroup.REPAIR)


def burn_production(
    policy: BurnProductionPolicy, evidence: Sequence[Evidence], parity: Parity | None
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
    for one in evidence:
        yield from _registered(one)
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


def _of_contrast(
    policy: BurnProductionPolicy, one: Evidence, contrast: ContrastRecord
) -> Iterator[RuleRecord]:
    yield rule_of(
        "primary KPI",
        one,
        observed=one.comparison.primary,
        threshold=policy.kpi,
        passed=one.comparison.primary == policy.kpi,
        leads_to=Answer.INSUFFICIENT,
        note="a verdict is given on the KPI that was declared before it was seen",
    )
    yield _superior(policy, one, contrast["kpis"].get(policy.kpi))
    for group in _GROUPS:
        yield from _none_worse(policy, one, contrast, group)
    arm = next(arm for arm in one.comparison.arms if arm["name"] == contrast["arm"])
    yield from within(one, arm, policy.floors, policy.ceilings, missing=Answer.INSUFFICIENT)


def _superior(policy: BurnProductionPolicy, one: Evidence, kpi: KpiRecord | None) -> RuleRecord:
    """Ask for a verdict, and that the worse bound exceeds the margin; all of it under 0 rejects.

    Differences that are all equal have a point for an interval, however few they are, so that
    bounds alone are not enough.
    """
    bounds = None if kpi is None else _oriented(one.comparison, policy.kpi, kpi)
    worst, best = bounds or (None, None)
    note = "worse bound of the difference" if worst is not None else "no interval of this KPI"
    if kpi is not None and worst is None:
        note = _why_none(one.comparison, kpi) or note
    is_above = worst is not None and worst > policy.margin
    if kpi is not None and is_above and kpi["verdict"] != Verdict.BETTER:
        note = f"{note}; {kpi['verdict']}, {kpi['why']}"
    return rule_of(
        "superiority",
        one,
        kpi=policy.kpi,
        observed=worst,
        threshold=policy.margin,
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
        worst, best = _oriented(one.comparison, name, kpi) or (None, None)
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


def _registered(one: Evidence) -> Iterator[RuleRecord]:
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
    yield rule_of(
        "seeds of its own",
        one,
        observed=", ".join(map(str, one.shared_seeds)) or "none shared",
        threshold="none shared with an earlier cycle",
        passed=not one.shared_seeds,
        leads_to=Answer.INSUFFICIENT,
    )


def _between(record: Comparison, challenger: str, incumbent: str) -> ContrastRecord | None:
    """Return the contrast of one backend's arm against the other's, None without just one."""
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


def _oriented(record: Comparison, name: str, kpi: KpiRecord) -> tuple[float, float] | None:
    """Return the interval so that higher is better, the worse bound first; it needs every seed."""
    low, high = kpi["low"], kpi["high"]
    if low is None or high is None or unpaired(record, kpi):
        return None
    return (-high, -low) if KPIS[name].direction is Direction.MIN else (low, high)


def _why_none(record: Comparison, kpi: KpiRecord) -> str:
    return kpi["why"] if kpi["estimate"] is None else unpaired(record, kpi)


def _unless(best: float | None, usual: Answer) -> Answer:
    if best is None:
        return Answer.INSUFFICIENT
    return Answer.REJECT if best < 0 else usual
