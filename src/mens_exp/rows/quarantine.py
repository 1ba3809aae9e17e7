"""Rows that could not be used: put aside with place, content and reason, and counted."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from mens_exp.errors import MensError
    from mens_exp.rows.decode import Located

__all__ = ["BadRow", "counts", "put_aside", "summary", "write"]

_NUMBER = re.compile(r"(?<![-\w])\d+")  # not that of UTF-8


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """One row that is put aside.

    Attributes:
        file: what holds it.
        line: its line there, or its row in a table, from 1.
        raw: what stood there; bytes that are no text are escaped, of a line over the limit only
            the beginning is kept, of a row that is no line its JSON.
        problems: everything that is wrong with it, in full.
    """

    file: str
    line: int
    raw: str
    problems: tuple[str, ...]
    reasons: tuple[str, ...]


def put_aside(row: Located, problems: Sequence[MensError]) -> BadRow:
    """Keep a row with what is wrong with it."""
    file, _, line = row.where.rpartition(":")
    if row.raw or isinstance(row.value, DataError):
        raw = row.raw.decode("utf-8", "backslashreplace")
    else:
        raw = json.dumps(row.value, default=repr)
    return BadRow(
        file=file,
        line=int(line),
        raw=raw,
        problems=tuple(str(problem) for problem in problems),
        reasons=tuple(dict.fromkeys(_reason(problem) for problem in problems)),
    )


def _reason(problem: MensError) -> str:
    """Return what is wrong without what differs from row to row: numbers, and details behind it."""
    return _NUMBER.sub("N", problem.what.partition(":")[0])


def counts(bad: Sequence[BadRow]) -> Counter[str]:
    """Count rows by reason; a row with several counts for each of them."""
    return Counter(reason for row in bad for reason in row.reasons)


def summary(bad: Sequence[BadRow], rows: int, most_frac: float) -> dict[str, Any]:
    """Say for the record how many rows were put aside and why.

    Too many are refused: rows of which many are bad were meant to be read otherwise.

    Args:
        bad: those that are put aside.
        rows: how many there are, the bad ones included.
        most_frac: the largest share that may be bad.

    Raises:
        DataError: more are.
    """
    if len(bad) <= most_frac * rows:
        return {"rows": rows, "bad": len(bad), "reasons": dict(sorted(counts(bad).items()))}
    told = "; ".join(f"{reason} ({count})" for reason, count in counts(bad).most_common(5))
    raise DataError(
        "too many bad rows",
        where="data.max_bad_frac",
        found=f"{len(bad)} of {rows}, the first at {bad[0].file}:{bad[0].line}: {told}",
        expected=f"at most {most_frac:g} of them",
        remedy="mend the rows, or raise data.max_bad_frac",
    )


def write(path: Path, bad: Sequence[BadRow]) -> None:
    """Write rows that were put aside, one JSON object a line: file, line, problems, raw.

    Raises:
        OSError: the disk refused.
    """
    with atomic.stream(path) as file:
        for row in bad:
            record: dict[str, Any] = {
                "file": row.file,
                "line": row.line,
                "problems": list(row.problems),
                "raw": row.raw,
            }
            file.write(atomic.json_line(record, str(path)))
