"""Generate, grade and repair answers, and aggregate the events into a scorecard.

The module also makes a small scorecard of a model in training, from the first items of a suite.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.metrics import METRICS, own_metric
from mens_exp.artifacts.scorecard import EVENT_VERSION, Condition, Scorecard
from mens_exp.errors import RequestError
from mens_exp.evals.completion_styles import GRADING
from mens_exp.evals.engines import Request, seed_of
from mens_exp.evals.kpis import kpi_like, summarise
from mens_exp.evals.observations import kpi_named, observations, scores
from mens_exp.evals.suite import Answer, Suite

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.evals.engines import Completion, Engine
    from mens_exp.evals.observations import Score
    from mens_exp.evals.suite import Item, Judgement, Runner, SelfTest
    from mens_exp.tokenizer.templates import Message


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The number of attempts at each item.

    Attributes:
        samples: number of independent answers to each item.
        max_retries: maximum number of repairs of an answer.
        seed: seed of sampling.
    """

    samples: int = 1
    max_retries: int = 0
    seed: int = 0


@dataclass(kw_only=True, slots=True)
class _Sample:
    """One sample of an item, its attempts so far, and whether no further attempt follows."""

    item: Item
    number: int
    messages: tuple[Message, ...]
    completions: list[Completion] = field(default_factory=list)
    judgements: list[Judgement] = field(default_factory=list)
    valid_ms: float | None = None
    is_over: bool = False


def repair_turns(completion: str, errors: Sequence[str]) -> tuple[Message, Message]:
    """Return the turns that ask for a repair: the answer, then its errors.

    They follow the previous prompt, as in REFERENCE section 10.
    """
    told = "\n".join(errors) or "it does not do the task"
    return (
        {"role": "assistant", "content": completion},
        {"role": "user", "content": f"Errors:\n{told}\n\nRegenerate only corrected code."},
    )


def answer_all(
    suite: Suite, engine: Engine, runner: Runner | None, plan: Plan, condition: str
) -> list[ItemEvent]:
    """Generate and grade answers for every item of a suite.

    Args:
        suite: the suite; its items keep their order.
        engine: the model.
        runner: executes answers; None executes none.
        plan: numbers of samples and repairs.
        condition: the model's name in the events.

    Returns:
        One event for each sample of each item.
    """
    samples = [
        _Sample(item=item, number=number, messages=item.messages)
        for item in suite.items
        for number in range(plan.samples)
    ]
    pending = samples
    for attempt in range(plan.max_retries + 1):
        if not pending:
            break
        _attempt(suite, engine, runner, pending, [_request(one, plan, attempt) for one in pending])
        pending = [one for one in pending if not one.is_over]
    return [_event(one, condition) for one in samples]


def judged_once(
    item: Item, completion: Completion, judgement: Judgement, condition: str
) -> ItemEvent:
    """Return the event of an item that was answered once, outside the suite's engine."""
    sample = _Sample(item=item, number=0, messages=item.messages)
    sample.completions.append(completion)
    sample.judgements.append(judgement)
    sample.valid_ms = completion.latency_ms if judgement.is_valid else None
    return _event(sample, condition)


def _request(sample: _Sample, plan: Plan, attempt: int) -> Request:
    if attempt:
        turns = repair_turns(sample.completions[-1].text, sample.judgements[-1].errors)
        sample.messages = (*sample.messages, *turns)
    return Request(
        messages=sample.messages,
        seed=seed_of(plan.seed, sample.item.id, sample.number, attempt),
        stop=sample.item.stop,
    )


def _attempt(
    suite: Suite,
    engine: Engine,
    runner: Runner | None,
    samples: list[_Sample],
    requests: list[Request],
) -> None:
    asked = list(zip(samples, engine.complete(requests), strict=True))
    began = time.perf_counter()
    answers = [Answer(item=one.item, text=said.text) for one, said in asked]
    judgements = suite.judge(answers, runner)
    judging_ms = 1000 * (time.perf_counter() - began)
    for (one, completion), judgement in zip(asked, judgements, strict=True):
        # A prompt that is too long only gets longer with the errors of a repair.
        one.is_over = completion.problem is not None or judgement.is_valid
        if completion.problem is not None and one.completions:
            continue  # there was no room for a repair, so the previous answer is final
        one.completions.append(completion)
        one.judgements.append(judgement)
        if judgement.is_valid:
            waited = _sum([each.latency_ms for each in one.completions])
            one.valid_ms = None if waited is None else waited + judging_ms


