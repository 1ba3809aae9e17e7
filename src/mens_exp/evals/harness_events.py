"""Documents of lm-evaluation-harness as our items, events and figures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from mens_exp.evals.attempts import judged_once
from mens_exp.evals.generation import Completion
from mens_exp.evals.suite import Item, Judgement

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.evals.harness_model import Asked

__all__ = ["by_document", "event_of", "figures_of", "item_of"]

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
    """Return what the harness says of one document as our event.

    Args:
        task: the harness's.
        first: its sample of the document, of the first filter.
        asked: what the model was asked, and took for it.
        metric: what says right or wrong; None where nothing does.
        condition: what the model is called.
    """
    name = task.config.task
    value = None if metric is None else first.get(metric)
    success = None if not isinstance(value, int | float) else bool(value == 1)
    unknown = dict.fromkeys(_OF_CODE, _NO_CODE)
    if success is None:
        unknown["success"] = f"no metric of {name} says right or wrong; see suite.metric"
    is_choice = task.OUTPUT_TYPE == "multiple_choice"
    # Where the choices are contexts of one ending, these are what differs.
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
    """Return what the harness makes of all documents, numbers alone, without its errors."""
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
