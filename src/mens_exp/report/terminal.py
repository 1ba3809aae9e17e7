"""Render documents on the terminal, at its width (default 80 columns), without breaking words.

A table that does not fit is drawn row by row. In a pipe or a file, nothing is wrapped, ruled or
coloured, so that each table row is one line. Colours only repeat words or marks, and ``NO_COLOR``
disables them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from mens_exp.errors import MensError, Problems
from mens_exp.report.document import (
    MARKS,
    Answer,
    Cell,
    Code,
    Facts,
    Item,
    Note,
    Section,
    Table,
    Tally,
    Tone,
    as_cell,
)
from mens_exp.report.wording import visible

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mens_exp.report.document import Part, Step

_STYLES = {
    Tone.PLAIN: "",
    Tone.GOOD: "bold cyan",  # cyan and red differ for every kind of colour vision
    Tone.WARN: "yellow",
    Tone.BAD: "bold red",
    Tone.QUIET: "dim",
}
_ENDLESS = 10_000  # width of a pipe
_GAP = 2  # characters between table columns
_MOST_LINES = 16  # per answer; the rest is in the record and the page
_MOST_PROMPT_LINES = 8
_LEAST_COLUMN = 30  # width of an answer in side-by-side layout


def console(*, stderr: bool = False, quiet: bool = False) -> Console:
    """Return the console of a command; the width is unlimited if it is not a terminal.

    Args:
        stderr: whether it writes to standard error.
        quiet: whether it drops everything, as in the Python API.
    """
    made = Console(stderr=stderr, quiet=quiet, highlight=False)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = _ENDLESS
    return made


def show(*parts: Part, on: Console | None = None, most: int = _MOST_LINES) -> None:
    """Draw parts one below the other, with at most `most` lines per answer."""
    on = on or console()
    for line in lines(parts, on.width, is_plain=not on.is_terminal, most=most):
        on.print(line, soft_wrap=True)


def say(text: str, tone: Tone = Tone.PLAIN, *, on: Console | None = None) -> None:
    """Write a line without wrapping, such as a path to copy."""
    (on or console()).print(Text(visible(text), style=_STYLES[tone]), soft_wrap=True)


def say_next(steps: Sequence[Step], *, on: Console | None = None) -> None:
    """Write the most likely next command on a separate line."""
    for step in steps[:1]:
        say(f"\nNext, to {step.purpose}:", on=on)
        say(f"  {step.command}", on=on)


def complain(errors: Sequence[MensError]) -> None:
    """Write problems to standard error."""
    on = console(stderr=True)
    for line in problem_lines(errors, on.width if on.is_terminal else _ENDLESS):
        on.print(line, soft_wrap=True)


def problem_lines(errors: Sequence[MensError], width: int) -> Iterator[Text]:
    """Format problems, each on separate lines.

    Args:
        errors: the problems; a :class:`Problems` is expanded.
        width: available columns.
    """
    flat = [
        one
        for error in errors
        for one in (error.problems if isinstance(error, Problems) else [error])
    ]
    for error in flat:
        where = f"{visible(error.where)}: " if error.where else ""
        for number, line in enumerate(wrapped(where + visible(error.what), width)):
            text = Text(line)
            text.stylize("bold", 0, len(where) if number == 0 else 0)
            yield text
        found = error.found
        found = found if found is None or isinstance(found, str) else repr(found)
        rows = (("found", found), ("expected", error.expected), ("next", error.remedy))
        for name, said in rows:
            if said is not None:
                yield from _hanging(f"  {name:<8}  ", visible(said), width)


def lines(
    parts: Sequence[Part], width: int, *, is_plain: bool, most: int = _MOST_LINES
) -> Iterator[Text]:
    """Render parts as lines.

    Args:
        parts: the content; drawings are omitted.
        width: available columns.
        is_plain: whether the output is not a terminal: no rules, and nothing side by side.
        most: maximum lines per answer.
    """
    is_first = True
    for part in parts:
        drawn = list(_drawn(part, width, is_plain=is_plain, most=most))
        if drawn and not is_first and not isinstance(part, Note):
            yield Text()
        is_first = is_first and not drawn
        yield from drawn


def _drawn(part: Part, width: int, *, is_plain: bool, most: int) -> Iterator[Text]:
    match part:
        case Section():
            yield from _section(part, width, is_plain=is_plain, most=most)
        case Table():
            yield from _table(part, width, is_plain=is_plain)
        case Facts():
            yield from _facts(part, width)
        case Note():
            yield from _note(part, width)
        case Code():
            yield from (Text(f"  {line}") for line in visible(part.text).splitlines())
        case Item():
            yield from _item(part, width, is_plain=is_plain, most=most)
        case Tally():
            said = ", ".join(f"{count} {words}" for _, words, count in part.parts)
            yield from map(Text, wrapped(visible(said), width))


def wrapped(text: str, width: int) -> list[str]:
    """Wrap lines between words; a word longer than a line is not broken."""
    broken = []
    for line in text.expandtabs(4).split("\n"):
        first, *words = line.lstrip().split(" ")
        rest = line[: len(line) - len(line.lstrip())] + first
        for word in words:
            if cell_len(f"{rest} {word}") > width:
                broken.append(rest)
                rest = word
            else:
                rest = f"{rest} {word}"
        broken.append(rest)
    return broken


def _marked(text: str, tone: Tone) -> str:
    return f"{MARKS[tone]} {text}" if tone in MARKS else text


def _hanging(head: str, text: str, width: int, style: str = "") -> Iterator[Text]:
    """Write a text after a head with hanging indentation."""
    indent = cell_len(head)
    for number, line in enumerate(wrapped(text, width - indent)):
        shown = Text(head if number == 0 else " " * indent)
        yield shown.append(line, style=style)


def _section(part: Section, width: int, *, is_plain: bool, most: int) -> Iterator[Text]:
    if part.title:
        title = _marked(visible(part.title), part.tone)
        yield from (
            Text(line, style=f"bold {_STYLES[part.tone]}") for line in wrapped(title, width)
        )
    if part.lead:
        yield from (Text(line, style="dim") for line in wrapped(visible(part.lead), width))
    yield from lines(part.parts, width, is_plain=is_plain, most=most)


def _note(part: Note, width: int) -> Iterator[Text]:
    mark = f"{MARKS[part.tone]} " if part.tone in MARKS else "- " if part.item else ""
    yield from _hanging(mark, visible(part.text), width, _STYLES[part.tone])


def _facts(part: Facts, width: int) -> Iterator[Text]:
    if part.title:
        yield Text(visible(part.title), style="bold")
    names = [visible(one.label) for one in part.cells]
    indent = max(map(cell_len, names), default=0)
    for name, one in zip(names, part.cells, strict=True):
        text, style = _value(one)
        text = f"{text} ({visible(one.detail)})" if one.detail else text
        head = name + " " * (indent - cell_len(name) + _GAP)
        yield from _hanging(head, text, width, style)


def _value(cell: Cell) -> tuple[str, str]:
    """Return the text and style of a value, without its detail."""
    if cell.absent:
        return visible(cell.absent), "dim italic"
    return visible(cell.text), _STYLES[cell.tone]


def _table(part: Table, width: int, *, is_plain: bool) -> Iterator[Text]:
    if part.title and (part.rows or part.absent):
        yield from (Text(line, style="bold") for line in wrapped(visible(part.title), width))
    if not part.rows:
        yield from (Text(line, style="dim italic") for line in wrapped(part.absent, width))
        return
    rows = [[as_cell(value) for value in row] for row in part.rows]
    widths = _widths(part, rows, width)
    if widths is None:
        yield from _row_by_row(part, rows, width)
        return
    heads = [Cell(head, tone=Tone.QUIET) for head in part.heads]
    figures = part.figures
    if any(part.heads):
        yield from _row(heads, widths, figures)
        if not is_plain:
            yield Text("─" * (sum(widths) + _GAP * (len(widths) - 1)), style="dim")
    for row in rows:
        yield from _row(row, widths, figures)


def _widths(part: Table, rows: Sequence[Sequence[Cell]], width: int) -> list[int] | None:
    """Return the column widths; None if a word would be broken.

    Numeric columns are not wrapped; text columns share the remaining width.
    """
    least, wanted = [], []
    of_figures = part.figures
    for column, head in enumerate(part.heads):
        cells = [row[column] for row in rows]
        figures = [cell.text for cell in cells if column in of_figures]
        texts = [head, *(text for cell in cells for text in (_value(cell)[0], cell.detail))]
        broken = [word for text in texts if text not in figures for word in visible(text).split()]
        least.append(max(map(cell_len, [*broken, *figures]), default=0))
        wanted.append(max(cell_len(line) for text in texts for line in visible(text).split("\n")))
    left = width - _GAP * (len(least) - 1) - sum(least)
    if left < 0:
        return None
    needs = [most - few for most, few in zip(wanted, least, strict=True)]
    if sum(needs) <= left:
        return wanted
    return [few + left * need // sum(needs) for few, need in zip(least, needs, strict=True)]


def _row(row: Sequence[Cell], widths: Sequence[int], figures: frozenset[int]) -> Iterator[Text]:
    columns = []
    for cell, width in zip(row, widths, strict=True):
        text, style = _value(cell)
        drawn = [(line, style) for line in wrapped(text, width)]
        drawn += [(line, "dim") for line in wrapped(visible(cell.detail), width) if line]
        columns.append(drawn)
    for number in range(max(map(len, columns))):
        shown = Text()
        for place, (drawn, width) in enumerate(zip(columns, widths, strict=True)):
            line, style = drawn[number] if number < len(drawn) else ("", "")
            space = " " * (width - cell_len(line))
            before, after = (space, "") if place in figures else ("", space)
            shown.append(before).append(line, style=style).append(after + " " * _GAP)
        shown.rstrip()
        yield shown


def _row_by_row(part: Table, rows: Sequence[Sequence[Cell]], width: int) -> Iterator[Text]:
    """Draw each row as its name, followed by its other values with their heads."""
    indent = max(cell_len(visible(head)) for head in part.heads[1:])
    for row in rows:
        name, style = _value(row[0])
        yield from (Text(line, style=style or "bold") for line in wrapped(name, width))
        for head, cell in zip(part.heads[1:], row[1:], strict=True):
            text, style = _value(cell)
            text = f"{text} ({visible(cell.detail)})" if cell.detail else text
            if text:
                space = " " * (indent - cell_len(visible(head)))
                yield from _hanging(f"  {visible(head)}{space}{' ' * _GAP}", text, width, style)


def _item(part: Item, width: int, *, is_plain: bool, most: int) -> Iterator[Text]:
    if part.name:
        yield Text(visible(part.name), style="bold")
    for line in _clipped(part.prompt, _MOST_PROMPT_LINES):
        yield from map(Text, wrapped(line, width))
    each = (width - _GAP - 1) // max(1, len(part.answers))
    if is_plain or each < _LEAST_COLUMN:
        for number, one in enumerate(part.answers):
            yield from [Text()] if number else []
            yield _answer_head(one)
            yield from map(Text, _answer(one, _ENDLESS, most))
        return
    heads = [_answer_head(one) for one in part.answers]
    bodies = [_answer(one, each, most) for one in part.answers]
    yield _in_columns(heads, each, "┬")
    for number in range(max(map(len, bodies))):
        drawn = [Text(body[number]) if number < len(body) else Text() for body in bodies]
        yield _in_columns(drawn, each, "│")


def _in_columns(texts: Sequence[Text], width: int, bar: str) -> Text:
    shown = Text()
    for number, text in enumerate(texts):
        text.truncate(width, overflow="ellipsis")
        shown.append(f"{bar} ", style="dim") if number else None
        shown.append_text(text).append(" " * (width - cell_len(text.plain)))
    shown.rstrip()
    return shown


def _answer_head(one: Answer) -> Text:
    text = Text(visible(one.who), style="bold")
    if one.outcome:
        text.append(f" · {_marked(visible(one.outcome), one.tone)}", style=_STYLES[one.tone])
    return text.append(f" · {visible(one.detail)}" if one.detail else "", style="dim")


def _answer(one: Answer, width: int, most: int) -> list[str]:
    if one.text is None:
        return ["not asked"]
    if one.blank:
        return [*_folded(one.blank, width)]
    return [part for line in _clipped(one.text, most) for part in _folded(line, width)]


def _folded(line: str, width: int) -> Iterator[str]:
    """Wrap a line of a model's text between words, or anywhere if it has no spaces."""
    for part in wrapped(line, width):
        text = Text(part)
        while cell_len(text.plain) > width:
            head = text.copy()
            head.truncate(width)
            yield head.plain
            text = text[len(head.plain) :]
        yield text.plain


def _clipped(text: str, most: int) -> list[str]:
    found = visible(text).expandtabs(4).strip("\n").splitlines()
    if len(found) <= most:
        return found
    return [*found[: most - 1], f"… {len(found) - most + 1} more lines"]


_CURSOR = "▌"
WHOLE = 10**6
"""A line limit that no answer reaches."""


def conversation(answers: Mapping[str, tuple[str, bool]], titles: Mapping[str, str]) -> Item:
    """Return the answers of a conversation so far.

    Args:
        answers: condition -> its text so far, and whether it is complete.
        titles: condition -> the name of its model.
    """
    shown = [
        Answer(who=titles[name], text=text if done else f"{text}{_CURSOR}")
        for name, (text, done) in answers.items()
    ]
    return Item(name="", prompt="", answers=shown)


def streamed(item: Item, width: int) -> Text:
    """Draw answers that are still being written."""
    return Text("\n").join(lines([item], width, is_plain=False, most=WHOLE))
