"""Rejection sampling: of the answers that a model gave, those that pass, as training rows.

The rows are a function of the events and the suite, so that the same seed gives the same file.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypedDict

from mens_exp.artifacts.digest import canonical_json
from mens_exp.artifacts.scorecard import Condition
from mens_exp.corpus.dedupe import response_key
from mens_exp.errors import MensError
from mens_exp.evals.answer_text import code_of, outside_reasoning
from mens_exp.rows.parse import parse_row

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mens_exp.artifacts.scorecard import ItemEvent
    from mens_exp.evals.suite import Item, Suite
    from mens_exp.rows.schema import TrainingPair

__all__ = ["SamplingCounts", "keep_rows", "sampled_condition"]

_LANGUAGES = {"humaneval": "python", "rust": "rust"}


class SamplingCounts(TypedDict):
    """Counts of the answers by outcome.

    Attributes:
        prompts: items that were asked.
        sampled: answers to them.
        passed: answers that do the task.
        kept: of these, rows that were written.
        repeated: of these, answers that an earlier one of the same prompt equals but for layout.
        over_limit: of these, answers over the limit of a prompt.
        unfinished: of these, answers that were cut at their longest length.
        unusable: of these, answers that make no row, such as blank ones.
        prompts_without_pass: items that no answer passed.
    """

    prompts: int
    sampled: int
    passed: int
    kept: int
    repeated: int
    over_limit: int
    unfinished: int
    unusable: int
    prompts_without_pass: int


@dataclass(kw_only=True, slots=True)
class _Kept:
    """The rows, in the order of the items and their samples, and what became of the rest."""

    rows: list[TrainingPair] = field(default_factory=list)
    passed: int = 0
    without_pass: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


def sampled_condition(events: Sequence[ItemEvent]) -> str:
    """Return whose answers are kept: the tuned model's, where it was asked."""
    conditions = {event["condition"] for event in events}
    return str(Condition.TUNED if Condition.TUNED in conditions else Condition.BASE)


def keep_rows(
    suite: Suite,
    events: Sequence[ItemEvent],
    *,
    most: int,
    provenance: Mapping[str, Any],
    codes: Callable[[Sequence[ItemEvent]], Sequence[str]] | None = None,
) -> tuple[list[TrainingPair], SamplingCounts]:
    """Return the answers that pass as rows, and the counts of all of them.

    Args:
        suite: what was asked.
        events: the answers; those of `sampled_condition` count.
        most: rows of one prompt, at most.
        provenance: of every row; the item and the number of the sample are added.
        codes: returns the code of answers, in the form in which it is compared; None takes the
            code as it stands, which in Python is compared by its syntax tree.
    """
    condition = sampled_condition(events)
    mine: dict[str, list[ItemEvent]] = {item.id: [] for item in suite.items}
    for event in events:
        if event["condition"] == condition:
            mine[event["item_id"]].append(event)
    passing = [e for some in mine.values() for e in some if e["task_success"]]
    texts = list(map(_code, passing)) if codes is None else codes(passing)
    keys = {id(e): response_key(text) for e, text in zip(passing, texts, strict=True)}
    kept = _Kept()
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
        "prompts_without_pass": kept.without_pass,
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
        if not event["finished"]:  # trained on, it would teach not to end
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


def _sample(event: ItemEvent) -> int:
    return event["sample"]


def _code(event: ItemEvent) -> str:
    return code_of(outside_reasoning(event["completion"]))


def _row(
    item: Item, event: ItemEvent, suite: str, provenance: Mapping[str, Any]
) -> TrainingPair | None:
    """Return an answer under the conversation that it answers; None where that makes no row."""
    turns = [*item.messages, {"role": "assistant", "content": event["completion"]}]
    try:
        pair = parse_row({"messages": turns}, item.id)
    except MensError:
        return None
    return dataclasses.replace(
        pair,
        language=_LANGUAGES.get(suite),
        group=f"{suite}/{item.id}",
        provenance=canonical_json(provenance).decode("utf-8"),
    )
