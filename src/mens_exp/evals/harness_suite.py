"""suite=lm_eval: tasks of EleutherAI's lm-evaluation-harness from user-provided files.

The harness builds prompts, filters answers and computes metrics. It evaluates our model or, in the
self-test, a stand-in that knows every target. Per-item results become our events; aggregate results
go into the scorecard as ``<task>/<metric>``.
"""

from __future__ import annotations

import io
import itertools
import logging
import math
import random
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mens_exp.artifacts.digest import digest
from mens_exp.errors import ConfigError, DataError, MensError, MissingExtra
from mens_exp.evals.attempts import judged_once
from mens_exp.evals.engines import Completion
from mens_exp.evals.harness_files import read_task_files
from mens_exp.evals.suite import Answered, Item, Judgement, SelfTest, Suite
from mens_exp.planning.preflight import writable_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.config.suite import LmEvalSuite
    from mens_exp.evals.engines import GraphEngine
    from mens_exp.evals.harness_model import Asked
    from mens_exp.evals.suite import Answer, Runner

_FAR: Final = -100.0  # nats; the log-likelihood of a wrong text


class Known:
    """A mock model for self-tests, which knows every target and answers right or wrong."""

    rank, world_size = 0, 1
    tokenizer_name = "none"

    def __init__(self, tasks: dict[str, Any], *, is_right: bool) -> None:
        """Set the harness's tasks by name, and whether to answer right."""
        self.tasks, self.is_right = tasks, is_right

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Join the turns."""
        del add_generation_prompt
        return "\n".join(turn["content"] for turn in chat_history)

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Answer with the target or with an empty text."""
        return [self._target(one) if self.is_right else "" for one in requests]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each text in nats, and whether greedy decoding gives it."""
        said = [self._is_target(one) == self.is_right for one in requests]
        return [(0.0, True) if one else (_FAR, False) for one in said]

    def _target(self, request: Any) -> str:
        task = self.tasks[request.task_name]
        target = task.doc_to_target(request.doc)
        if task.config.doc_to_choice is not None and isinstance(target, int):
            return str(task.doc_to_choice(request.doc)[target])
        return str(target[0] if isinstance(target, list) else target)

    def _is_target(self, request: Any) -> bool:
        task = self.tasks[request.task_name]
        if task.OUTPUT_TYPE != "multiple_choice":
            return True
        gold = (task.doc_to_text if task.multiple_input else task.doc_to_target)(request.doc)
        choices = task.doc_to_choice(request.doc)
        place = request.idx % len(choices)  # the choices are repeated without a context
        return any(
            one in {place, choices[place]} for one in (gold if isinstance(gold, list) else [gold])
        )


_NO_CODE: Final = "suite=lm_eval judges texts, not code"
_OF_CODE: Final = (
    *("compiles", "canonical", "strict", "placeholder_hits", "trivial", "richness"),
    *("anti_stub", "outcome", "semantic"),
)


def event_of(
    task: Any,
    first: dict[str, Any],
    asked: Asked,
    metric: str | None,
    condition: str,
) -> ItemEvent:
    """Convert the harness's result for one document to our event.

    Args:
        task: the harness's task.
        first: its sample of the document with the first filter.
        asked: the cost of the document.
        metric: the metric that decides success; None if there is none.
        condition: the model's name in the events.
    """
    name = task.config.task
    value = None if metric is None else first.get(metric)
    success = None if not isinstance(value, int | float) else bool(value == 1)
    unknown = dict.fromkeys(_OF_CODE, _NO_CODE)
    if success is None:
        unknown["success"] = f"no metric of {name} says right or wrong; see suite.metric"
    is_choice = task.OUTPUT_TYPE == "multiple_choice"
    # With multiple inputs, the choices are contexts that share one continuation.
    shown = 0 if is_choice and task.multiple_input else -1
    most = len(task.doc_to_choice(first["doc"])) if is_choice else 0
    choices = [str(one[shown]) for one in first["arguments"][:most]]
    completion = Completion(
        text=_chosen(choices, first["resps"]) if is_choice else _text(first["resps"]),
        tokens_in=asked.tokens_in,
        tokens_out=asked.tokens_out,
        is_finished=asked.is_finished,
        latency_ms=asked.latency_ms,
    )
    target = first["target"]
    if is_choice and isinstance(target, int) and 0 <= target < len(choices):
        target = choices[target]
    prompt = str(first["arguments"][0][0])
    return judged_once(
        item_of(f"{name}/{first['doc_id']}", prompt, str(target), name),
        completion,
        Judgement(
            success=success,
            errors=() if success is not False else (f"{metric} is {value}",),
            unknown=unknown,
        ),
        condition,
    )


def item_of(name: str, prompt: str, reference: str, task: str) -> Item:
    """Return a document as our item."""
    messages = ({"role": "user", "content": prompt},)
    return Item(id=name, messages=messages, reference=reference, group=task)


def by_document(samples: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the samples of each document, one for each filter, in the task's order."""
    found: dict[int, list[dict[str, Any]]] = {}
    for sample in samples:
        found.setdefault(sample["doc_id"], []).append(sample)
    return list(found.values())


