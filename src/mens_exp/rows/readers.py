"""Readers of files of training rows.

A file is read whole and everything wrong with it is said at once: whoever wrote it
fixes it in one go.
"""

from __future__ import annotations

import codecs
import hashlib
import json
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts import digest
from mens_exp.artifacts.nearest import nearest
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.rows.schema import TrainingPair, parse_row, to_json

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["read_jsonl", "rows_digest"]

FIELD: Final = "data.path"
UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_jsonl(path: Path, max_problems: int = 20) -> list[TrainingPair]:
    """Read a JSON Lines file of training rows.

    Args:
        path: the file: UTF-8 (a byte order mark is tolerated), one object a line.
        max_problems: how many problems to tell in full; the rest is counted.

    Returns:
        The rows in file order, at least one.

    Raises:
        DataError: the file cannot be read, or one thing in it is wrong.
        Problems: several things in it are wrong; each names ``file:line``.
    """
    lines = _lines(path)
    pairs: list[TrainingPair] = []
    problems: list[MensError] = []
    for number, raw in enumerate(lines, start=1):
        where = f"{path}:{number}"
        try:
            pairs.append(parse_row(_decoded(raw, where), where))
        except Problems as several:
            problems.extend(several.problems)
        except DataError as problem:
            problems.append(problem)
    if len(problems) > max_problems:
        more = DataError(
            f"{len(problems) - max_problems} more problems in this file", where=str(path)
        )
        problems = [*problems[:max_problems], more]
    Problems.raise_if(problems)
    return pairs


def rows_digest(pairs: Iterable[TrainingPair]) -> str:
    """Hash rows in their order.

    Args:
        pairs: the rows.

    Returns:
        The SHA-256, in hex, of the rows' canonical JSON, one a line.
    """
    state = hashlib.sha256()
    for pair in pairs:
        state.update(digest.canonical_json(to_json(pair)) + b"\n")
    return state.hexdigest()


def _lines(path: Path) -> list[bytes]:
    """Return the file's lines without their ends; refuse what is no file of lines."""
    data = _bytes(path)
    if data.startswith(UTF16_MARKS):
        raise DataError(
            "the file is UTF-16", where=str(path), expected="UTF-8", remedy="save it as UTF-8"
        )
    data = data.removeprefix(codecs.BOM_UTF8)
    if not data:
        raise DataError(
            "the file is empty", where=str(path), expected="at least one row, one JSON object"
        )
    # Not splitlines: only a newline ends a row, a lone carriage return does not.
    return [line.removesuffix(b"\r") for line in data.removesuffix(b"\n").split(b"\n")]


def _bytes(path: Path) -> bytes:
    try:
        # Asked first, because opening a directory is PermissionError on Windows.
        if path.is_dir():
            raise DataError(
                "this is a directory, not a file of rows",
                where=FIELD,
                found=str(path),
                expected=f"a JSONL file{_offer(path, path.name)}",
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise DataError(
            "no such file",
            where=FIELD,
            found=str(path),
            expected=f"an existing JSONL file{_offer(path.parent, path.name)}",
        ) from error
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise DataError(
            f"the file cannot be read: {reason}", where=FIELD, found=str(path)
        ) from error


def _offer(directory: Path, name: str) -> str:
    """Return a clause with the file of `directory` whose name is nearest to `name`."""
    if not directory.is_dir():
        return f"; the directory {directory} does not exist either"
    try:
        names = sorted(entry.name for entry in directory.iterdir() if entry.is_file())
    except OSError:  # a directory that may not be listed has nothing to offer
        return ""
    rows = [other for other in names if other.endswith(".jsonl")]
    near = nearest(name, rows) or nearest(name, names) or next(iter(rows), None)
    return f"; the nearest there is {near}" if near else f"; there is none in {directory}"


def _decoded(raw: bytes, where: str) -> object:
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
    return _json(text, where)


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


def _object(items: list[tuple[str, object]], where: str) -> dict[str, object]:
    """Build an object, refusing what `json` does silently: the last of two equal keys wins."""
    row = dict(items)
    if len(row) < len(items):
        keys = [key for key, _ in items]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise DataError(f"the key {twice!r} stands twice in one object", where=where)
    return row
