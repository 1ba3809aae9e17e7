"""A file of rows to decoded objects, each with its place."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from mens_exp.errors import DataError
from mens_exp.rows.files import inner_suffix
from mens_exp.rows.stored import MAX_LINE_BYTES, Line, chunks, lines
from mens_exp.rows.tables import rows_of_file

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Located", "decoded_line", "decoded_rows", "has_lines"]

_SPACE: Final = " \t\r\n"
_TABLES: Final[dict[str, Literal["parquet", "arrow"]]] = {".parquet": "parquet", ".arrow": "arrow"}


class Located(NamedTuple):
    """The value at one place of a file.

    Attributes:
        where: the place, as ``file:line``; in a table as ``file:row``, the first row being 1.
        value: what was decoded, or the `DataError` that says why nothing was.
        raw: the line as it was read; empty where rows are no lines.
        ends: nothing behind this place can be read.
    """

    where: str
    value: object
    raw: bytes = b""
    ends: bool = False


def has_lines(path: Path) -> bool:
    """Tell by its name whether a file has a row a line, and is neither a table nor an array."""
    return inner_suffix(path) not in {*_TABLES, ".json"}


def decoded_rows(path: Path, field: str) -> Iterator[Located]:
    """Decode a file row by row.

    Args:
        path: UTF-8 (a byte order mark is tolerated); one object a line, or in a ``.json`` file
            an array of objects; either may be compressed (``.gz``, ``.zst``). Or a table:
            ``.parquet``, ``.arrow``.
        field: the setting that names the file, for messages.

    Yields:
        Each row's place with its value, or with the `DataError` that kept it from being read.
        A line over `MAX_LINE_BYTES` is such an error.

    Raises:
        DataError: the file cannot be read, or is no file of rows.
        MissingExtra: it is a table, and pyarrow is not installed.
    """
    suffix = inner_suffix(path)
    if suffix in _TABLES:
        for number, row in rows_of_file(path, _TABLES[suffix], field):
            yield Located(f"{path}:{number}", row)
        return
    pieces: Iterator[bytes] = chunks(path, field)
    if suffix == ".json":
        data = b"".join(pieces)  # an array has no lines to read it by
        if data.lstrip().startswith(b"["):
            yield from _array(data, path)
            return
        pieces = iter([data])
    for number, line in enumerate(lines(pieces), start=1):
        yield decoded_line(line, f"{path}:{number}")


def decoded_line(line: Line, where: str) -> Located:
    """Decode one line, as `decoded_rows` does those of a file."""
    try:
        return Located(where, _json(_text(line, where), where), line.raw)
    except DataError as problem:
        return Located(where, problem, line.raw)


def _text(line: Line, where: str) -> str:
    """Decode one line; each way in which it can fail has its own message."""
    if line.size > MAX_LINE_BYTES:
        raise DataError(
            "the line is too long",
            where=where,
            found=f"{line.size:,} bytes",
            expected=f"at most {MAX_LINE_BYTES:,} bytes, one JSON object a line",
        )
    raw = line.raw.removesuffix(b"\r")
    if b"\0" in raw:
        raise DataError(
            "the line holds NUL bytes",
            where=where,
            found=f"{raw.count(0)} of them, the first at byte {raw.index(0) + 1}",
            expected="UTF-8 text; a file cut off by a crash or saved as UTF-16 has NUL bytes",
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            "the line is not UTF-8",
            where=where,
            found=f"byte 0x{raw[error.start]:02x} at byte {error.start + 1}",
            remedy="save the file as UTF-8",
        ) from error
    if not text.strip():
        raise DataError("the line is blank", where=where, expected="one JSON object a line")
    return text


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=lambda items: _object(items, where))
    except json.JSONDecodeError as error:
        raise DataError(
            f"the line is not JSON: {error.msg} at column {error.colno}",
            where=where,
            found=text[:60],
            expected="one JSON object a line",
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise DataError(f"the line is not usable JSON: {error}", where=where) from error


def _array(data: bytes, path: Path) -> Iterator[Located]:
    """Decode the elements of an array, each with the line on which it begins.

    What is wrong with the array itself ends it: no element behind it can be trusted.
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
    """Decode one element and return where the next one begins, or the closing bracket."""
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
    """Build an object, refusing what `json` does silently: the last of two equal keys wins."""
    row = dict(items)
    if len(row) < len(items):
        twice = Counter(key for key, _ in items).most_common(1)[0][0]
        raise DataError(f"the key {twice!r} stands twice in one object", where=where)
    return row