def _chosen(choices: Sequence[str], responses: Sequence[Any]) -> str:
    likelihoods = [one[0][0] for one in responses]
    return choices[max(range(len(choices)), key=likelihoods.__getitem__)]


def _text(responses: Sequence[Any]) -> str:
    first = responses[0][0]
    return first if isinstance(first, str) else ""


def figures_of(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Return the harness's aggregate metrics: only numbers, without standard errors."""
    figures = {}
    for task, values in results.items():
        for key, value in values.items():
            metric, _, chosen = key.partition(",")
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not chosen or metric.endswith("_stderr") or not is_number:
                continue
            if math.isfinite(value):
                shown = metric if chosen == "none" else f"{metric}@{chosen}"
                figures[f"{task}/{shown}"] = float(value)
    return figures


# Metrics that decide an item's success, in order of preference.
_RIGHT: Final = ("exact_match", "acc", "em", "acc_norm", "acc_bytes", "acc_mutual_info")
_SEEDS: Final = (0, 1234, 1234)  # the harness's defaults for random, numpy and examples


def files_of(config: LmEvalSuite, *, calls_functions: bool) -> str:
    """Read the task files without running any code; return their digest.

    Raises:
        MissingExtra: the harness is not installed.
        MensError: a file cannot be used, or a named task does not exist.
    """
    if find_spec("lm_eval") is None:
        raise MissingExtra(
            "lm-evaluation-harness is not installed",
            where="suite",
            found="lm_eval",
            remedy="run: pip install 'mens-exp[lm-eval]'",
        )
    assert config.path is not None, "validation has asked for it"
    files = read_task_files(Path(config.path).expanduser(), calls_functions=calls_functions)
    unknown = [name for name in config.tasks or () if name not in files.names]
    if unknown:
        raise ConfigError(
            "is not in any task file",
            where="suite.tasks",
            found=", ".join(unknown),
            expected=f"one of {', '.join(sorted(files.names)[:20])}",
        )
    chosen = sorted(config.tasks) if config.tasks else list(files.tasks)
    settings = {
        name: getattr(config, name)
        for name in ("items", "num_fewshot", "chat_template", "metric", "max_new_tokens")
    }
    return digest(
        {
            "files": files.sha256,
            "tasks": chosen,
            "settings": settings,
            "harness": version("lm_eval"),
        }
    )


def lm_eval_suite(config: LmEvalSuite, cache: Path, *, calls_functions: bool) -> Harness:
    """Load the tasks and their data.

    Args:
        config: the suite's settings.
        cache: directory for the data's Arrow files.
        calls_functions: whether Python that task files name may be run in this process.

    Raises:
        MissingExtra: the harness is not installed.
        DataError: it cannot load them.
        MensError: a file cannot be used.
    """
    sha256 = files_of(config, calls_functions=calls_functions)
    assert config.path is not None, "validation has asked for it"
    path = Path(config.path).expanduser()
    with _alone():
        import datasets
        from lm_eval.tasks import TaskManager

        datasets.config.HF_DATASETS_CACHE = str(cache / "datasets")
        try:
            manager = TaskManager(include_path=str(path), include_defaults=False)
            loaded = manager.load(config.tasks or list(manager.all_subtasks))
            for task in loaded["tasks"].values():
                if config.num_fewshot is not None:
                    task.set_config(key="num_fewshot", value=config.num_fewshot)
                elif task.get_config("num_fewshot") is None:
                    task.set_config(key="num_fewshot", value=0)
                len(task.eval_docs)
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
            raise DataError(
                "the harness cannot load the tasks", where=str(path), found=found[:500]
            ) from error
    for name, task in loaded["tasks"].items():
        _refuse_own_answers(name, task)
    return Harness(config=config, loaded=loaded, digest=sha256)


def _refuse_own_answers(name: str, task: Any) -> None:
    """Refuse a task in which an item may be among its own few-shot examples.

    The harness excludes it only if the setting of the examples' split names the evaluated split.
    """
    config, examples = task.config, task.fewshot_cfg
    asked = config.test_split if task.has_test_docs() else config.validation_split
    drawn = examples.split or config.training_split or config.validation_split or asked
    is_given = examples.split is None and examples.samples is not None
    if not config.num_fewshot or is_given or drawn != asked or examples.split == config.test_split:
        return
    raise DataError(
        "an item's own answer may be among its few-shot examples",
        where=f"task {name}: fewshot_split",
        found=f"num_fewshot: {config.num_fewshot}, examples of the split {asked}, which is asked",
        expected="other rows, or the name of test_split, which leaves each item out of its own",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Harness(Suite):
    """The loaded tasks; the harness itself prompts the model and grades its answers."""

    config: LmEvalSuite
    loaded: Any
    digest: str
    name: str = "lm_eval"

    @classmethod
    def opened(cls, settings: LmEvalSuite, *, calls_functions: bool) -> Harness:
        """Load the tasks and their data."""
        return lm_eval_suite(settings, writable_cache(), calls_functions=calls_functions)

    @classmethod
    def check(cls, settings: LmEvalSuite, *, calls_functions: bool) -> None:
        """Read the task files without running any code."""
        files_of(settings, calls_functions=calls_functions)

    @property
    def tasks(self) -> dict[str, Any]:
        """The single tasks, by name."""
        tasks: dict[str, Any] = self.loaded["tasks"]
        return tasks

    @property
    def items(self) -> list[Item]:
        """An item for each document; only its event has the few-shot examples and chat template."""
        return [
            item_of(
                f"{name}/{number}", str(task.doc_to_text(doc)), str(task.doc_to_target(doc)), name
            )
            for name, task in self.tasks.items()
            for number, doc in enumerate(itertools.islice(task.eval_docs, self.config.items))
        ]

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Refuse: `answered` grades answers as it generates them."""
        del answers, runner
        raise AssertionError("the harness asks and judges by itself")

    def answered(self, engine: GraphEngine, condition: str) -> Answered:
        """Evaluate our model on every document of every task; see :meth:`asked`."""
        from mens_exp.evals.harness_model import GraphModel

        model = GraphModel(
            engine.backend,
            engine.tokenizer,
            max_new_tokens=self.config.max_new_tokens,
            batch_size=self.config.batch_size,
        )
        return self.asked(model, condition)

    def asked(self, model: Any, condition: str) -> Answered:
        """Evaluate a model on every document of every task.

        Args:
            model: a `GraphModel`.
            condition: the model's name in the events.

        Raises:
            DataError: a task cannot be asked or judged.
        """
        model.asked.clear()
        found = self._run(model)
        events = [
            # Of several filters, the first in the task file counts.
            event_of(
                self.tasks[name],
                samples[0],
                model.asked[name, samples[0]["doc_id"]],
                self.metric_of(name),
                condition,
            )
            for name, of_task in found["samples"].items()
            for samples in by_document(of_task)
        ]
        return Answered(events=events, figures=figures_of(found["results"]))

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Let the tasks grade their own targets, and answers that are empty or wrong.

        Tasks graded by user-provided Python and tasks that only measure likelihood are skipped,
        because their targets need not be answers.
        """
        del runner
        testable = {n: t for n, t in self.tasks.items() if self._is_testable(n)}
        if not testable:
            return None
        right = self._judged(Known(testable, is_right=True), testable)
        wrong = self._judged(Known(testable, is_right=False), testable)
        return SelfTest(
            references={"target": len(right)},
            failed={"target": [name for name, ok in right.items() if not ok]},
            stubs=len(wrong),
            stubs_passed=[name for name, ok in wrong.items() if ok],
        )

    def _judged(self, model: Any, tasks: dict[str, Any]) -> dict[str, bool]:
        found = self._run(model, tasks)["samples"]
        return {
            f"{name}/{samples[0]['doc_id']}": any(
                sample.get(self.metric_of(name) or "") == 1 for sample in samples
            )
            for name in tasks
            for samples in by_document(found[name])
        }

    def _is_testable(self, name: str) -> bool:
        config = self.tasks[name].config
        return (
            config.process_results is None
            and config.output_type != "loglikelihood_rolling"
            and self.metric_of(name) is not None
        )

    def metric_of(self, name: str) -> str | None:
        """Return the metric that decides the success of a task's items; None if there is none."""
        known = self.tasks[name].higher_is_better()
        wanted = [self.config.metric] if self.config.metric else _RIGHT
        return next((one for one in wanted if one in known), None)

    def _run(self, model: Any, tasks: dict[str, Any] | None = None) -> Any:
        from lm_eval.evaluator import evaluate

        only = self.loaded if tasks is None else {"tasks": tasks, "groups": {}, "group_map": {}}
        with _alone():
            for task in only["tasks"].values():
                # Examples are drawn during evaluation; the seed gives every model the same ones.
                task.set_fewshot_seed(seed=_SEEDS[2])
            try:
                return evaluate(
                    lm=model,
                    task_dict=only,
                    limit=self.config.items,
                    bootstrap_iters=0,
                    log_samples=True,
                    apply_chat_template=self.config.chat_template,
                    fewshot_as_multiturn=self.config.chat_template,
                )
            except MensError:
                raise
            except Exception as error:
                found = f"{type(error).__name__}: {error}"
                raise DataError(
                    "the harness cannot ask or judge the tasks",
                    where="suite.path",
                    found=found[:500],
                ) from error


@contextmanager
def _alone() -> Iterator[None]:
    """Suppress the harness's output, and isolate its random state from ours."""
    names = [logging.getLogger(name) for name in ("lm_eval", "datasets", "evaluate")]
    levels = [logger.level for logger in names]
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # used by the harness
    random.seed(_SEEDS[0])
    np.random.seed(_SEEDS[1])  # noqa: NPY002  # likewise
    for logger in names:
        logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002  # likewise
        for logger, level in zip(names, levels, strict=True):
            logger.setLevel(level)
