"""The content of a report, independent of the renderer: sections of tables, figures and notes.

One function per kind of record builds its document. Three renderers draw any document:
report/html.py for pages and notebooks, report/terminal.py for the terminal, and `markdown` here.
Renderers make control characters visible and escape markup, so the functions that build documents
pass on texts of models, data files and exceptions unchanged.
"""

from __future__ import annotations

import re
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from mens_exp.report.wording import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

_NUMBER = r"(about )?\W*\d([^A-Za-z]|e[+−-])*( [\w/]+)*( \([^)]*\))?"
_FIGURE = re.compile(rf"{_NUMBER}|unknown|none|no spread|as planned|[–-]?")


class Tone(StrEnum):
    """The meaning of a text, which a renderer may show by colour; the words also express it."""

    PLAIN = ""
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    QUIET = "quiet"


MARKS = {Tone.GOOD: "✓", Tone.WARN: "!", Tone.BAD: "✗"}
"""Prefix of a text by tone, for output without colour."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as text, or the reason why it is missing."""

    text: str = ""
    _: KW_ONLY
    label: str = ""  # its name in a list of facts
    absent: str = ""  # the reason why there is no text
    detail: str = ""  # a second, less prominent line
    tone: Tone = Tone.PLAIN
    code: bool = False  # a digest, path or version, set in monospace
    link: str = ""  # relative to the page
    sort: str | None = None  # sort key on a page; None means the text


