"""The positions of a row's texts in its template, found by rendering probes once per row shape.

Rows of one shape (equal number of exchanges, with or without a system prompt) are rendered alike,
so that a row's text can be assembled from pieces of the template and of the row, and each token
attributed to its pieces. A row with tools has its own shape, because its calls are kept. A
template that inspects the texts may behave differently, so users of a shape compare the resulting
ids with those of the encoding.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from mens_exp.errors import DataError
from mens_exp.rows.answers import answer_of, answer_turn, messages_of
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.rows.answers import TextEncoder

_SENTINEL = re.compile(r"m3xp(\d{4})q")
_REASONED = "</think>"
_PAD = "\n\t \t"  # put around a text to detect trimming by the template


class Role(IntEnum):
    """The author of a token; an answer's end marker is the template's, but has a separate role.

    Tool results count as the user's, because they are input to the model.
    """

    TEMPLATE = 0
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    END_MARKER = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A segment of a rendered row: the template's own text, or one of the row's texts.

    ``strips`` are the characters trimmed before and after: none, or all white space if None.
    ``as_json`` means that the template writes it as a JSON string.
    """

    role: Role
    text: str = ""
    content: int | None = None
    strips: tuple[str | None, str | None] = ("", "")
    as_json: bool = False

    def of(self, contents: list[str]) -> str:
        """Return the segment's text in a row."""
        if self.content is None:
            return self.text
        text, (before, behind) = contents[self.content], self.strips
        if self.as_json:
            return json.dumps(text, ensure_ascii=False)[1:-1]
        text = text if before == "" else text.lstrip(before)
        return text if behind == "" else text.rstrip(behind)


@dataclass(frozen=True, slots=True)
class Shape:
    """The pieces of a document, the number of pieces before generation, and the answer's index."""

    pieces: tuple[Piece, ...]
    prompt: int
    answer: int

    def begins(self, other: Shape) -> bool:
        """Return whether another shape starts with this one, unchanged."""
        mine, theirs = _joined(self.pieces), _joined(other.pieces)
        (*same, closing), there = mine, theirs[len(mine) - 1 : len(mine)]
        if closing.content is not None:
            return mine == theirs[: len(mine)]
        return (
            same == theirs[: len(same)] and bool(there) and there[0].text.startswith(closing.text)
        )


def contents_of(pair: TrainingPair, exchange: int) -> list[str]:
    """Return the texts of a row up to an answer: the system prompt, and those of its turns.

    An answer with tool calls has no text.
    """
    return [text for _, text in _said(pair, exchange)]


def _said(pair: TrainingPair, exchange: int) -> list[tuple[Role, str]]:
    """Return the texts of a row up to an answer, each with its author."""
    system = [] if pair.system is None else [(Role.SYSTEM, pair.system)]
    if pair.is_text:
        return [(Role.ASSISTANT, pair.response)]
    whose = {"assistant": Role.ASSISTANT, "user": Role.USER, "tool": Role.USER}
    turns = [*messages_of(pair, exchange), answer_turn(pair, exchange)][len(system) :]
    return [
        *system,
        *((whose[turn["role"]], turn["content"]) for turn in turns if "tool_calls" not in turn),
    ]


def shape_of_answer(pair: TrainingPair, exchange: int, encoder: TextEncoder) -> Shape | None:
    """Return the shape of a row's document up to an answer.

    Args:
        pair: the row; only its shape matters.
        exchange: the answer that ends the document.
        encoder: the tokenizer with its template.

    Returns:
        The shape; None if the template renders probes in a way that hides them in its own text.
    """
    roles = [role for role, _ in _said(pair, exchange)]
    try:
        probe = _probe(pair, exchange)
        parts = answer_of(probe, exchange, encoder)
        padded = answer_of(_probe(pair, exchange, _PAD), exchange, encoder)
        whole = parts.prompt + parts.body + parts.closing
        spans = list(_calls(probe, exchange, whole, encoder))
    except DataError:
        return None
    if not all(begin >= 0 for begin, _ in spans):
        return None
    flat = list(_pieces(whole, roles, spans, (len(parts.prompt), len(parts.prompt + parts.body))))
    trimmed = _with_trims(
        [piece for _, piece in flat], padded.prompt + padded.body + padded.closing
    )
    if trimmed is None:
        return None
    prompt = sum(start < len(parts.prompt) for start, _ in flat)
    answers = [
        number
        for number, (start, piece) in enumerate(flat)
        if piece.role is Role.ASSISTANT and start >= len(parts.prompt)
    ]
    return Shape(tuple(trimmed), prompt, answers[0]) if len(answers) == 1 else None