def _event(sample: _Sample, condition: str) -> ItemEvent:
    first, last = sample.judgements[0], sample.judgements[-1]
    completion = sample.completions[-1]
    depth = next((i for i, one in enumerate(sample.judgements) if one.is_valid), None)
    errors = [_errors(*pair) for pair in zip(sample.completions, sample.judgements, strict=True)]
    values: dict[str, Any] = {
        "tokens_in": _sum([one.tokens_in for one in sample.completions]),
        "tokens_out": _sum([one.tokens_out for one in sample.completions]),
        "latency_ms": _sum([one.latency_ms for one in sample.completions]),
        "compile_pass_1": first.compiles,
        "compile_pass_n": _any([one.compiles for one in sample.judgements]),
        "canonical_pass": last.canonical,
        "strictness": last.strict,
        "pass_1": first.success,
        "task_success": _any([one.success for one in sample.judgements]),
        "semantic_task_success": _any([one.semantic for one in sample.judgements]),
        "repair_depth": depth,
        "time_to_first_valid_ms": sample.valid_ms,
        "placeholder_marker_hits": last.placeholder_hits,
        "trivial_placeholder_output": last.trivial,
        "richness": last.richness,
        "anti_stub_pass": last.anti_stub,
        "outcome": last.outcome,
        "style": last.style,
        **_lint(last),
    }
    event = {
        "version": EVENT_VERSION,
        "item_id": sample.item.id,
        "condition": condition,
        "sample": sample.number,
        "group": sample.item.group,
        "prompt": sample.item.prompt,
        "reference": sample.item.reference,
        "completion": completion.text,
        "parses": last.compiles,
        "finished": completion.is_finished,
        "error": "\n".join(errors[-1]) or None,
        "attempts": len(sample.completions),
        "repair_stalled": any(one and one == after for one, after in pairwise(errors)),
        "error_count": sum(map(len, errors)),
        **values,
        **({"values": _own_values(last)} if last.values else {}),
        "unknown": {
            name: _reason(name, last.unknown if name in _OF_THE_LAST else first.unknown, depth)
            for name, value in values.items()
            if value is None
        },
    }
    return cast("ItemEvent", event)


def _own_values(last: Judgement) -> dict[str, float]:
    """Return an answer's KPIs of a user-defined suite.

    Raises:
        RequestError: a name equals or resembles a built-in one, or a value is not finite.
    """
    found = {name: float(value) for name, value in last.values.items()}
    for name, value in found.items():
        own_metric(name)
        if (ours := kpi_like(name)) is not None:
            raise RequestError(
                "a KPI of a suite has the name of a built-in KPI, or nearly so",
                where="Judgement.values",
                found=name,
                expected=f"another name than {ours}",
                remedy=f"call it own/{name.rpartition('/')[2]}, say",
            )
        if not math.isfinite(value):
            raise RequestError(
                "a KPI of an answer is not a finite number",
                where=f"Judgement.values: {name}",
                found=value,
                expected="a finite number",
                remedy="leave it out where the answer has none",
            )
    return found


def _lint(last: Judgement) -> dict[str, Any]:
    """Return the extra fields of a suite with a linter; empty for others."""
    if last.lint_clean is None and "lint_clean" not in last.unknown:
        return {}
    found = last.lints
    return {
        "lint_clean": last.lint_clean,
        "lint_warnings": None if found is None else len(found),
        **({} if found is None else {"lints": list(found)}),
    }


def _errors(completion: Completion, judgement: Judgement) -> tuple[str, ...]:
    return (completion.problem,) if completion.problem is not None else judgement.errors


def _any(values: list[bool | None]) -> bool | None:
    return None if any(value is None for value in values) else any(values)


