"""Score base and tuned model in one process, during and after training, and write the scorecard.

Scoring during training is prepared before the first step, or refused there.
"""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.scorecard import Condition, Sample, Samples, write_item_events
from mens_exp.config.evaluation import EngineKind, EvalConfig
from mens_exp.config.rules.suite import scorecard_of
from mens_exp.config.trainer import Selection
from mens_exp.corpus.source import load_rows
from mens_exp.errors import MensError, RequestError
from mens_exp.evals.attempts import (
    FirstItems,
    Measured,
    Plan,
    answer_all,
    graded_digest,
    measure,
    to_scorecard,
)
from mens_exp.evals.engines import BATCHING, Generation, GraphEngine, Request
from mens_exp.evals.kpis import KPIS, KpiGroup
from mens_exp.evals.suite import Runner, frozen_suite, suite_class
from mens_exp.layout.shape import shape_of
from mens_exp.rows.answers import messages_of
from mens_exp.tasks.plan import planned_tokenizer
from mens_exp.tasks.rejection_sampling import keep_passing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.config.suite import SuiteConfig
    from mens_exp.evals.engines import Engine
    from mens_exp.evals.suite import SelfTest, Suite
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run
    from mens_exp.tokenizer.load import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """Everything that scoring needs, opened once.

    Attributes:
        suite: the suite.
        runner: executes answers; None executes none.
        self_test: result of the suite's self-test.
        engine: the engine, backed by our model.
        plan: the number of samples per item.
    """

    suite: Suite
    runner: Runner | None
    self_test: SelfTest | None
    engine: GraphEngine
    plan: Plan


def prepare(
    config: RunConfig,
    run: Run,
    backend: Backend,
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
) -> Prepared | str:
    """Build the suite, open the sandbox and run the self-test; or record why nothing is scored.

    Args:
        config: the command's configuration.
        run: the open run.
        backend: the model.
        heldout: the held-out rows, for a suite built from them.
        tokenizer: the tokenizer, with the chat template of training.
    """
    suite = suite_of(config, heldout, tokenizer, backend.max_positions)
    if isinstance(suite, str):
        return suite
    runner = runner_of(config, run) if suite.needs_sandbox else None
    self_test = tested(suite, runner, run)
    if isinstance(self_test, str):
        return self_test
    engine = GraphEngine(backend, tokenizer, generation_of(config.suite, config.eval))
    return Prepared(
        suite=suite,
        runner=runner,
        self_test=self_test,
        engine=engine,
        plan=plan_of(config.eval, suite),
    )


def score(
    config: RunConfig,
    run: Run,
    backend: Backend,
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
    *,
    conditions: Sequence[Condition] = (Condition.BASE, Condition.TUNED),
    prepared: Prepared | None = None,
) -> None:
    """Write scorecard.json and events.jsonl, or record in the manifest why there is none.

    Args:
        config: the command's configuration.
        run: the open run.
        backend: the model.
        heldout: the held-out rows, for a suite built from them.
        tokenizer: the tokenizer, with the chat template of training.
        conditions: the models to score.
        prepared: resources already opened for the run.
    """
    found = prepared or prepare(config, run, backend, heldout, tokenizer)
    if isinstance(found, str):
        _not_scored(run, found)
        return
    events: list[ItemEvent] = []
    figures: dict[str, dict[str, float]] = {}
    for condition in conditions:
        with backend.base_only() if condition is Condition.BASE else nullcontext():
            answered = found.suite.answered(found.engine, str(condition))
            if answered is not None:
                events += answered.events
                figures[str(condition)] = answered.figures
            else:
                events += answer_all(
                    found.suite, found.engine, found.runner, found.plan, str(condition)
                )
    keep(found.suite, events, config, run, found.runner, found.self_test, figures=figures)


def _not_scored(run: Run, why: str) -> None:
    """Record why a run has no scorecard.

    Raises:
        RequestError: the task is evaluate, whose purpose is the scorecard.
    """
    if run.manifest.task == "evaluate":
        raise RequestError(
            "nothing can be scored",
            where="suite",
            found=why,
            expected="a suite that has items for this model, on a machine that can run them",
            remedy="change the suite's settings, or choose another suite",
        )
    run.unknown("scorecard", why)