def _joined(pieces: tuple[Piece, ...]) -> list[Piece]:
    """Merge adjacent pieces of the template's own text."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.content is None and found[-1].content is None:
            piece = Piece(Role.TEMPLATE, found.pop().text + piece.text)  # noqa: PLW2901
        found.append(piece)
    return found


def _sentinel(number: int) -> str:
    return f"m3xp{number:04d}q"


def _probe(pair: TrainingPair, exchange: int, pad: str = "") -> TrainingPair:
    """Return a row of the same shape with sentinels as texts, each surrounded by padding."""
    marks = iter([f"{pad}{_sentinel(n)}{pad[::-1]}" for n in range(len(_said(pair, exchange)))])
    system = None if pair.system is None else next(marks)
    if pair.conversation is not None:
        held = json.loads(pair.conversation)
        for turn in held["messages"]:
            if "tool_calls" not in turn:
                turn["content"] = next(marks, "behind the answer")
        return replace(
            pair, system=system if pair.system else pair.system, conversation=json.dumps(held)
        )
    texts = list(marks)
    if pair.is_text:
        return TrainingPair(prompt="", response=texts[0])
    *history, last = zip(texts[::2], texts[1::2], strict=True)
    return TrainingPair(
        prompt=last[0],
        response=last[1],
        system=system if pair.system else pair.system,
        history=tuple(history),
        unlearned=pair.unlearned,
    )


def _calls(
    probe: TrainingPair, exchange: int, whole: str, encoder: TextEncoder
) -> Iterator[tuple[int, int]]:
    """Yield start and end of each answer with tool calls, up to one; negative if not found.

    A template may drop reasoning from an earlier answer, even if it is empty.
    """
    for number in range(exchange + 1):
        if "tool_calls" not in answer_turn(probe, number):
            continue
        answer = answer_of(probe, number, encoder)
        begin, body = len(answer.prompt), answer.body
        if not whole.startswith(answer.prompt + body):
            body = body.rpartition(_REASONED)[2].strip()
            told = messages_of(probe, number)[-1]["content"]
            begin = whole.find(body, whole.find(told))
        yield begin, begin + len(body)


def _pieces(
    text: str, roles: list[Role], calls: list[tuple[int, int]], answer: tuple[int, int]
) -> Iterator[tuple[int, Piece]]:
    """Split a text at its sentinels and at the bounds of its answer and of calls.

    Args:
        text: a rendered row of sentinels.
        roles: author of each sentinel.
        calls: start and end of each answer with tool calls.
        answer: start and end of the last answer.

    Yields:
        Each piece, and its start.
    """
    bounds = sorted({0, len(text), *answer, *(place for span in calls for place in span)})
    for begin, end in pairwise(bounds):
        own = Role.ASSISTANT if (begin, end) in calls else Role.TEMPLATE
        at = begin
        for match in _SENTINEL.finditer(text, begin, end):
            if match.start() > at:
                yield at, Piece(own, text[at : match.start()])
            number = int(match[1])
            yield match.start(), Piece(roles[number], content=number)
            at = match.end()
        if at < end:
            yield at, Piece(own, text[at:end])


def _with_trims(pieces: list[Piece], padded: str) -> list[Piece] | None:
    """Determine from the padded rendering what is trimmed from each text."""
    inner = re.escape(_PAD[1:])
    before, behind = (re.escape(json.dumps(pad)[1:-1]) for pad in (_PAD, _PAD[::-1]))
    pattern = "".join(
        re.escape(piece.text)
        if piece.content is None
        else f"(\n?{inner}|{before}|){_sentinel(piece.content)}({inner}\n?|{behind}|)"
        for piece in pieces
    )
    match = re.fullmatch(pattern, padded)
    if match is None:
        return None
    kept = iter(match.groups())
    return [
        piece if piece.content is None else _trimmed(piece, next(kept), next(kept))
        for piece in pieces
    ]


def _trimmed(piece: Piece, before: str, behind: str) -> Piece:
    """Return a row's text with the remaining padding around it."""
    if "\\" in before + behind:
        return replace(piece, as_json=True)
    return replace(piece, strips=(_strips(before), _strips(behind)))


def _strips(kept: str) -> str | None:
    """Return the characters that were trimmed, given the remaining padding."""
    if not kept:
        return None
    return "" if "\n" in kept else "\n"
