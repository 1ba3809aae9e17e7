"""A small scorecard of a model that is still in training: the first items of a suite."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.metrics import METRICS
from mens_exp.artifacts.scorecard import Condition
from mens_exp.evals.attempts import answer_all
from mens_exp.evals.observations import kpi_named, observations, scores
from mens_exp.evals.scored import to_scorecard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.evals.attempts import Plan
    from mens_exp.evals.generation import Engine
    from mens_exp.evals.observations import Score
    from mens_exp.evals.running import Runner
    from mens_exp.evals.suite import Answer, Item, Judgement, SelfTest, Suite

__all__ = ["FirstItems", "Measured", "measure"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The scores of the items.

    Attributes:
        items: how many were asked.
        values: metric, ``eval/<kpi>`` -> value.
        unknown: metric that could not be measured -> why.
        events: one for each sample of each item.
    """

    items: int
    values: dict[str, float]
    unknown: dict[str, str]
    events: list[ItemEvent]


class FirstItems:
    """A suite of which only the first items are asked; they are judged as ever."""

    def __init__(self, suite: Suite, items: int) -> None:
        """Take the first ``items`` of ``suite``, or all where it has fewer."""
        self._suite = suite
        self.items: Sequence[Item] = suite.items[:items]
        self.name, self.digest = suite.name, suite.digest
        self.needs_sandbox = suite.needs_sandbox

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Judge as the whole suite does."""
        return self._suite.judge(answers, runner)

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Test the whole suite."""
        return self._suite.self_test(runner)


def measure(
    suite: FirstItems, engine: Engine, runner: Runner | None, plan: Plan, manifest: Manifest
) -> Measured:
    """Ask and judge, and sum up by KPI as a comparison of runs does.

    Args:
        suite: the items.
        engine: the tuned model.
        runner: executes answers; None executes none.
        plan: how often each item is asked.
        manifest: of the run.
    """
    tuned = str(Condition.TUNED)
    events = answer_all(suite, engine, runner, plan, tuned)
    card = to_scorecard(suite, events, plan, {})
    found = scores(observations("run", manifest, tuned, card, events), len(suite.items))
    ours = {metric: one for name, one in found.items() if (metric := f"eval/{name}") in METRICS}
    return Measured(
        items=len(suite.items),
        values={name: one.mean for name, one in sorted(ours.items()) if one.mean is not None},
        unknown={
            name: _reason(name, one, events)
            for name, one in sorted(ours.items())
            if one.mean is None
        },
        events=events,
    )


def _reason(metric: str, score: Score, events: Sequence[ItemEvent]) -> str:
    field = kpi_named(metric.removeprefix("eval/")).field
    told = (event["unknown"].get(field or "") for event in events)
    return next((reason for reason in told if reason), score.why or "not measured")
