"""Encoded rows, token by token, with trained tokens set off.

Colour tells it on a terminal, and brackets tell it where there is none: in a pipe, in a file, to
an eye that does not see green.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["ShownDocument", "Speller", "dropped", "legend", "shown"]

_BOUND = "│"  # between tokens
_OPEN, _CLOSE = "⟦", "⟧"  # around what is trained
_NEWLINE, _TAB, _SPACE = "⏎\n", "⇥", "·"
_TRAINED, _CONTROL, _QUIET = "green underline", "bold magenta", "dim"
_WINDOW = 8  # tokens decoded before one, so that a decoder that looks back has what it needs
_MOST_PARTS = 8  # a character has at most four bytes; a decoder that never settles is cut here


class Speller(Protocol):
    """The part of a tokenizer that showing needs."""

    @property
    def special_ids(self) -> set[int]:
        """Ids of control tokens."""

    def spell(self, ids: Sequence[int]) -> str:
        """Decode ids, control tokens spelled out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownDocument:
    """One document of a row.

    Attributes:
        title: what the row is called, and which of its documents this is.
        ids: its tokens.
        supervised: which of them are learned.
        cut: tokens it lost to the limit.
    """

    title: str
    ids: Sequence[int]
    supervised: Sequence[bool]
    cut: int


def legend() -> Text:
    """Say how to read what `shown` draws."""
    text = Text("Rows as they are trained: ")
    text.append(f"{_OPEN}trained{_CLOSE}", style=_TRAINED)
    text.append("  read only  ")
    text.append("<control token>", style=_CONTROL)
    text.append(f"  {_BOUND} ends a token, {_SPACE} is a space at its edge, ⏎ a newline")
    return text


def shown(document: ShownDocument, speller: Speller) -> Text:
    """Draw a document.

    Args:
        document: what to draw.
        speller: the tokenizer that made it.

    Returns:
        A line of counts, then each token between bars, what is trained in brackets. Tokens that
        make one character between them stand together, with how many they are.
    """
    learned = sum(document.supervised)
    text = Text()
    text.append(f"{document.title}: ", style="bold")
    text.append(f"{len(document.ids)} tokens, {learned} trained")
    if document.cut:
        text.append(f", {document.cut} cut off", style="yellow")
    text.append("\n")
    inside = False
    control = speller.special_ids
    for start, end, piece in _pieces(document.ids, document.supervised, speller):
        is_learned = bool(document.supervised[start])
        if is_learned is not inside:
            text.append(_CLOSE if inside else _OPEN, style=_TRAINED)
        elif start:
            text.append(_BOUND, style=_QUIET)
        inside = is_learned
        text.append_text(
            _cell(piece, end - start, learned=is_learned, control=document.ids[start] in control)
        )
    if inside:
        text.append(_CLOSE, style=_TRAINED)
    return text.append("\n")


def dropped(title: str, documents: int, seq_len: int) -> Text:
    """Say that a row, or a part of it, is not trained on at all."""
    what = "a document of it is" if documents == 1 else f"{documents} documents of it are"
    text = Text()
    text.append(f"{title}: ", style="bold")
    text.append(f"{what} dropped: nothing learned is within {seq_len} tokens", style="yellow")
    return text.append("\n")


def _cell(piece: str, tokens: int, *, learned: bool, control: bool) -> Text:
    style = " ".join([_TRAINED] * learned + [_CONTROL] * control)
    cell = Text(_visible(piece), style=style)
    if tokens > 1:
        cell.append(f"‥{tokens}", style=_QUIET)
    return cell


def _visible(piece: str) -> str:
    """Return a token's text with white space at its edges, and what no screen shows, visible."""
    body = piece.strip(" ")
    if not body:
        return _SPACE * len(piece)
    before = len(piece) - len(piece.lstrip(" "))
    after = len(piece) - len(piece.rstrip(" "))
    shown_body = "".join(map(_character, body))
    return f"{_SPACE * before}{shown_body}{_SPACE * after}"


def _character(character: str) -> str:
    if character == "\n":
        return _NEWLINE
    if character == "\t":
        return _TAB
    if character.isprintable():
        return character
    return ascii(character)[1:-1]


def _pieces(
    ids: Sequence[int], supervised: Sequence[bool], speller: Speller
) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and text of each token, or of tokens that only together make text."""
    start = 0
    for end in range(1, len(ids) + 1):
        before = list(ids[max(0, start - _WINDOW) : start])
        context = speller.spell(before)
        text = speller.spell([*before, *ids[start:end]])
        is_settled = text.startswith(context) and len(text) > len(context)
        is_whole = is_settled and not text.endswith("\ufffd")
        parts = end < len(ids) and supervised[end] == supervised[start]
        if is_whole or end - start == _MOST_PARTS or not parts:
            yield start, end, text.removeprefix(context)
            start = end
