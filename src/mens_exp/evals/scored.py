"""A suite's events to its scorecard."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.evals.answer_text import GRADING
from mens_exp.evals.kpis import summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.evals.attempts import Plan
    from mens_exp.evals.suite import SelfTest, Suite

__all__ = ["graded_digest", "to_scorecard"]


def graded_digest(suite: Suite) -> str:
    """Return what a scorecard, and a cycle that registers it, calls a suite by."""
    return digest({"suite": suite.digest, "grading": GRADING})


def to_scorecard(
    suite: Suite,
    events: Sequence[ItemEvent],
    plan: Plan,
    generation: dict[str, Any],
    *,
    sandbox: str | None = None,
    self_test: SelfTest | None = None,
) -> Scorecard:
    """Sum up events by condition.

    Args:
        suite: the suite that was answered.
        events: one for each sample of each item under each condition.
        plan: how often each item was asked.
        generation: how answers were made, for the record.
        sandbox: the kind that answers were run in; None where none was run.
        self_test: what came of the suite's own references.
    """
    conditions = {}
    unknown: dict[str, str] = {}
    for condition in dict.fromkeys(str(event["condition"]) for event in events):
        mine = [event for event in events if event["condition"] == condition]
        conditions[condition], why = summarise(
            mine, items=len(suite.items), samples=plan.samples, max_retries=plan.max_retries
        )
        unknown |= {f"conditions.{condition}.{name}": reason for name, reason in why.items()}
    return Scorecard(
        suite=suite.name,
        suite_digest=graded_digest(suite),
        items=len(suite.items),
        conditions=conditions,
        generation={**generation, **dataclasses.asdict(plan), "grading": GRADING},
        sandbox=sandbox,
        self_test=None if self_test is None else dataclasses.asdict(self_test),
        unknown=unknown,
    )
