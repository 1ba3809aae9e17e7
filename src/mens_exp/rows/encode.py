"""Rows to ids and supervision: the one place where masks are made.

Each row is rendered twice under the chat template, without and with its answer; the answer's
text is what the second adds. Generation encodes the prompt alone and the answer follows it, so
the ids must begin with those of the prompt alone: the whole text is tokenized where that keeps
the seams, and the parts apart where a token would straddle one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.rows.schema import TrainingPair

__all__ = ["ENCODING_VERSION", "Encoded", "TextEncoder", "encode", "messages_of", "prompt_text"]

ENCODING_VERSION = 2  # raise it when the ids or masks of the same row change
_OBJECTIVES = ("assistant", "causal")


class TextEncoder(Protocol):
    """The part of a tokenizer that encoding needs."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    @property
    def eos_id(self) -> int | None:
        """Id of the end-of-sequence token, where there is one."""

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
    system = [{"role": "system", "content": pair.system}] if pair.system is not None else []
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
        DataError: the template changes the prompt once an answer follows, or drops the answer,
            or nothing would mark the answer's end.
        ConfigError: an unknown objective.
    """
    if objective not in _OBJECTIVES:
        raise ConfigError(
            "unknown labelling rule",
            where="objective.labels",
            found=objective,
            expected=expected_name(objective, _OBJECTIVES),
        )
    texts = [_parts(pair, encoder) for pair in pairs]
    special = encoder.special_ids
    documents = []
    for pair, ids in zip(pairs, _ids(texts, encoder), strict=True):
        document = _document(*ids, special, encoder.eos_id)
        if document is None:
            raise DataError(
                "nothing marks the end of an answer, so its end could not be learned",
                where=f"row {pair.id}",
                expected="a chat template with an end marker, or a tokenizer with an eos_token",
            )
        tokens, learned = document
        documents.append((tokens, [True] * len(tokens) if objective == "causal" else learned))
    return _flatten(documents, seq_len)


def _parts(pair: TrainingPair, encoder: TextEncoder) -> tuple[str, str, str]:
    """Render a row, and split it into prompt, answer and what closes the answer.

    White space that the template puts before the answer belongs to it: it is generated too.
    """
    prompt = prompt_text(pair, encoder)
    answered = [*messages_of(pair), {"role": "assistant", "content": pair.response}]
    full = encoder.render(answered, add_generation_prompt=False)
    rest = full.removeprefix(prompt) if full.startswith(prompt) else ""
    for answer in (pair.response, pair.response.strip()):
        lead, found, closing = rest.partition(answer)
        if found and not lead.strip():
            return prompt, lead + answer, closing
    raise DataError(
        "the chat template does not keep prompt and answer as they are",
        where=f"row {pair.id}",
        found=full[max(0, len(prompt) - 40) :][:120],
        expected="the prompt, then the answer",
    )


def _ids(
    texts: Sequence[tuple[str, str, str]], encoder: TextEncoder
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Tokenize parts: as one text where no token straddles a seam, else apart."""
    prompts = encoder.encode_all([prompt for prompt, _, _ in texts])
    answered = encoder.encode_all([prompt + answer for prompt, answer, _ in texts])
    whole = encoder.encode_all(["".join(parts) for parts in texts])
    for (_, answer, closing), before, until, ids in zip(
        texts, prompts, answered, whole, strict=True
    ):
        start, end = len(before), len(until)
        if ids[:start] == before and ids[:end] == until:
            yield before, ids[start:end], ids[end:]
        else:
            answer_ids, closing_ids = encoder.encode_all([answer, closing])
            yield before, answer_ids, closing_ids


def _document(
    prompt: list[int],
    answer: list[int],
    closing: list[int],
    special: set[int],
    eos_id: int | None,
) -> tuple[list[int], list[bool]] | None:
    """Join the parts; learned are the answer and what closes it, to the first control token.

    A closing without one ends with the end-of-sequence token, or generation would never stop.
    """
    end = next((i + 1 for i, token in enumerate(closing) if token in special), None)
    if end is None:
        if eos_id is None:
            return None
        closing = [*closing, eos_id]
        end = len(closing)
    learned = len(answer) + end
    mask = [False] * len(prompt) + [True] * learned + [False] * (len(closing) - end)
    return prompt + answer + closing, mask


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
