"""Promotion policies: pure functions from comparisons and cycles to rules and a decision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.decision_ledger import Answer, Outcome, RuleRecord
from mens_exp.config.promotion import (
    BurnProductionPolicy,
    BurnRndPolicy,
    EvalGatePolicy,
    QloraPlateauPolicy,
)
from mens_exp.errors import MensError
from mens_exp.evals.kpis import Direction
from mens_exp.evals.promotion_rules import (
    burn_production,
    clean,
    complete,
    rule_of,
    sandboxed,
    sound,
    unpaired,
    unseen,
    within,
)
from mens_exp.evals.study import BOTH

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mens_exp.artifacts.comparison import ArmRecord, Comparison, KpiRecord
    from mens_exp.artifacts.decision_ledger import CycleEntry
    from mens_exp.config.promotion import PolicyConfig
    from mens_exp.evals.promotion_rules import Evidence, Parity

_ORDER = (Answer.INSUFFICIENT, Answer.REJECT, Answer.HOLD)  # the first that a rule leads to wins
_SUCCESS, _STRICT = "task_success", "strictness"
_PLATEAU = 2  # minimum number of arms of a plateau
_RECOMMENDED = {
    "qlora_plateau": ("invest_in_custom_model_rnd", "continue_qlora_first"),
    "burn_rnd": ("expand_burn_rnd", "keep_burn_experimental"),
}
_COLLECT = "collect_burn_baseline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decided:
    """The result of a policy."""

    decision: Answer
    recommendation: str | None
    rules: list[RuleRecord]


def decide(
    policy: PolicyConfig,
    evidence: Sequence[Evidence],
    parity: Parity | None,
    cycles: Iterable[CycleEntry] = (),
) -> Decided:
    """Apply a policy.

    Args:
        policy: the rules and their thresholds.
        evidence: comparisons, oldest first.
        parity: a certificate, if one was given.
        cycles: all cycles opened before the decision.

    Returns:
        The decision: `promote` only if every rule passed; an unknown value never passes.
    """
    shared = (sound, sandboxed, unseen, complete)
    rules = [rule(one) for one in evidence for rule in shared]
    if isinstance(policy, BurnProductionPolicy):
        rules += burn_production(policy, evidence, parity, cycles)
    elif isinstance(policy, QloraPlateauPolicy):
        rules += _qlora_plateau(policy, evidence)
    elif isinstance(policy, BurnRndPolicy):
        rules += _burn_rnd(policy, evidence)
    elif isinstance(policy, EvalGatePolicy):
        rules += [rule for one in evidence for rule in _eval_gate(policy, one)]
    else:
        raise MensError("no rules for this policy", where="policy", found=policy.name)
    led = {rule["leads_to"] for rule in rules if rule["outcome"] != Outcome.PASSED}
    answer = next((one for one in _ORDER if one in led), Answer.PROMOTE)
    return Decided(
        decision=answer, recommendation=_recommendation(policy, answer, rules), rules=rules
    )


def _recommendation(
    policy: PolicyConfig, answer: Answer, rules: Sequence[RuleRecord]
) -> str | None:
    """Return REFERENCE's name of the decision, for the two policies that it defines."""
    words = _RECOMMENDED.get(policy.name)
    if words is None:
        return None
    if answer is Answer.PROMOTE:
        return words[0]
    no_burn = any(rule["rule"] == "arms" and rule["outcome"] == Outcome.UNKNOWN for rule in rules)
    if policy.name == "burn_rnd" and no_burn:
        return _COLLECT
    return words[1] if answer is Answer.HOLD else None


def _qlora_plateau(policy: QloraPlateauPolicy, evidence: Sequence[Evidence]) -> list[RuleRecord]:
    """Return the rules for each comparison that has several arms of the backend."""
    sides = [(one, _measured(one.comparison, policy.backend)) for one in evidence]
    rules = [
        rule for one, arms in sides if len(arms) >= _PLATEAU for rule in _plateau(policy, one, arms)
    ]
    if rules:
        return rules
    most = max((len(arms) for _, arms in sides), default=0)
    return [
        rule_of(
            "plateau",
            kpi=_SUCCESS,
            observed=None,
            threshold=policy.spread,
            passed=None,
            leads_to=Answer.INSUFFICIENT,
            note=f"known for at most {most} arms of {policy.backend} in one comparison; "
            f"{_PLATEAU} are needed",
        )
    ]


def _plateau(
    policy: QloraPlateauPolicy, one: Evidence, arms: Sequence[ArmRecord]
) -> Iterator[RuleRecord]:
    yield clean(one, {arm["name"] for arm in arms})
    spread = max(map(_success, arms)) - min(map(_success, arms))
    yield rule_of(
        "plateau",
        one,
        kpi=_SUCCESS,
        observed=spread,
        threshold=policy.spread,
        passed=spread <= policy.spread,
        leads_to=Answer.HOLD,
        note=f"{len(arms)} arms of {policy.backend} have it",
    )
    best = max(arms, key=_success)
    found = list(within(one, best, policy.floors, policy.ceilings, missing=Answer.INSUFFICIENT))
    unmet = [str(rule["kpi"]) for rule in found if rule["outcome"] == Outcome.FAILED]
    # If all floors are met, tuning should continue, so this rule requires an unmet floor.
    missing = [str(rule["kpi"]) for rule in found if rule["outcome"] == Outcome.UNKNOWN]
    yield rule_of(
        "a floor is unmet",
        one,
        observed=", ".join(unmet) or "none",
        threshold="at least one",
        passed=None if missing and not unmet else bool(unmet),
        leads_to=Answer.INSUFFICIENT if missing and not unmet else Answer.HOLD,
        note=f"{best['name']}{': unknown ' + ', '.join(missing) if missing else ''}",
    )


