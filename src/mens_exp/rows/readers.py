"""Readers of files of training rows, and the quarantine of rows that cannot be used.

A file is read whole and all its problems are reported together, so that its author can fix it in
one go. A quarantined row keeps its place, content and reason, and is counted.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import atomic, digest
from mens_exp.config.data import RowFormat
from mens_exp.errors import DataError, MensError, Problems, expected_name
from mens_exp.rows.decode import Located, decoded_rows
from mens_exp.rows.parse import UNKNOWN_KEY, as_object, parse_row
from mens_exp.rows.schema import (
    ALIASES,
    KEYS,
    TrainingPair,
    format_of,
    joint_format,
    json_type,
    shown,
    to_json,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

_MOST_BAD = 100_000  # bad rows of a file that has fewer good ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The settings for reading files.

    Attributes:
        form: how rows are written; `auto` tells for each file.
        columns: the column that holds each field; empty where files have our own keys.
        group_column: the column whose value is the row's group.
        setting: the setting that names the files, for messages.
        quarantine: put bad rows aside instead of refusing the file.
    """

    form: RowFormat = RowFormat.auto
    columns: Mapping[str, str] = field(default_factory=dict)
    group_column: str | None = None
    setting: str = "data.path"
    quarantine: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOfRows:
    """The rows of a file in order, the format they were in, and the columns that were left.

    ``name`` is its path, or what messages call it; ``ignored`` counts the rows that had each
    column which `data.columns` does not name, and ``bad`` are the rows that were put aside.
    """

    name: str
    form: RowFormat
    pairs: Sequence[TrainingPair]
    ignored: dict[str, int]
    bad: tuple[BadRow, ...] = ()


def read_rows(path: Path, how: Reading | None = None, max_problems: int = 20) -> FileOfRows:
    """Read a file of training rows.

    Args:
        path: the file: JSON Lines, in a ``.json`` file an array of objects, or a table.
        how: how to read it; by default our own keys in whichever format they tell.
        max_problems: how many problems to tell in full; the rest is counted.

    Returns:
        The rows in file order, at least one unless all were put aside.

    Raises:
        DataError: the file cannot be read, or one thing in it is wrong.
        Problems: several things in it are wrong; each names ``file:line``.
    """
    how = how or Reading()
    return read_located(str(path), decoded_rows(path, how.setting), how, max_problems)


def read_located(
    name: str, rows: Iterable[Located], how: Reading, max_problems: int = 20
) -> FileOfRows:
    """Read rows that were decoded already, as `read_rows` does those of a file.

    Args:
        name: what holds them, for messages and the record.
        rows: the decoded rows; they are of one format.
        how: how to read them.
        max_problems: how many problems to tell in full; the rest is counted.
    """
    reader = RowReader(name, how, max_problems)
    for located in rows:
        reader.wrong.add(reader.take(located))
    return reader.file(reader.pairs)


class RowReader:
    """Reads the rows of one file, whose format the rows settle between them.

    ``pairs`` and ``bad`` are what was read so far and what was put aside; whoever reads a file
    bit by bit may take them out. ``wrong`` is for what :meth:`take` returns.
    """

    def __init__(self, name: str, how: Reading, max_problems: int = 20) -> None:
        """Begin a file; ``name`` is what messages call it."""
        self.name = name
        self.how = how
        self.form: RowFormat | None = None if how.form is RowFormat.auto else how.form
        self.pairs: list[TrainingPair] = []
        self.ignored: Counter[str] = Counter()
        self.bad: list[BadRow] = []
        self.wrong = WrongRows(max_problems)
        self._told_by = ""  # the place of the row that settled the format
        self._seen: Counter[str] = Counter()
        self._last: Mapping[str, object] = {}
        self._rows = self._bad_rows = 0

    def file(self, pairs: Sequence[TrainingPair]) -> FileOfRows:
        """Return what was read once the last row is.

        Raises:
            DataError: one thing in it was wrong.
            Problems: several things were.
        """
        absent = [
            _no_column(f"data.columns.{name}", column, self.name, self._last)
            for name, column in self.how.columns.items()
            if self._last and not self._seen[name]
        ]
        Problems.raise_if(self.wrong.told(absent, self.name))
        return FileOfRows(
            name=self.name,
            form=self.form or RowFormat.pair,
            pairs=pairs,
            ignored=dict(sorted(self.ignored.items())),
            bad=tuple(self.bad),
        )

    def take(self, located: Located) -> Sequence[MensError]:
        """Read one row, and return what is wrong with it unless it is put aside."""
        settled = self.form, self._told_by
        self._rows += 1
        try:
            if isinstance(located.value, DataError):
                raise located.value  # told with the others
            self._last = as_object(located.value, located.where)
            self.pairs.append(self._pair(self._last, located.where))
        except (DataError, Problems) as error:
            wrong: Sequence[MensError] = getattr(error, "problems", [error])
            self._count_bad(wrong)
            if not self.how.quarantine or located.ends:
                return wrong
            self.form, self._told_by = settled  # a bad row settles nothing
            self.bad.append(quarantined(located, wrong))
        return ()

    def _count_bad(self, wrong: Sequence[MensError]) -> None:
        """Stop reading a file of mostly bad rows: a megabyte may unpack to millions of them.

        Raises:
            Problems: most rows are bad, and they are many.
        """
        self._bad_rows += 1
        if self._bad_rows > _MOST_BAD and 2 * self._bad_rows > self._rows:
            self.wrong.add(wrong)
            stop = DataError(
                "most rows are bad, so the file is not read to its end",
                where=self.name,
                found=f"{self._bad_rows:,} bad ones among the first {self._rows:,}",
                expected=f"at most {_MOST_BAD:,} bad rows, or mostly good ones",
                remedy="check that data.path is the right file, and correct its rows",
            )
            raise Problems([stop, *self.wrong.told((), self.name)])

    def _pair(self, row: Mapping[str, object], where: str) -> TrainingPair:
        group = self._group(row, where)
        fields = self._named(row)
        if self.how.group_column is not None:
            fields = self._without_group_column(fields)
        pair = parse_row(fields, where, self._form(fields, where))
        return pair if group is None else dataclasses.replace(pair, group=group)

    def _group(self, row: Mapping[str, object], where: str) -> str | None:
        """Return the value of the group column as text; whole numbers count as their digits."""
        column = self.how.group_column
        if column is None:
            return None
        if column not in row:
            raise _no_column("data.group_column", column, where, row)
        value = row[column]
        if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
            raise DataError(
                f"the group column {column!r} must hold a text or a whole number",
                where=where,
                found=f"{json_type(value)} {shown(value)}",
            )
        return str(value)

    def _without_group_column(self, fields: dict[str, Any]) -> dict[str, Any]:
        """Drop the group column, unless it is a field that the row is read for anyway."""
        column = self.how.group_column
        read = {*ALIASES, *(key for keys in KEYS.values() for key in keys)}
        if self.how.columns or (column in read and column != "group"):
            return fields
        return {name: value for name, value in fields.items() if name != column}

    def _named(self, row: Mapping[str, object]) -> dict[str, Any]:
        """Return the row under our own names, and count the columns that are left out."""
        columns = self.how.columns
        if not columns:
            return dict(row)
        named = {name: row[column] for name, column in columns.items() if column in row}
        self._seen.update(named)
        used = {*columns.values(), self.how.group_column}
        self.ignored.update(column for column in row if column not in used)
        return named

    def _form(self, fields: Mapping[str, object], where: str) -> RowFormat:
        """Settle how the row is written, which is how the file's other rows are."""
        if self.how.form is not RowFormat.auto:
            return self.how.form
        told = format_of(fields)
        if told is None:
            return self.form or RowFormat.pair
        both = told if self.form is None else joint_format(self.form, told)
        if both is None:
            assert self.form is not None, "two formats met"
            raise DataError(
                "rows of two formats in one file",
                where=where,
                found=told.value,
                expected=f"{self.form.value}, as {self._told_by} has it",
                remedy="give each format a file of its own",
            )
        if self.form is None:
            self._told_by = where
        self.form = both
        return told


