"""Score the conditions of a specification, each by a model of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.suite import ScorecardSpecSuite
from mens_exp.evals.attempts import Plan, answer_all
from mens_exp.evals.generation import Generation
from mens_exp.evals.scorecard_spec import FixtureEngine, Mode, SpecSuite, read_spec
from mens_exp.evals.served import ServerEngine
from mens_exp.tasks.scoring import Told, keep, tested

if TYPE_CHECKING:
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.config.root import RunConfig
    from mens_exp.evals.generation import Engine
    from mens_exp.evals.scorecard_spec import SpecCondition
    from mens_exp.tasks.run import Run

__all__ = ["score_spec"]


def score_spec(config: RunConfig, run: Run) -> None:
    """Answer every task under every condition, and write one scorecard of all.

    Raises:
        DataError: the specification or a fixture is not as it should be.
        SetupError: a server gives no answer.
    """
    assert isinstance(config.suite, ScorecardSpecSuite), "the caller has asked"
    assert config.suite.path is not None, "validation has asked for it"
    path = Path(config.suite.path).expanduser()
    suite = SpecSuite(spec=read_spec(path))
    run.manifest.inputs.update(specification=str(path), specification_sha256=sha256_file(path))
    self_test = tested(suite, None, run)
    if isinstance(self_test, str):
        run.unknown("scorecard", self_test)
        return
    plan = Plan(
        samples=config.eval.samples,
        max_retries=suite.spec["max_retries"],
        seed=config.eval.seed,
    )
    events: list[ItemEvent] = []
    for condition in suite.spec["conditions"]:
        engine = _engine(config, suite, condition, path.parent)
        events += answer_all(suite, engine, None, plan, condition["id"])
    told: list[dict[str, Any]] = [dict(condition) for condition in suite.spec["conditions"]]
    keep(suite, events, config, run, None, self_test, told=Told(plan=plan, conditions=told))


def _engine(config: RunConfig, suite: SpecSuite, condition: SpecCondition, beside: Path) -> Engine:
    assert isinstance(config.suite, ScorecardSpecSuite), "the caller has asked"
    if condition["mode"] == Mode.FIXTURE_FILE:
        return FixtureEngine(beside / condition["fixture"], suite.spec["tasks"])
    return ServerEngine(
        base_url=condition["base_url"],
        model=condition["model_id"],
        generation=Generation(
            max_new_tokens=config.suite.max_new_tokens,
            batch_size=config.suite.batch_size,
            temperature=config.eval.temperature,
            top_p=config.eval.top_p,
        ),
        api_key_env=config.eval.api_key_env,
    )
