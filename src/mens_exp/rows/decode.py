"""Decode a file of rows (JSON Lines, JSON, CSV or a table) to objects with their locations."""

from __future__ import annotations

import csv
import json
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from mens_exp.errors import DataError
from mens_exp.rows.files import (
    MAX_LINE_BYTES,
    Line,
    chunks,
    inner_suffix,
    lines,
)
from mens_exp.rows.tables import rows_of_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_SPACE: Final = " \t\r\n"
_TABLES: Final[dict[str, Literal["parquet", "arrow"]]] = {".parquet": "parquet", ".arrow": "arrow"}


class Cell(str):
    """A cell of a CSV file, which has no types: numbers and lists are parsed where expected."""

    __slots__ = ()


class Located(NamedTuple):
    """The value at one location in a file.

    Attributes:
        where: the location, as ``file:line``; in a table as ``file:row``, counted from 1.
        value: the decoded value, or the `DataError` that explains why there is none.
        raw: the line as read; empty if rows are not lines.
        ends: nothing after this location can be read.
    """

    where: str
    value: object
    raw: bytes = b""
    ends: bool = False


def has_lines(path: Path) -> bool:
    """Return whether a file, by its name, has one row per line (not a table or an array)."""
    return inner_suffix(path) not in {*_TABLES, ".json", ".csv"}


def decoded_rows(path: Path, field: str) -> Iterator[Located]:
    """Decode a file row by row.

    Args:
        path: UTF-8 (a byte order mark is tolerated); one object per line, or in a ``.json`` file
            an array of objects; or ``.csv`` with a line of names. Each may be compressed (``.gz``,
            ``.zst``). Or a table: ``.parquet``, ``.arrow``.
        field: the setting that names the file, for messages.

    Yields:
        Each row's location with its value, or with the `DataError` that prevented reading it. A
        line longer than `MAX_LINE_BYTES` is such an error.

    Raises:
        DataError: the file cannot be read, or is not a file of rows.
        MissingExtra: it is a table, and pyarrow is not installed.
    """
    suffix = inner_suffix(path)
    if suffix in _TABLES:
        for number, row in rows_of_file(path, _TABLES[suffix], field):
            yield Located(f"{path}:{number}", row)
        return
    pieces: Iterator[bytes] = chunks(path, field)
    if suffix == ".csv":
        yield from _csv_rows(pieces, path)
        return
    if suffix == ".json":
        data = b"".join(pieces)  # an array cannot be read line by line
        if data.lstrip().startswith(b"["):
            yield from _array(data, path)
            return
        pieces = iter([data])
    for number, line in enumerate(lines(pieces), start=1):
        yield decoded_line(line, f"{path}:{number}")


