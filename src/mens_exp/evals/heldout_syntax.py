"""suite=heldout_syntax: does what the model writes for held-out prompts parse as Python?

A completion counts as parsed when, after taking the inside of a Markdown fence where there is
one, it parses and defines a function, which every prompt asks for. The denominator is always
all items. Nothing generated is executed.
"""

from __future__ import annotations

import ast
import textwrap
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.scorecard import Condition, ItemEvent, Scorecard
from mens_exp.rows.encode import messages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.backends.protocol import Backend
    from mens_exp.config.suite import HeldoutSyntaxSuite
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["Item", "choose_items", "code_of", "evaluate", "syntax_error", "to_scorecard"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One held-out prompt with its reference."""

    id: str
    prompt: str
    reference: str
    prompt_ids: list[int]


def choose_items(
    heldout: Sequence[TrainingPair],
    tokenizer: Tokenizer,
    suite: HeldoutSyntaxSuite,
    *,
    max_positions: int,
) -> list[Item]:
    """Choose the suite's items: the first by content hash whose reference fits the limit.

    The choice depends on the rows and the tokenizer alone, never on the run's seed.
    """
    rows = sorted(heldout, key=lambda pair: pair.id)
    answers = tokenizer.encode_all([tokenizer.guard(pair.response) for pair in rows])
    prompts = tokenizer.encode_prompts([messages_of(pair) for pair in rows])
    items = [
        Item(id=pair.id, prompt=pair.prompt, reference=pair.response, prompt_ids=prompt)
        for pair, answer, prompt in zip(rows, answers, prompts, strict=True)
        if len(answer) < suite.max_new_tokens
        and len(prompt) + suite.max_new_tokens <= max_positions
    ]
    return items[: suite.items]


def evaluate(
    items: Sequence[Item],
    backend: Backend,
    tokenizer: Tokenizer,
    suite: HeldoutSyntaxSuite,
    condition: Condition,
) -> list[ItemEvent]:
    """Complete every prompt greedily and judge what came back."""
    events: list[ItemEvent] = []
    for start in range(0, len(items), suite.batch_size):
        batch = items[start : start + suite.batch_size]
        outputs = backend.generate(
            [item.prompt_ids for item in batch],
            max_new_tokens=suite.max_new_tokens,
            end_ids=tokenizer.end_ids,
            pad_id=tokenizer.pad_id,
        )
        events += [
            _judge(item, ids, tokenizer, condition)
            for item, ids in zip(batch, outputs, strict=True)
        ]
    return events


def _judge(item: Item, ids: list[int], tokenizer: Tokenizer, condition: Condition) -> ItemEvent:
    completion = tokenizer.decode(ids)
    error = syntax_error(code_of(completion))
    return {
        "item_id": item.id,
        "condition": condition,
        "prompt": item.prompt,
        "reference": item.reference,
        "completion": completion,
        "parses": error is None,
        "finished": bool(ids) and ids[-1] in tokenizer.end_ids,
        "error": error,
        "tokens_in": len(item.prompt_ids),
        "tokens_out": len(ids),
    }


def code_of(completion: str) -> str:
    """Return the inside of the first Markdown fence, or the whole text where there is none."""
    before, fence, rest = completion.partition("```")
    if not fence:
        return textwrap.dedent(before)
    inside, _, _ = rest.partition("```")
    _language, newline, code = inside.partition("\n")
    return textwrap.dedent(code if newline else inside)


def syntax_error(code: str) -> str | None:
    """Say what keeps code from counting as parsed, or None when nothing does."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an invalid escape in generated code is no news
            tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"{type(error).__name__}: {error}"
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if not any(isinstance(node, functions) for node in ast.walk(tree)):
        return "no function is defined"
    return None


def to_scorecard(
    suite: HeldoutSyntaxSuite, items: Sequence[Item], events: Sequence[ItemEvent]
) -> Scorecard:
    """Sum up item events by condition."""
    frozen = [{"id": i.id, "prompt": i.prompt, "reference": i.reference} for i in items]
    conditions: dict[str, dict[str, float | int | None]] = {}
    for condition in dict.fromkeys(event["condition"] for event in events):
        mine = [event for event in events if event["condition"] == condition]
        conditions[str(condition)] = {
            "parse_rate": sum(e["parses"] for e in mine) / len(items),
            "parsed": sum(e["parses"] for e in mine),
            "completed": sum(e["finished"] for e in mine),
            "tokens_out_mean": sum(e["tokens_out"] for e in mine) / len(items),
        }
    return Scorecard(
        suite=suite.name,
        suite_digest=digest({"items": frozen, "max_new_tokens": suite.max_new_tokens}),
        items=len(items),
        conditions=conditions,
    )