# Field of an event -> the judgement's field that it is taken from.
_OF_JUDGEMENT = {
    "compile_pass_1": "compiles",
    "compile_pass_n": "compiles",
    "canonical_pass": "canonical",
    "strictness": "strict",
    "pass_1": "success",
    "task_success": "success",
    "semantic_task_success": "semantic",
    "placeholder_marker_hits": "placeholder_hits",
    "trivial_placeholder_output": "trivial",
    "richness": "richness",
    "anti_stub_pass": "anti_stub",
    "outcome": "outcome",
    "style": "style",
    "lint_clean": "lint_clean",
    "lint_warnings": "lints",
}
# Reasons for null are the same in all attempts, except here: a repair may have a style.
_OF_THE_LAST = frozenset({"style"})


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _reason(name: str, unknown: dict[str, str], depth: int | None) -> str:
    if depth is None and name in {"repair_depth", "time_to_first_valid_ms"}:
        return "no attempt is valid"
    if name not in _OF_JUDGEMENT:
        return "the answers were made before, and nobody counted"
    return unknown.get(_OF_JUDGEMENT[name], "not measured by this suite")


def graded_digest(suite: Suite) -> str:
    """Return the identity of a suite in scorecards and in cycles that register it."""
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
    """Aggregate events by condition.

    Args:
        suite: the suite that was answered.
        events: one for each sample of each item under each condition.
        plan: numbers of samples and repairs.
        generation: generation settings, for the record.
        sandbox: kind of the sandbox; None if no answer was executed.
        self_test: result of the suite's self-test.
    """
    conditions = {}
    unknown: dict[str, str] = {}
    for condition in dict.fromkeys(str(event["condition"]) for event in events):
        mine = [event for event in events if event["condition"] == condition]
        conditions[condition], why = summarise(
            mine, items=len(suite.items), samples=plan.samples, max_retries=plan.max_retries
        )
        unknown |= {f"conditions.{condition}.{name}": reason for name, reason in why.items()}
    own = {name for event in events for name in event.get("values") or {}}
    return Scorecard(
        suite=suite.name,
        suite_digest=graded_digest(suite),
        items=len(suite.items),
        conditions=conditions,
        declared={name: declaration(name) for name in own},
        generation={**generation, **dataclasses.asdict(plan), "grading": GRADING},
        sandbox=sandbox,
        self_test=None if self_test is None else dataclasses.asdict(self_test),
        unknown=unknown,
    )


def declaration(name: str) -> dict[str, str]:
    """Return a user-defined suite's declaration of a KPI (``@declares``)."""
    about = own_metric(name)
    return {"unit": about.unit, "direction": about.direction, "note": about.note}


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The scores of the items.

    Attributes:
        items: number of items.
        values: metric ``eval/<kpi>`` -> value.
        unknown: metric that could not be measured -> reason.
        events: one for each sample of each item.
    """

    items: int
    values: dict[str, float]
    unknown: dict[str, str]
    events: list[ItemEvent]


class FirstItems(Suite):
    """A suite restricted to its first items, with unchanged grading."""

    def __init__(self, suite: Suite, items: int) -> None:
        """Use the first ``items`` of ``suite``, or all if it has fewer."""
        self._suite = suite
        self._items = suite.items[:items]

    @property
    def name(self) -> str:
        """The name of the whole suite."""
        return self._suite.name

    @property
    def digest(self) -> str:
        """The digest of the whole suite."""
        return self._suite.digest

    @property
    def items(self) -> Sequence[Item]:
        """The first items."""
        return self._items

    @property
    def needs_sandbox(self) -> bool:
        """Whether judging executes what models write."""
        return self._suite.needs_sandbox

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Judge as the whole suite does."""
        return self._suite.judge(answers, runner)

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Test the whole suite."""
        return self._suite.self_test(runner)


def measure(
    suite: FirstItems, engine: Engine, runner: Runner | None, plan: Plan, manifest: Manifest
) -> Measured:
    """Generate and grade answers, and aggregate them by KPI as a comparison of runs does.

    Args:
        suite: the items.
        engine: the tuned model.
        runner: executes answers; None executes none.
        plan: numbers of samples and repairs.
        manifest: manifest of the run.
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
            name: _missing_reason(name, one, events)
            for name, one in sorted(ours.items())
            if one.mean is None
        },
        events=events,
    )


def _missing_reason(metric: str, score: Score, events: Sequence[ItemEvent]) -> str:
    field = kpi_named(metric.removeprefix("eval/")).field
    told = (event["unknown"].get(field or "") for event in events)
    return next((reason for reason in told if reason), score.why or "not measured")