@dataclass(frozen=True, slots=True)
class Table:
    """A table with column heads, whose first column names each row."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    _: KW_ONLY
    title: str = ""
    absent: str = ""  # text shown if there are no rows
    cards: bool = False  # a page draws each row as a card, with the last column below the others
    filters: Iterable[int] = ()  # columns by which a page's script filters rows
    extra: Iterable[int] = ()  # columns that a page's script initially hides
    name: str = ""  # its identifier on a page

    @property
    def figures(self) -> frozenset[int]:
        """The numeric columns, which are right-aligned and not wrapped.

        This reads every cell: evaluate it once per table.
        """
        columns = range(1, len(self.heads)) if self.rows else ()
        return frozenset(c for c in columns if all(_is_figure(as_cell(r[c])) for r in self.rows))

    def without(self, *heads: str) -> Table:
        """Return the table without some columns, for a narrow display."""
        kept = [place for place, head in enumerate(self.heads) if head not in heads]
        rows = [[row[place] for place in kept] for row in self.rows]
        return Table([self.heads[place] for place in kept], rows, title=self.title)


def as_cell(value: Cell | str) -> Cell:
    """Convert a table value to a cell."""
    return value if isinstance(value, Cell) else Cell(value)


def _is_figure(cell: Cell) -> bool:
    return not cell.code and (bool(cell.absent) or _FIGURE.fullmatch(cell.text) is not None)


@dataclass(frozen=True, slots=True)
class Facts:
    """Named values, drawn on a page as cards or, if `dense`, in columns."""

    cells: Sequence[Cell]
    _: KW_ONLY
    title: str = ""
    cards: bool = False
    dense: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One drawing, or the reason why it is missing."""

    name: str
    title: str
    caption: str  # an explanation
    svg: str = ""  # an SVG element
    absent: str = ""  # the reason why there is nothing to draw
    wide: bool = False  # full page width


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph, or with `item` a list item."""

    text: str
    tone: Tone = Tone.PLAIN
    item: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Preformatted text; with `command`, a shell command."""

    text: str
    command: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of one model (None if it was not asked), with outcome and error."""

    who: str
    text: str | None
    outcome: str = ""
    tone: Tone = Tone.PLAIN
    detail: str = ""
    error: str = ""
    keys: Sequence[str] = ()  # filter keys for a page's script

    @property
    def blank(self) -> str:
        """A description of a text without visible characters; empty if there are any."""
        if self.text is None or self.text.strip():
            return ""
        return "white space only" if self.text else "empty"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A prompt, the models' answers side by side, and the reference answer."""

    name: str
    prompt: str
    answers: Sequence[Answer]
    reference: str = ""
    is_open: bool = False
    keys: Sequence[str] = ()  # as above

    @property
    def first_line(self) -> str:
        """The first line of the prompt, used as its name."""
        return next((line for line in self.prompt.splitlines() if line.strip()), self.name)


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of outcomes: (colour name, words, number)."""

    parts: Sequence[tuple[str, str, int]]


@dataclass(frozen=True, slots=True)
class Section:
    """A titled group of parts."""

    title: str
    parts: Sequence[Part]
    _: KW_ONLY
    lead: str = ""  # one introductory sentence
    name: str = ""  # its style on a page
    tone: Tone = Tone.PLAIN
    folded: bool = False  # collapsed on a page
    count: int | None = None  # number of entries
    side_by_side: bool = False  # parts side by side if there is room


Part: TypeAlias = Table | Facts | Plot | Note | Code | Item | Tally | Section


@dataclass(frozen=True, slots=True)
class Step:
    """A suggested next command, with its purpose as an infinitive ("To …")."""

    command: str
    purpose: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """The complete content of a report on one record."""

    title: str
    kind: str  # kind of record, in words
    parts: Sequence[Part]
    source: str  # the files that it was rendered from
    status: str = ""
    headline: str = ""  # the result in one sentence
    command: str = ""  # the command that produced it
    meta: Sequence[Cell] = ()  # its identity
    steps: Sequence[Step] = ()  # next commands, most likely first


def cells_of(names: Iterable[tuple[str, str]]) -> list[Cell]:
    """Return named texts as cells."""
    return [Cell(text, label=name) for name, text in names]


def bullets(lines: Iterable[str], tone: Tone = Tone.PLAIN) -> list[Note]:
    """Return lines as the items of a list."""
    return [Note(line, tone, item=True) for line in lines]


def next_steps(steps: Sequence[Step]) -> Section:
    """Return the section of next commands; empty without steps."""
    parts: list[Part] = []
    for step in steps:
        parts += [Note(f"To {step.purpose}:"), Code(step.command, command=True)]
    return Section("What next?" if parts else "", parts, name="next")


def markdown(parts: Sequence[Part], *, level: int = 2) -> str:
    """Render parts as Markdown without drawings.

    Args:
        parts: the content.
        level: heading level of its sections.
    """
    blocks = [text for part in parts for text in _block(part, level)]
    lines = []
    for before, text in zip(["", *blocks], blocks, strict=False):
        # Adjacent list items form one list; other parts are separated by blank lines.
        lines += [] if not before or before[:2] == text[:2] == "- " else [""]
        lines.append(text)
    return "\n".join([*lines, ""])


def markdown_page(document: Document) -> str:
    """Render a whole document as Markdown."""
    headline = f"{plain(document.headline)}\n\n" if document.headline else ""
    return f"# {plain(document.title)}\n\n{headline}{markdown(document.parts)}"


def _block(part: Part, level: int) -> Iterator[str]:
    match part:
        case Section():
            yield from [f"{'#' * level} {plain(part.title)}"] if part.title else []
            yield from [plain(part.lead)] if part.lead else []
            for inner in part.parts:
                yield from _block(inner, level + 1)
        case Table() | Facts():
            yield from _titled_grid(part)
        case Note():
            yield f"{'- ' if part.item else ''}{plain(part.text)}"
        case Code():
            yield _fence(part.text, "console" if part.command else "")
        case Item():
            yield from (f"**{plain(part.name)}**", _fence(part.prompt))
            for one in part.answers:
                yield plain(f"{one.who}: {one.outcome or one.blank or 'answered'}")
                yield from [_fence(one.text)] if one.text and not one.blank else []
        case Tally():
            yield plain(", ".join(f"{words}: {number}" for _, words, number in part.parts))


def _titled_grid(part: Table | Facts) -> Iterator[str]:
    if isinstance(part, Facts):
        drawn = grid(("what", "value"), [(cell.label, cell) for cell in part.cells])
    else:
        drawn = grid(part.heads, part.rows, part.figures) if part.rows else plain(part.absent)
    if drawn:
        yield from [f"**{plain(part.title)}**"] if part.title else []
        yield drawn


def grid(
    heads: Sequence[str], rows: Sequence[Sequence[Cell | str]], figures: Iterable[int] = ()
) -> str:
    """Render a Markdown table."""
    lines = [
        [plain(head) for head in heads],
        ["---:" if place in {*figures} else "---" for place in range(len(heads))],
        *([_value(as_cell(value)) for value in row] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _value(cell: Cell) -> str:
    if cell.absent:
        return plain(f"unknown: {cell.absent}")
    if cell.code and cell.text:
        return f"`{code(cell.text)}`"
    return plain(f"{cell.text} ({cell.detail})" if cell.text and cell.detail else cell.text)


def _fence(text: str, language: str = "") -> str:
    return f"```{language}\n{visible(text).replace('```', chr(39) * 3)}\n```"


def code(text: str) -> str:
    """Escape text for a code span in a table cell."""
    return " ".join(visible(text).split()).replace("`", "'").replace("|", "¦")


def plain(text: str) -> str:
    """Escape text for Markdown, HTML and table cells.

    Underscores inside words are kept: Markdown does not interpret them.
    """
    marks = r"([\\`*\[\]<>|#]|(?<!\w)_|_(?!\w))"
    return re.sub(marks, r"\\\1", " ".join(visible(text).split()))