def _burn_rnd(policy: BurnRndPolicy, evidence: Sequence[Evidence]) -> Iterator[RuleRecord]:
    """Yield the rules for each comparison that has arms of both backends."""
    both = (policy.challenger, policy.incumbent)
    sides = [(one, [_measured(one.comparison, name) for name in both]) for one in evidence]
    known = [(one, found) for one, found in sides if all(found)]
    if not known:
        found = {name for _, two in sides for name, arms in zip(both, two, strict=True) if arms}
        lacking = [name for name in both if name not in found]
        yield rule_of(
            "arms",
            observed=None,
            threshold=" and ".join(both),
            passed=None,
            leads_to=Answer.INSUFFICIENT,
            note=f"no arm of {', '.join(lacking)} has {_SUCCESS}"
            if lacking
            else "no comparison has both",
        )
    for one, (challengers, incumbents) in known:
        best = max(challengers, key=_success), max(incumbents, key=_success)
        yield from _ahead(policy, one, *best)


def _ahead(
    policy: BurnRndPolicy, one: Evidence, challenger: ArmRecord, incumbent: ArmRecord
) -> Iterator[RuleRecord]:
    yield rule_of(
        "arms",
        one,
        observed=f"{challenger['name']}, {incumbent['name']}",
        threshold=f"{policy.challenger} and {policy.incumbent}",
        passed=True,
        leads_to=Answer.INSUFFICIENT,
        note="",
    )
    yield clean(one, {challenger["name"], incumbent["name"]})
    ahead = _success(challenger) - _success(incumbent)
    yield rule_of(
        "ahead",
        one,
        kpi=_SUCCESS,
        observed=ahead,
        threshold=policy.margin,
        passed=ahead > policy.margin,
        leads_to=Answer.HOLD,
        note="best arm over best arm",
    )
    strict = [arm["kpis"].get(_STRICT) for arm in (challenger, incumbent)]
    is_known = strict[0] is not None and strict[1] is not None
    yield rule_of(
        "strictness is not lower",
        one,
        kpi=_STRICT,
        observed=strict[0],
        threshold=strict[1],
        passed=strict[0] >= strict[1] if is_known else None,  # type: ignore[operator]
        leads_to=Answer.HOLD if is_known else Answer.INSUFFICIENT,
    )


def _eval_gate(policy: EvalGatePolicy, one: Evidence) -> Iterator[RuleRecord]:
    """Yield the rules for one arm's thresholds; a missing metric leads to rejection."""
    names = [contrast["arm"] for contrast in one.comparison.contrasts]
    wanted = policy.arm if policy.arm is not None else names[0] if len(names) == 1 else None
    arm = next((arm for arm in one.comparison.arms if arm["name"] == wanted), None)
    yield rule_of(
        "arm",
        one,
        observed=None if arm is None else arm["name"],
        threshold=wanted or "policy.arm, where there are several",
        passed=None if arm is None else True,
        leads_to=Answer.INSUFFICIENT,
        note="" if arm is not None else f"there are {', '.join(names)}",
    )
    if arm is None:
        return
    yield clean(one, {arm["name"]})
    floors = {**policy.floors, "tokens_per_s": policy.tokens_per_s}
    yield from within(one, arm, floors, policy.ceilings, missing=Answer.REJECT)
    contrast = one.comparison.contrast(arm["name"])
    kpi = None if contrast is None else contrast["kpis"].get(one.comparison.primary)
    missing = "no difference to the reference is known"
    if kpi is not None and kpi["estimate"] is not None:
        missing = unpaired(one.comparison, kpi)
    loss = None if kpi is None or missing else _loss(kpi)
    if kpi is not None and not missing and loss is None:
        missing = "neither direction of it is better"
    yield rule_of(
        "regression",
        one,
        kpi=one.comparison.primary,
        observed=loss,
        threshold=policy.regression,
        passed=None if loss is None else loss <= policy.regression,
        leads_to=Answer.REJECT,
        note=missing,
    )


def _loss(kpi: KpiRecord) -> float | None:
    """Return how much worse the arm is; None if unknown, or if the KPI has no better direction."""
    worse = {Direction.MIN: 1, Direction.MAX: -1}.get(Direction(kpi["direction"]))
    return None if kpi["estimate"] is None or worse is None else worse * kpi["estimate"]


def _measured(record: Comparison, backend: str) -> list[ArmRecord]:
    """Return the trained arms of a backend whose task success is known."""
    untrained = record.reference if record.condition == BOTH else None
    return [
        arm
        for arm in record.arms
        if arm["backend"] == backend
        and arm["name"] != untrained
        and arm["kpis"].get(_SUCCESS) is not None
    ]


def _success(arm: ArmRecord) -> float:
    value = arm["kpis"].get(_SUCCESS)
    return float("-inf") if value is None else value