class WrongRows:
    """The problems in the rows of a file: the first ones, and the number of the others.

    A key that many rows have is one problem, told where it is met first.
    """

    def __init__(self, most: int) -> None:
        """Tell so many in full."""
        self._most = most
        self._first: list[MensError] = []
        self._total = 0
        self._keys: Counter[str] = Counter()

    def add(self, problems: Iterable[MensError]) -> None:
        """Take what is wrong with the next row."""
        for one in problems:
            if one.what.startswith(UNKNOWN_KEY):
                self._keys[one.what] += 1
                if self._keys[one.what] > 1:
                    continue
            self._total += 1
            if len(self._first) < self._most:
                self._first.append(one)

    def told(self, before: Sequence[MensError], where: str) -> list[MensError]:
        """Return what to tell, what is wrong with the whole file before it."""
        told = [*before, *map(self._counted, self._first)]
        more = len(before) + self._total - self._most
        if more <= 0:
            return told
        rest = DataError(f"{more} more problems in this file", where=where)
        return [*told[: self._most], rest]

    def _counted(self, one: MensError) -> MensError:
        count = self._keys[one.what]
        more = f", here and in {count - 1} more rows" if count > 1 else ""
        return DataError(
            one.what + more,
            where=one.where,
            found=one.found,
            expected=one.expected,
            remedy=one.remedy,
        )


def _no_column(setting: str, column: str, where: str, row: Mapping[str, object]) -> DataError:
    return DataError(
        f"there is no column {column!r}",
        where=where,
        found=", ".join(repr(name) for name in row) or "no columns",
        expected=f"what {setting} names: {expected_name(column, row)}",
    )


def rows_digest(pairs: Iterable[TrainingPair]) -> str:
    """Hash rows in their order.

    Args:
        pairs: the rows.

    Returns:
        The SHA-256, in hex, of the rows' canonical JSON, one a line.
    """
    state = hashlib.sha256()
    for pair in pairs:
        state.update(row_line(pair))
    return state.hexdigest()


def row_line(pair: TrainingPair) -> bytes:
    """Return the line of a row that `rows_digest` hashes."""
    return digest.canonical_json(to_json(pair)) + b"\n"


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


def quarantined(row: Located, problems: Sequence[MensError]) -> BadRow:
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


def quarantine_counts(bad: Sequence[BadRow]) -> Counter[str]:
    """Count rows by reason; a row with several counts for each of them."""
    return Counter(reason for row in bad for reason in row.reasons)


def quarantine_summary(bad: Sequence[BadRow], rows: int, most_frac: float) -> dict[str, Any]:
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
        return {
            "rows": rows,
            "bad": len(bad),
            "reasons": dict(sorted(quarantine_counts(bad).items())),
        }
    told = "; ".join(
        f"{reason} ({count})" for reason, count in quarantine_counts(bad).most_common(5)
    )
    raise DataError(
        "too many bad rows",
        where="data.max_bad_frac",
        found=f"{len(bad)} of {rows}, the first at {bad[0].file}:{bad[0].line}: {told}",
        expected=f"at most {most_frac:g} of them",
        remedy="mend the rows, or raise data.max_bad_frac",
    )


def write_quarantine(path: Path, bad: Sequence[BadRow]) -> None:
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