def _csv_rows(pieces: Iterator[bytes], path: Path) -> Iterator[Located]:
    """Decode a CSV file (RFC 4180) row by row; an empty cell means that the row lacks the field.

    Raises:
        DataError: the first line does not name the columns.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    numbered = enumerate(lines(pieces), start=1)
    reader = csv.reader((f"{_utf8(one, f'{path}:{n}')}\n" for n, one in numbered), strict=True)
    names: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            problem = DataError("is not valid CSV", where=where, found=str(error))
            yield Located(where, problem, ends=True)
            return
        except DataError as problem:  # unclosed quotes may affect everything after it
            yield Located(where, problem, ends=True)
            return
        if cells is None:
            return
        if names is None:
            names = _csv_names(cells, where)
        elif cells:  # skip blank lines
            yield Located(where, _csv_row(names, cells, where))


def _csv_names(cells: list[str], where: str) -> list[str]:
    """Return the names of the columns from the first line."""
    names = [cell.strip() for cell in cells]
    if len(names) == 1 and (other := next((c for c in ";\t|" if c in names[0]), None)):
        raise DataError(
            "the columns are not separated by commas",
            where=where,
            found=repr(other),
            expected="a comma",
            remedy="save the file with commas, or as JSON Lines",
        )
    if len(set(names)) < len(names) or "" in names:
        raise DataError(
            "the first line does not name the columns",
            where=where,
            found=", ".join(map(repr, names)),
            expected="a name for each column, each once",
        )
    return names


def _csv_row(names: list[str], cells: list[str], where: str) -> object:
    if len(cells) != len(names):
        return DataError(
            "the row has another number of cells than there are columns",
            where=where,
            found=str(len(cells)),
            expected=str(len(names)),
            remedy="put cells that hold commas or line ends into double quotes",
        )
    return {name: Cell(cell) for name, cell in zip(names, cells, strict=True) if cell}


def decoded_line(line: Line, where: str) -> Located:
    """Decode one line, like `decoded_rows` does for a file."""
    try:
        return Located(where, _json(_text(line, where), where), line.raw)
    except DataError as problem:
        return Located(where, problem, line.raw)


def _text(line: Line, where: str) -> str:
    """Decode one line of JSON; each kind of failure has a separate message."""
    text = _utf8(line, where).removesuffix("\r")
    if not text.strip():
        raise DataError("the line is blank", where=where, expected="one JSON object a line")
    return text


def _utf8(line: Line, where: str) -> str:
    """Decode one line without its newline; a carriage return before that stays."""
    if line.size > MAX_LINE_BYTES:
        raise DataError(
            "the line is too long",
            where=where,
            found=f"{line.size:,} bytes",
            expected=f"at most {MAX_LINE_BYTES:,} bytes, one row a line",
        )
    raw = line.raw
    if b"\0" in raw:
        raise DataError(
            "the line holds NUL bytes",
            where=where,
            found=f"{raw.count(0)} of them, the first at byte {raw.index(0) + 1}",
            expected="UTF-8 text; a file cut off by a crash or saved as UTF-16 has NUL bytes",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            "the line is not UTF-8",
            where=where,
            found=f"byte 0x{raw[error.start]:02x} at byte {error.start + 1}",
            remedy="save the file as UTF-8",
        ) from error


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=lambda items: _object(items, where))
    except json.JSONDecodeError as error:
        raise DataError(
            f"the line is not JSON: {error.msg} at column {error.colno}",
            where=where,
            found=text[:60],
            expected="one JSON object a line",
            remedy=None
            if text.lstrip().startswith(("{", "["))
            else 'write texts as {"text": "…"}, one a line, or a table into a file named .csv',
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise DataError(f"the line is not usable JSON: {error}", where=where) from error


def _array(data: bytes, path: Path) -> Iterator[Located]:
    """Decode the elements of an array, each with the line on which it starts.

    An error in the array itself ends decoding, because no element after it can be trusted.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = DataError("the file is not UTF-8", where=f"{path}:{line}")
        yield Located(f"{path}:{line}", problem, ends=True)
        return
    position, line, counted = _skip(text, text.index("[") + 1), 1, 0
    while not text.startswith("]", position):
        line, counted = line + text.count("\n", counted, position), position
        where = f"{path}:{line}"
        try:
            value, position = _element(text, position, where)
        except DataError as problem:
            yield Located(where, problem, ends=True)
            return
        yield Located(where, value)
    if counted == 0:
        empty = DataError("the array is empty", where=str(path), expected="a row")
        yield Located(f"{path}:1", empty, ends=True)
    elif rest := text[position + 1 :].strip():
        more = DataError("something follows the array", where=where, found=rest[:60])
        yield Located(where, more, ends=True)


def _element(text: str, position: int, where: str) -> tuple[object, int]:
    """Decode one element; return where the next one, or the closing bracket, starts."""
    decoder = json.JSONDecoder(object_pairs_hook=lambda items: _object(items, where))
    try:
        value, end = decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise DataError(
            f"the array is not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            where=where,
            found=text[position : position + 60],
            expected="an array of objects",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the row is not usable JSON: {error}", where=where) from error
    end = _skip(text, end)
    if text.startswith("]", end):
        return value, end
    after = _skip(text, end + 1)
    if text.startswith(",", end) and not text.startswith("]", after):
        return value, after
    raise DataError(
        "the array is not JSON: after a row comes a comma and a row, or the closing bracket",
        where=where,
        found=text[end : end + 60],
        expected="an array of objects",
    )


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _object(items: list[tuple[str, object]], where: str) -> dict[str, object]:
    """Build an object, rejecting repeated keys, of which `json` silently keeps the last."""
    row = dict(items)
    if len(row) < len(items):
        twice = Counter(key for key, _ in items).most_common(1)[0][0]
        raise DataError(f"the key {twice!r} occurs twice in one object", where=where)
    return row
