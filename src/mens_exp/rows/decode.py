"""A file of rows to decoded objects, each with its place."""

from __future__ import annotations

import codecs
import json
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.nearest import nearest_file
from mens_exp.errors import DataError
from mens_exp.rows.files import ROWS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["Located", "decoded_rows"]

UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_SPACE: Final = " \t\r\n"

Located = tuple[str, object]
"""A place, as ``file:line``, and what stands there: a decoded value, or why there is none."""


def decoded_rows(path: Path, field: str) -> Iterator[Located]:
    """Decode a file row by row.

    Args:
        path: UTF-8 (a byte order mark is tolerated); one object a line, or in a ``.json`` file
            an array of objects.
        field: the setting that names the file, for messages.

    Yields:
        Each row's place with its value, or with the `DataError` that kept it from being read.

    Raises:
        DataError: the file cannot be read, or is no file of rows.
    """
    data = _content(path, field)
    if path.suffix == ".json" and data.lstrip().startswith(b"["):
        yield from _array(data, path)
        return
    # Not splitlines: only a newline ends a row, a lone carriage return does not.
    for number, raw in enumerate(data.removesuffix(b"\n").split(b"\n"), start=1):
        where = f"{path}:{number}"
        try:
            yield where, _json(_text(raw.removesuffix(b"\r"), where), where)
        except DataError as problem:
            yield where, problem


def _content(path: Path, field: str) -> bytes:
    data = _bytes(path, field)
    if data.startswith(UTF16_MARKS):
        raise DataError(
            "the file is UTF-16", where=str(path), expected="UTF-8", remedy="save it as UTF-8"
        )
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data:
        raise DataError(
            "the file is empty", where=str(path), expected="at least one row, one JSON object"
        )
    return data


def _bytes(path: Path, field: str) -> bytes:
    try:
        # Asked first, because opening a directory is PermissionError on Windows.
        if path.is_dir():
            raise DataError(
                "this is a directory, not a file of rows",
                where=field,
                found=str(path),
                expected=f"a file of rows{nearest_file(path, path.name, ROWS)}",
                remedy=f"for all files in it: {field}='{path}/*.jsonl'",
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            "no such file",
            where=field,
            found=str(path),
            expected=f"an existing file of rows{nearest_file(path.parent, path.name, ROWS)}",
        ) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"the file cannot be read: {reason}", where=field, found=str(path)
        ) from error


def _text(raw: bytes, where: str) -> str:
    """Decode one line; each way in which it can fail has its own message."""
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
        yield f"{path}:{line}", DataError("the file is not UTF-8", where=f"{path}:{line}")
        return
    position, line, counted = _skip(text, text.index("[") + 1), 1, 0
    while not text.startswith("]", position):
        line, counted = line + text.count("\n", counted, position), position
        where = f"{path}:{line}"
        try:
            value, position = _element(text, position, where)
        except DataError as problem:
            yield where, problem
            return
        yield where, value
    if counted == 0:
        yield f"{path}:1", DataError("the array is empty", where=str(path), expected="a row")
    elif rest := text[position + 1 :].strip():
        yield where, DataError("something follows the array", where=where, found=rest[:60])


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
        keys = [key for key, _ in items]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice!r} stands twice in one object", where=where)
    return row
