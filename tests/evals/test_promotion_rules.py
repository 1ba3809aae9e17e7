from __future__ import annotations

from pathlib import Path

import pytest

from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.decision_ledger import Answer, Outcome
from mens_exp.config.promotion import BurnRndPolicy, EvalGatePolicy, QloraPlateauPolicy
from mens_exp.evals.promotion import decide
from mens_exp.evals.promotion_rules import Evidence, sandboxed

SHIPPED = Path(__file__).parents[2] / "notebooks" / "records" / "comparison" / "compare.json"


def evidence(*kinds):
    comparison = Comparison.read(SHIPPED)
    for run, kind in zip(comparison.runs, kinds, strict=False):
        run["sandbox"] = kind
    return Evidence(name="study", comparison=comparison)


@pytest.mark.parametrize("kinds", [(), ("bubblewrap",), ("bubblewrap", None)])
def test_sandboxed_programs_are_evidence(kinds):
    """Runs that execute nothing count as sandboxed too."""
    assert sandboxed(evidence(*kinds))["outcome"] == Outcome.PASSED


@pytest.mark.parametrize("policy", [BurnRndPolicy(), EvalGatePolicy()])
def test_one_run_outside_a_sandbox_is_no_evidence_under_any_policy(policy):
    """One unsafe run makes the evidence insufficient, whatever its metrics are."""
    found = decide(policy, [evidence("bubblewrap", "unsafe")], None)
    (rule,) = [one for one in found.rules if one["rule"] == "sandbox"]
    assert (rule["outcome"], rule["observed"]) == (Outcome.FAILED, "bubblewrap, unsafe")
    assert found.decision is Answer.INSUFFICIENT


@pytest.mark.parametrize("causes", [[], ["data.seq_len"]])
@pytest.mark.parametrize("kind", [BurnRndPolicy, QloraPlateauPolicy, EvalGatePolicy])
def test_a_confounded_contrast_is_no_evidence_under_any_policy(kind, causes):
    """Of an arm that the policy reads; burn_production has a rule of its own."""
    one = evidence()
    (contrast,) = one.comparison.contrasts
    contrast["confounded_by"] = causes
    for arm in one.comparison.arms:
        is_challenger = kind is BurnRndPolicy and arm["name"] == contrast["arm"]
        arm["backend"] = "burn" if is_challenger else "qlora"
        arm["kpis"]["task_success"] = 0.5
    found = decide(kind(), [one], None)
    (rule,) = [one for one in found.rules if one["rule"] == "contrast"]
    assert rule["outcome"] == (Outcome.FAILED if causes else Outcome.PASSED)
    assert all(cause in rule["note"] for cause in causes)
    if causes:
        assert found.decision is Answer.INSUFFICIENT


@pytest.mark.parametrize(
    ("direction", "estimate", "outcome"),
    [
        ("min", 0.5, Outcome.FAILED),
        ("min", -0.5, Outcome.PASSED),
        ("max", -0.5, Outcome.FAILED),
        ("max", 0.5, Outcome.PASSED),
        ("none", 0.5, Outcome.UNKNOWN),
    ],
)
def test_a_metric_of_ones_own_regresses_in_its_declared_direction(direction, estimate, outcome):
    """A custom metric is not in the table of KPIs; its direction comes from the comparison."""
    one = evidence()
    contrast = one.comparison.contrasts[0]
    kpi = contrast["kpis"].pop(one.comparison.primary)
    contrast["kpis"]["my/latency"] = {**kpi, "direction": direction, "estimate": estimate}
    one.comparison.primary = "my/latency"
    found = decide(EvalGatePolicy(arm=contrast["arm"], regression=0.1), [one], None)
    (rule,) = [rule for rule in found.rules if rule["rule"] == "regression"]
    assert rule["outcome"] == outcome
    assert (rule["note"] == "neither direction of it is better") == (direction == "none")