def sample(
    config: RunConfig,
    run: Run,
    backend: Backend,
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
) -> None:
    """Write samples.json: both models' answers to some held-out rows, if no suite uses the rows.

    Args:
        config: the command's configuration.
        run: the open run.
        backend: the model.
        heldout: the held-out rows.
        tokenizer: the tokenizer, with the chat template of training.
    """
    suite = config.suite.unscored
    if suite is None or suite.items == 0 or not heldout:
        return
    asking = {pair.id: pair for pair in heldout if not pair.is_text}  # equal rows only once
    rows = [asking[one] for one in sorted(asking)][: suite.items]
    if not rows:
        return
    requests = [Request(messages=tuple(messages_of(pair)), seed=config.seed) for pair in rows]
    generation = Generation(max_new_tokens=suite.max_new_tokens, batch_size=len(rows))
    engine = GraphEngine(backend, tokenizer, generation)
    samples: list[Sample] = [
        {
            "item_id": pair.id,
            "prompt": messages_of(pair)[-1]["content"],
            "reference": pair.response,
            "answers": {},
        }
        for pair in rows
    ]
    for condition in (Condition.BASE, Condition.TUNED):
        with backend.base_only() if condition is Condition.BASE else nullcontext():
            for one, said in zip(samples, engine.complete(requests), strict=True):
                if said.problem is None:
                    tokens = said.tokens_out or 0
                    one["answers"][condition.value] = {
                        "text": said.text,
                        "tokens": tokens,
                        "finished": said.is_finished,
                    }
    Samples(max_new_tokens=suite.max_new_tokens, items=samples).write(run.dir.samples)


def score_served(config: RunConfig, run: Run, condition: Condition) -> None:
    """Score the model behind a server, and write the same records.

    Args:
        config: the command's configuration; `eval.base_url` and `eval.model` name the model.
        run: the open run.
        condition: the condition that the model represents.
    """
    from mens_exp.evals.engines import ServerEngine

    settings = config.eval
    assert settings.base_url is not None, "validation has asked for it"
    assert settings.model is not None, "validation has asked for it"
    run.manifest.inputs["served"] = {"base_url": settings.base_url, "model": settings.model}
    engine = ServerEngine(
        base_url=settings.base_url,
        model=settings.model,
        generation=generation_of(config.suite, settings),
        api_key_env=settings.api_key_env,
    )
    score_by(config, run, frozen_suite(config.suite), {condition: engine})


def score_by(config: RunConfig, run: Run, suite: Suite, engines: Mapping[str, Engine]) -> None:
    """Score models behind external engines.

    Args:
        config: the command's configuration.
        run: the open run.
        suite: the suite.
        engines: condition -> its engine.
    """
    runner = runner_of(config, run) if suite.needs_sandbox else None
    self_test = tested(suite, runner, run)
    if isinstance(self_test, str):
        _not_scored(run, self_test)
        return
    events: list[ItemEvent] = []
    for condition, engine in engines.items():
        events += answer_all(suite, engine, runner, plan_of(config.eval, suite), str(condition))
    keep(suite, events, config, run, runner, self_test)


def generation_of(suite: Any, settings: EvalConfig) -> Generation:
    """Return the generation settings of answers."""
    return Generation(
        max_new_tokens=suite.max_new_tokens,
        batch_size=suite.batch_size,
        temperature=settings.temperature,
        top_p=settings.top_p,
    )


def plan_of(settings: EvalConfig, suite: Suite) -> Plan:
    """Return the number of samples per item and of repair attempts per sample."""
    retries = settings.max_retries if suite.retries is None else suite.retries
    return Plan(samples=settings.samples, max_retries=retries, seed=settings.seed)


def suite_of(
    whole: RunConfig, heldout: Sequence[TrainingPair], tokenizer: Tokenizer, max_positions: int
) -> Suite | str:
    """Return the suite, or the reason why there is none.

    Args:
        whole: the command's configuration.
        heldout: the held-out rows, for a suite built from them.
        tokenizer: the tokenizer, with the chat template of training.
        max_positions: maximum number of tokens of the model.
    """
    config = whole.suite
    if not config.spec.scores:
        return f"suite={config.name}"
    if not config.spec.from_rows:
        return frozen_suite(config, calls_functions=whole.task.name == "evaluate")
    cls = suite_class(config.spec)
    return cls.of_rows(config, heldout, tokenizer, max_positions=max_positions)


def planned_suite_digest(config: RunConfig, cache: Path) -> str | None:
    """Return the suite digest of a planned run's future scorecard; None without a suite.

    Raises:
        MensError: the suite cannot be read, or the run would have no scorecard.
    """
    if not config.suite.spec.scores:
        return None
    heldout: Sequence[TrainingPair] = ()
    tokenizer: Any = None  # used only by a suite built from rows
    if config.suite.spec.from_rows:
        heldout = load_rows(config.data, cache).heldout
        tokenizer = planned_tokenizer(config, cache)
    suite = suite_of(config, heldout, tokenizer, shape_of(config.model).max_position_embeddings)
    if isinstance(suite, str):
        raise RequestError(
            "the run would have no scorecard",
            where="suite",
            found=suite,
            expected="a suite with items, or suite=none",
        )
    return graded_digest(suite)


