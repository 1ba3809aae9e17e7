"""suite=heldout_syntax: does what the model writes for held-out prompts parse as Python?

A completion counts as parsed when it parses and defines a function, which every prompt asks for; of
several Markdown blocks the last complete one with a function counts. Nothing generated is executed.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import digest
from mens_exp.evals.answer_quality import parsed
from mens_exp.evals.answer_text import code_and_place
from mens_exp.evals.reading import read
from mens_exp.evals.suite import Item
from mens_exp.rows.encode import messages_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.suite import HeldoutSyntaxSuite
    from mens_exp.evals.running import Runner
    from mens_exp.evals.suite import Answer, Judgement, SelfTest
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["HeldoutSyntax", "choose_items", "syntax_error"]

_NOTHING_RUN = "suite=heldout_syntax runs nothing"


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
    ids = [pair.id for pair in heldout]
    order = sorted(range(len(ids)), key=ids.__getitem__)
    items: list[Item] = []
    for start in range(0, len(order), suite.items):
        if len(items) >= suite.items:
            break
        rows = [heldout[number] for number in order[start : start + suite.items]]
        answers = tokenizer.encode_all([tokenizer.guard(pair.response) for pair in rows])
        prompts = tokenizer.encode_prompts([messages_of(pair) for pair in rows])
        items += [
            Item(id=pair.id, messages=tuple(messages_of(pair)), reference=pair.response)
            for pair, answer, prompt in zip(rows, answers, prompts, strict=True)
            if len(answer) < suite.max_new_tokens
            and len(prompt) + suite.max_new_tokens <= max_positions
        ]
    return items[: suite.items]


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldoutSyntax:
    """The suite over chosen items."""

    items: list[Item]
    max_new_tokens: int
    name: str = "heldout_syntax"
    needs_sandbox: bool = False

    @property
    def digest(self) -> str:
        """SHA-256 of items and limit."""
        frozen = [{"id": i.id, "prompt": i.prompt, "reference": i.reference} for i in self.items]
        return digest({"items": frozen, "max_new_tokens": self.max_new_tokens})

    def judge(self, answers: Sequence[Answer], runner: Runner | None) -> list[Judgement]:
        """Parse each answer."""
        del runner
        return [_judge(one.text) for one in answers]

    def self_test(self, runner: Runner | None) -> SelfTest | None:
        """Return None: a reference is any row's answer, whether it is Python or not."""
        del runner
        return None


def _judge(completion: str) -> Judgement:
    code, place = code_and_place(completion, r"\bdef\s")
    error = syntax_error(code)
    return replace(
        read(completion, code),
        compiles=error is None,
        errors=() if error is None else (error,),
        style=place.value,
        unknown=dict.fromkeys(("success", "semantic", "outcome"), _NOTHING_RUN),
    )


def syntax_error(code: str) -> str | None:
    """Say what keeps code from counting as parsed, or None when nothing does."""
    tree = parsed(code)
    if isinstance(tree, str):
        return tree
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    if not any(isinstance(node, functions) for node in ast.walk(tree)):
        return "no function is defined"
    return None
