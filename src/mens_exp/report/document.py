"""The content of a report, apart from how it is drawn: sections of tables, figures and notes.

One function for each kind of record builds its document. Three renderers draw any document:
report/html.py for pages and notebooks, report/terminal.py for the terminal, and `markdown` here.
They make control characters visible and escape what their format would obey, so the functions that
build documents pass on texts of models, data files and exceptions as they are.
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
    """The meaning of a text for the reader, which a renderer may colour; the words say it too."""

    PLAIN = ""
    GOOD = "good"
    WARN = "warn"
    BAD = "bad"
    QUIET = "quiet"


MARKS = {Tone.GOOD: "✓", Tone.WARN: "!", Tone.BAD: "✗"}
"""What stands before a text of a tone, for readers who see no colour."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One value as text, or the reason why there is none."""

    text: str = ""
    _: KW_ONLY
    label: str = ""  # its name, where it stands in a list of facts
    absent: str = ""  # why there is no text
    detail: str = ""  # a second, quieter line
    tone: Tone = Tone.PLAIN
    code: bool = False  # a digest, a path or a version, better in monospace
    link: str = ""  # relative to the page
    sort: str | None = None  # what a page sorts it by, if not by its text


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under heads; the first column names each row."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Cell | str]]
    _: KW_ONLY
    title: str = ""
    absent: str = ""  # what stands in its place when there are no rows
    cards: bool = False  # a page draws each row as a card, its last column below the others
    filters: Iterable[int] = ()  # columns by whose values a page's script selects rows
    extra: Iterable[int] = ()  # columns that a page's script hides at first
    name: str = ""  # its identifier on a page

    @property
    def figures(self) -> frozenset[int]:
        """The columns that hold figures, which are aligned on the right and not wrapped.

        Every cell is read for this: ask once for a table, not for each cell.
        """
        columns = range(1, len(self.heads)) if self.rows else ()
        return frozenset(c for c in columns if all(_is_figure(as_cell(r[c])) for r in self.rows))

    def without(self, *heads: str) -> Table:
        """Return the table without some columns, for a narrow place."""
        kept = [place for place, head in enumerate(self.heads) if head not in heads]
        rows = [[row[place] for place in kept] for row in self.rows]
        return Table([self.heads[place] for place in kept], rows, title=self.title)


def as_cell(value: Cell | str) -> Cell:
    """Return a value of a table as a cell."""
    return value if isinstance(value, Cell) else Cell(value)


def _is_figure(cell: Cell) -> bool:
    return not cell.code and (bool(cell.absent) or _FIGURE.fullmatch(cell.text) is not None)


@dataclass(frozen=True, slots=True)
class Facts:
    """Named values; a page draws them as cards, or sets many short ones in columns (`dense`)."""

    cells: Sequence[Cell]
    _: KW_ONLY
    title: str = ""
    cards: bool = False
    dense: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """One drawing, or the reason why there is none."""

    name: str
    title: str
    caption: str  # how to read it
    svg: str = ""  # an element
    absent: str = ""  # why there is nothing to draw
    wide: bool = False  # it takes the whole width of a page


@dataclass(frozen=True, slots=True)
class Note:
    """A paragraph, or with `item` one of a list."""

    text: str
    tone: Tone = Tone.PLAIN
    item: bool = False


@dataclass(frozen=True, slots=True)
class Code:
    """Text that keeps its line breaks; with `command` it is typed into a shell."""

    text: str
    command: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The text that one model answered (None if it was not asked), its outcome and error."""

    who: str
    text: str | None
    outcome: str = ""
    tone: Tone = Tone.PLAIN
    detail: str = ""
    error: str = ""
    keys: Sequence[str] = ()  # what a page's script finds it by

    @property
    def blank(self) -> str:
        """Words for a text in which a reader would see nothing; empty if there is something."""
        if self.text is None or self.text.strip():
            return ""
        return "white space only" if self.text else "empty"


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """A prompt, the models' answers side by side, and the data's own answer."""

    name: str
    prompt: str
    answers: Sequence[Answer]
    reference: str = ""
    is_open: bool = False
    keys: Sequence[str] = ()  # as above

    @property
    def first_line(self) -> str:
        """Its name in one line: the first of the prompt."""
        return next((line for line in self.prompt.splitlines() if line.strip()), self.name)


@dataclass(frozen=True, slots=True)
class Tally:
    """A count of some outcomes: (name of the colour, words, number)."""

    parts: Sequence[tuple[str, str, int]]


@dataclass(frozen=True, slots=True)
class Section:
    """Parts under a title."""

    title: str
    parts: Sequence[Part]
    _: KW_ONLY
    lead: str = ""  # one sentence on how to read it
    name: str = ""  # of its looks on a page
    tone: Tone = Tone.PLAIN
    folded: bool = False  # a page shows the title alone until it is asked for more
    count: int | None = None  # how many things there are
    beside: bool = False  # parts stand side by side where there is room


Part: TypeAlias = Table | Facts | Plot | Note | Code | Item | Tally | Section


@dataclass(frozen=True, slots=True)
class Step:
    """A command to type next, and an infinitive that says what for: "To …"."""

    command: str
    purpose: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Everything that is to be shown of one record."""

    title: str
    kind: str  # of the record, in words
    parts: Sequence[Part]
    source: str  # the files that it was rendered from
    status: str = ""
    headline: str = ""  # its result in a sentence
    command: str = ""  # what made it
    meta: Sequence[Cell] = ()  # its identity
    steps: Sequence[Step] = ()  # what to do next, the likeliest first


def cells_of(names: Iterable[tuple[str, str]]) -> list[Cell]:
    """Return named texts as cells."""
    return [Cell(text, label=name) for name, text in names]


def bullets(lines: Iterable[str], tone: Tone = Tone.PLAIN) -> list[Note]:
    """Return lines as the items of a list."""
    return [Note(line, tone, item=True) for line in lines]


def next_steps(steps: Sequence[Step]) -> Section:
    """Return the section that says what to type next; without steps it is empty."""
    parts: list[Part] = []
    for step in steps:
        parts += [Note(f"To {step.purpose}:"), Code(step.command, command=True)]
    return Section("What next?" if parts else "", parts, name="next")


def markdown(parts: Sequence[Part], *, level: int = 2) -> str:
    """Render parts as Markdown; drawings are left out.

    Args:
        parts: the content.
        level: of the headings of its sections.
    """
    blocks = [text for part in parts for text in _block(part, level)]
    lines = []
    for before, text in zip(["", *blocks], blocks, strict=False):
        # Items of one list follow each other; all else stands apart.
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
    """Render a table of Markdown."""
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
    """Keep text inside a code span of one table cell."""
    return " ".join(visible(text).split()).replace("`", "'").replace("|", "¦")


def plain(text: str) -> str:
    """Keep text from acting as Markdown, HTML or a second table cell.

    An underscore inside a word is left alone, as Markdown does.
    """
    marks = r"([\\`*\[\]<>|#]|(?<!\w)_|_(?!\w))"
    return re.sub(marks, r"\\\1", " ".join(visible(text).split()))