def runner_of(config: RunConfig, run: Run) -> Runner | None:
    """Open the sandbox, or record in the manifest why nothing is executed."""
    from mens_exp.sandbox.opening import limits_of, open_sandbox

    try:
        sandbox = open_sandbox(config.sandbox)
    except MensError as error:
        run.manifest.notes.append(f"nothing that a model wrote was executed: {error}")
        return None
    return Runner(
        sandbox=sandbox,
        limits=limits_of(config.sandbox),
        workers=getattr(config.sandbox, "workers", None),
    )


def tested(suite: Suite, runner: Runner | None, run: Run) -> SelfTest | str | None:
    """Run a suite's self-test; return its result, or the reason why the suite must not score."""
    result = suite.self_test(runner)
    if result is None or result.problem is None:
        return result
    run.manifest.notes.append(f"suite={suite.name} failed its own test: {result.problem}")
    return f"suite={suite.name} failed its own test: {result.problem}"


def keep(
    suite: Suite,
    events: Sequence[ItemEvent],
    config: RunConfig,
    run: Run,
    runner: Runner | None,
    self_test: SelfTest | None,
    *,
    figures: Mapping[str, Mapping[str, float]] | None = None,
) -> None:
    """Write the events and the resulting scorecard.

    Args:
        suite: the evaluated suite.
        events: its item events.
        config: the command's configuration.
        run: the open run.
        runner: the sandbox that executed answers.
        self_test: the result of the suite's self-test.
        figures: condition -> the suite's own figures, in addition to our KPIs.
    """
    settings, models = config.eval, suite.conditions
    here = not models and settings.engine is EngineKind.hf
    generation: dict[str, Any] = {
        **({"conditions": models} if models else {"engine": settings.engine.value}),
        **({"batching": BATCHING} if here else {}),
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        **_limits(config.suite),
        **({"tools": suite.tools} if suite.tools else {}),
    }
    scorecard = to_scorecard(
        suite,
        events,
        plan_of(settings, suite),
        generation,
        sandbox=None if runner is None else runner.kind,
        self_test=self_test,
    )
    for condition, more in (figures or {}).items():
        scorecard.conditions[condition] |= more
    scorecard.metrics = dict(run.manifest.results.get("metrics") or {})
    write_item_events(run.dir.events, events)
    scorecard.write(run.dir.scorecard)
    if settings.keep_passing is not None:
        keep_passing(suite, events, scorecard, config, run, runner)
    run.telemetry.emit(
        "scorecard",
        {"suite": suite.name, "items": scorecard.items, "conditions": scorecard.conditions},
    )


def _limits(suite: SuiteConfig) -> dict[str, Any]:
    values = dataclasses.asdict(suite)
    return {name: values[name] for name in ("max_new_tokens", "batch_size") if name in values}


def prepared_early(
    config: RunConfig,
    run: Run,
    backend: Backend,
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
) -> Prepared | None:
    """Prepare scoring during training; None if nothing is scored before the end.

    Args:
        config: the whole configuration.
        run: the open run.
        backend: the model.
        heldout: the held-out rows, for a suite built from them.
        tokenizer: the tokenizer, with the chat template of training.

    Raises:
        RequestError: the suite cannot score, or cannot score the metric that selects the best
            adapter.
    """
    node = scorecard_of(config)
    if node is None or node.every_n_steps is None:
        return None
    prepared = prepare(config, run, backend, heldout, tokenizer)
    if isinstance(prepared, str):
        raise RequestError(
            "nothing can be scored while training runs",
            where="callbacks.scorecard.every_n_steps",
            found=prepared,
            expected="a suite that can score",
            remedy="choose another suite, or callbacks.scorecard.every_n_steps=null",
        )
    chosen_by = KPIS.get(config.adapter.metric)
    if config.adapter.select is Selection.best and chosen_by is not None:
        runs_nothing = prepared.suite.needs_sandbox and prepared.runner is None
        if runs_nothing and chosen_by.group is KpiGroup.SEMANTIC:
            raise RequestError(
                "nothing that the model writes is executed here, so it is never measured",
                where="adapter.metric",
                found=chosen_by.name,
                expected="parse_rate, or a sandbox that opens",
                remedy="see sandbox in `python -m mens_exp task=doctor`",
            )
    return prepared


def first_items(prepared: Prepared, manifest: Manifest) -> Callable[[int], Measured]:
    """Return a function that scores the tuned model on a number of first items of the suite.

    Args:
        prepared: suite, engine and sandbox.
        manifest: manifest of the run.
    """

    def score(items: int) -> Measured:
        suite = FirstItems(prepared.suite, items)
        return measure(suite, prepared.engine, prepared.runner, prepared.plan, manifest)

    return score
