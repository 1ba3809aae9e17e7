"""Parts that the rules of every promotion policy share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.decision_ledger import Answer, Outcome, RuleRecord
from mens_exp.artifacts.scorecard import UNSAFE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mens_exp.artifacts.comparison import ArmRecord, Comparison, KpiRecord
    from mens_exp.artifacts.decision_ledger import CycleEntry, FrozenRun

__all__ = ["Evidence", "Parity", "complete", "rule_of", "sandboxed", "sound", "unpaired", "within"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evidence:
    """One comparison, and what is to be known of it.

    Attributes:
        name: of its file.
        comparison: its content.
        problems: what its own records deny; empty for sound evidence.
        cycle: that registered it, None for an exploratory one.
        why_exploratory: why none did.
        shared_seeds: seeds of an earlier cycle too.
        runs: that the cycle freezes; none of exploratory evidence, or of what its records deny.
        unverifiable: what of it nobody can verify.
    """

    name: str
    comparison: Comparison
    problems: Sequence[str] = ()
    cycle: CycleEntry | None = None
    why_exploratory: str = ""
    shared_seeds: Sequence[int] = ()
    runs: Sequence[FrozenRun] = ()
    unverifiable: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """The certificate that was given: of which adapter, and what keeps it from counting."""

    name: str
    problem: str | None


def sound(one: Evidence) -> RuleRecord:
    """Ask that a comparison is what its own records say."""
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
    """Ask that no program of the evidence was executed outside a sandbox."""
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


def complete(one: Evidence) -> RuleRecord:
    """Ask that every arm has a scored run of every seed that any arm has.

    A seed that one arm lacks is dropped from the pairs, so a bad one must not go missing.
    """
    scored = {(r["arm"], r["seed"]) for r in one.comparison.runs if r["suite_digest"] is not None}
    arms = dict.fromkeys(run["arm"] for run in one.comparison.runs)  # a base has tuned's runs
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


def unpaired(record: Comparison, kpi: KpiRecord) -> str:
    """Name the seeds that a difference does not rest on; empty where it rests on all of them."""
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
    """Make the record of one rule; `passed` None is unknown, which never passes."""
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
