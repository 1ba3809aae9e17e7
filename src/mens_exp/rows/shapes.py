"""Where a template puts the texts of a row: found once for each shape of row, by rendering probes.

Rows of one shape (as many exchanges, with or without a system prompt) are rendered alike, so that
a row's text can be put together of the template's own pieces and the row's, each token told by the
pieces that it lies in. A template that looks into the texts may do otherwise; whoever uses a shape
holds the ids that it gives against those of the encoding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from mens_exp.errors import DataError
from mens_exp.rows.answers import answer_of
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.rows.answers import TextEncoder

__all__ = ["Piece", "Role", "Shape", "contents_of", "shape_of_answer"]

_SENTINEL = re.compile(r"m3xp(\d{4})q")
_PAD = "\n\t \t"  # around a text, to see what the template trims


class Role(IntEnum):
    """Who wrote a token; an answer's end marker is the template's, and told apart."""

    TEMPLATE = 0
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    END_MARKER = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a rendered row: the template's own text, or one of the row's.

    ``strips`` are the characters trimmed before and behind: none, all white space where None.
    """

    role: Role
    text: str = ""
    content: int | None = None
    strips: tuple[str | None, str | None] = ("", "")

    def of(self, contents: list[str]) -> str:
        """Return its text in a row."""
        if self.content is None:
            return self.text
        text, (before, behind) = contents[self.content], self.strips
        text = text if before == "" else text.lstrip(before)
        return text if behind == "" else text.rstrip(behind)


@dataclass(frozen=True, slots=True)
class Shape:
    """The pieces of a document: ``prompt`` of them before generation, and which is the answer."""

    pieces: tuple[Piece, ...]
    prompt: int
    answer: int

    def begins(self, other: Shape) -> bool:
        """Tell whether another shape has this one unchanged at its beginning."""
        mine, theirs = _joined(self.pieces), _joined(other.pieces)
        (*same, closing), there = mine, theirs[len(mine) - 1 : len(mine)]
        if closing.content is not None:
            return mine == theirs[: len(mine)]
        return (
            same == theirs[: len(same)] and bool(there) and there[0].text.startswith(closing.text)
        )


def contents_of(pair: TrainingPair, exchange: int) -> list[str]:
    """Return the texts of a row up to an answer: system prompt, and each exchange's two."""
    system = [] if pair.system is None else [pair.system]
    said = [text for both in pair.exchanges[: exchange + 1] for text in both]
    return [*system, *said]


def shape_of_answer(pair: TrainingPair, exchange: int, encoder: TextEncoder) -> Shape | None:
    """Return the shape of a row's document up to an answer.

    Args:
        pair: the row; only its shape counts.
        exchange: the answer that ends the document.
        encoder: the tokenizer with its template.

    Returns:
        None where the template renders probes so that they cannot be told from its own text.
    """
    system = pair.system if not pair.system else _sentinel(0)
    first = 0 if pair.system is None else 1
    try:
        parts = _rendered(system, first, exchange, "", encoder)
        padded = "".join(_rendered(system, first, exchange, _PAD, encoder))
    except DataError:
        return None
    pieces: list[list[Piece]] = [list(_split(part, first)) for part in parts]
    flat = [piece for part in pieces for piece in part]
    trimmed = _with_trims(flat, padded)
    if trimmed is None:
        return None
    prompt = len(pieces[0])
    answers = [i for i, one in enumerate(trimmed) if one.content == first + 2 * exchange + 1]
    if len(answers) != 1:
        return None
    return Shape(tuple(trimmed), prompt, answers[0])


def _joined(pieces: tuple[Piece, ...]) -> list[Piece]:
    """Join neighbouring pieces of the template's own text."""
    found: list[Piece] = []
    for piece in pieces:
        if found and piece.content is None and found[-1].content is None:
            piece = Piece(Role.TEMPLATE, found.pop().text + piece.text)  # noqa: PLW2901
        found.append(piece)
    return found


def _sentinel(number: int) -> str:
    return f"m3xp{number:04d}q"


def _rendered(
    system: str | None, first: int, exchange: int, pad: str, encoder: TextEncoder
) -> tuple[str, str, str]:
    """Render a row of sentinels, each between pads."""
    marks = [f"{pad}{_sentinel(first + n)}{pad[::-1]}" for n in range(2 * exchange + 2)]
    *history, last = zip(marks[::2], marks[1::2], strict=True)
    padded = f"{pad}{system}{pad[::-1]}" if system else system
    probe = TrainingPair(prompt=last[0], response=last[1], system=padded, history=tuple(history))
    answer = answer_of(probe, exchange, encoder)
    return answer.prompt, answer.body, answer.closing


def _split(text: str, first: int) -> Iterator[Piece]:
    """Cut a text at its sentinels."""
    at = 0
    for match in _SENTINEL.finditer(text):
        if match.start() > at:
            yield Piece(Role.TEMPLATE, text[at : match.start()])
        number = int(match[1])
        turn = Role.USER if (number - first) % 2 == 0 else Role.ASSISTANT
        yield Piece(Role.SYSTEM if number < first else turn, content=number)
        at = match.end()
    if text[at:]:
        yield Piece(Role.TEMPLATE, text[at:])


def _with_trims(pieces: list[Piece], padded: str) -> list[Piece] | None:
    """Read off the padded rendering what is trimmed of each text."""
    inner = re.escape(_PAD[1:])
    pattern = "".join(
        re.escape(piece.text)
        if piece.content is None
        else f"(\n?{inner}|){_sentinel(piece.content)}({inner}\n?|)"
        for piece in pieces
    )
    match = re.fullmatch(pattern, padded)
    if match is None:
        return None
    kept = map(_strips, match.groups())
    return [
        piece
        if piece.content is None
        else Piece(piece.role, content=piece.content, strips=(next(kept), next(kept)))
        for piece in pieces
    ]


def _strips(kept: str) -> str | None:
    """Return the characters that were trimmed where this is left of a pad."""
    if not kept:
        return None
    return "" if "\n" in kept else "\n"
