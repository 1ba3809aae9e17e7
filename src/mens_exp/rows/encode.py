"""Rows to ids and supervision: the one place where masks are made.

Each row is rendered twice under the chat template, without and with its answer; the answer's
text is what the second adds. Prompt, answer and closing are tokenized apart, because that is
how generation meets them: the prompt is encoded alone and the answer follows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.rows.schema import TrainingPair

__all__ = ["ENCODING_VERSION", "Encoded", "TextEncoder", "encode", "messages_of", "prompt_text"]

ENCODING_VERSION = 1  # raise it when the ids or masks of the same row change


class TextEncoder(Protocol):
    """The part of a tokenizer that encoding needs."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        """Render a conversation under the chat template."""

    def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode texts without adding special tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Documents as flat arrays; document ``i`` is ``ids[offsets[i]:offsets[i + 1]]``.

    ``supervised[t]`` says that token ``t`` is learned, that is predicted from those before it.
    ``truncated`` and ``dropped`` count documents that lost tokens, or everything, to the limit.
    """

    ids: np.ndarray  # [tokens] int32
    supervised: np.ndarray  # [tokens] bool
    offsets: np.ndarray  # [documents + 1] int64
    truncated: int
    dropped: int

    def __len__(self) -> int:
        """Count documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each document, ``[documents] int64``."""
        return np.diff(self.offsets)


def messages_of(pair: TrainingPair) -> list[dict[str, str]]:
    """Return the turns before the answer."""
    system = [{"role": "system", "content": pair.system}] if pair.system else []
    return [*system, {"role": "user", "content": pair.prompt}]


def prompt_text(pair: TrainingPair, encoder: TextEncoder) -> str:
    """Render everything before the answer, the opening of the assistant's turn included."""
    return encoder.render(messages_of(pair), add_generation_prompt=True)


def encode(
    pairs: Sequence[TrainingPair], encoder: TextEncoder, *, objective: str, seq_len: int
) -> Encoded:
    """Encode rows for an objective.

    Args:
        pairs: the rows.
        encoder: tokenizer with its chat template.
        objective: ``assistant`` learns the answer and its end marker, ``causal`` every token.
        seq_len: documents are cut on the right to so many tokens; one that keeps no supervised
            token is dropped and counted.

    Raises:
        DataError: the template changes the prompt once an answer follows, or drops the answer.
    """
    prompts = [prompt_text(pair, encoder) for pair in pairs]
    closings = [_closing(pair, prompt, encoder) for pair, prompt in zip(pairs, prompts, strict=True)]
    prompt_ids = encoder.encode_all(prompts)
    answer_ids = encoder.encode_all([answer for answer, _ in closings])
    closing_ids = encoder.encode_all([closing for _, closing in closings])
    special = encoder.special_ids
    documents = [
        _document(prompt, answer, closing, special, everything=objective == "causal")
        for prompt, answer, closing in zip(prompt_ids, answer_ids, closing_ids, strict=True)
    ]
    return _flatten(documents, seq_len)


def _closing(pair: TrainingPair, prompt: str, encoder: TextEncoder) -> tuple[str, str]:
    """Split what the answer adds to the prompt into the answer and what closes it."""
    answered = [*messages_of(pair), {"role": "assistant", "content": pair.response}]
    full = encoder.render(answered, add_generation_prompt=False)
    for answer in (pair.response, pair.response.strip()):
        if full.startswith(prompt + answer):
            return answer, full[len(prompt) + len(answer) :]
    raise DataError(
        "the chat template does not keep prompt and answer as they are",
        where=f"row {pair.id}",
        found=full[max(0, len(prompt) - 40) :][:120],
        expected="the prompt, then the answer",
    )


def _document(
    prompt: list[int], answer: list[int], closing: list[int], special: set[int], *, everything: bool
) -> tuple[list[int], list[bool]]:
    """Join the parts; the end marker is the first control token of the closing."""
    end = next((i + 1 for i, token in enumerate(closing) if token in special), 0)
    ids = prompt + answer + closing
    if everything:
        return ids, [True] * len(ids)
    learned = len(answer) + end
    return ids, [False] * len(prompt) + [True] * learned + [False] * (len(closing) - end)


def _flatten(documents: list[tuple[list[int], list[bool]]], seq_len: int) -> Encoded:
    kept: list[tuple[list[int], list[bool]]] = []
    truncated = dropped = 0
    for ids, learned in documents:
        truncated += len(ids) > seq_len
        if any(learned[1:seq_len]):  # the first token is predicted from nothing
            kept.append((ids[:seq_len], learned[:seq_len]))
        else:
            dropped += 1
    offsets = np.cumsum([0, *(len(ids) for ids, _ in kept)], dtype=np.int64)
    supervised = np.fromiter((x for _, learned in kept for x in learned), bool, offsets[-1])
    supervised[offsets[:-1]] = False
    return Encoded(
        ids=np.fromiter((x for ids, _ in kept for x in ids), np.int32, offsets[-1]),
        supervised=supervised,
        offsets=offsets,
        truncated=truncated,
        dropped=dropped,
    )
