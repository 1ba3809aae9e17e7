"""Readers of files of training rows, and the quarantine of rows that cannot be used.

A file is read in full and all its problems are reported together, so that they can be fixed in one
go. A quarantined row is recorded with its location, content and reason, and counted.
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
from mens_exp.config.data import NEEDED_FIELDS, RowFormat
from mens_exp.errors import DataError, MensError, Problems, expected_name
from mens_exp.rows.decode import Located, decoded_rows
from mens_exp.rows.parse import as_columns, as_object, columns_of, likely_columns, parse_row
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

_FIELDS = "fields."  # prefix of a further field's name
_SHOWN_PLACES = 5  # locations listed for a kind of problem, besides the first
_MOST_BAD = 100_000  # limit on bad rows, if the file has fewer good ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The settings for reading files.

    Attributes:
        form: the rows' format; `auto` infers it for each file.
        columns: the column of each field, with further fields as ``fields.<name>``; empty if files
            use our own keys.
        group_column: the column whose value is the row's group.
        setting: the setting that names the files, for messages.
        quarantine: quarantine bad rows instead of refusing the file.
    """

    form: RowFormat = RowFormat.auto
    columns: Mapping[str, str] = field(default_factory=dict)
    group_column: str | None = None
    setting: str = "data.path"
    quarantine: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FileOfRows:
    """The rows of a file in order, their format, and the ignored columns.

    ``name`` is its path, or its name in messages. ``ignored`` counts, for each column not named in
    `data.columns`, the rows that had it; ``bad`` are the quarantined rows.
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
        how: the settings for reading; by default our own keys, in any format they indicate.
        max_problems: maximum number of problems reported in full; the rest are counted.

    Returns:
        The rows in file order, at least one unless all were quarantined.

    Raises:
        DataError: the file cannot be read, or has one problem.
        Problems: it has several problems; each names ``file:line``.
    """
    how = how or Reading()
    return read_located(str(path), decoded_rows(path, how.setting), how, max_problems)


def read_located(
    name: str, rows: Iterable[Located], how: Reading, max_problems: int = 20
) -> FileOfRows:
    """Read rows that are already decoded, like `read_rows` does for a file.

    Args:
        name: name of their container, for messages and the record.
        rows: the decoded rows, all of one format.
        how: the settings for reading.
        max_problems: maximum number of problems reported in full; the rest are counted.
    """
    reader = RowReader(name, how, max_problems)
    for located in rows:
        reader.wrong.add(reader.take(located))
    return reader.file(reader.pairs)


class RowReader:
    """Reader of the rows of one file, whose common format is inferred from the rows.

    ``pairs`` and ``bad`` hold the rows read so far and the quarantined ones; a caller that reads
    incrementally may remove them. ``wrong`` collects the problems returned by :meth:`take`.
    """

    def __init__(self, name: str, how: Reading, max_problems: int = 20) -> None:
        """Start a file; ``name`` is used in messages."""
        self.name = name
        self.how = how
        self.form: RowFormat | None = None if how.form is RowFormat.auto else how.form
        self.pairs: list[TrainingPair] = []
        self.ignored: Counter[str] = Counter()
        self.bad: list[BadRow] = []
        self.wrong = WrongRows(max_problems)
        # Required fields; a missing column of one is reported with the row.
        told = format_of(how.columns) if how.form is RowFormat.auto else how.form
        self._needed = NEEDED_FIELDS[told] if how.columns and told else ()
        self._format_of_row = ""  # location of the row that determined the format
        self._seen: Counter[str] = Counter()
        self._last: Mapping[str, object] = {}
        self._rows = self._bad_rows = 0

    def file(self, pairs: Sequence[TrainingPair]) -> FileOfRows:
        """Return the result after the last row has been read.

        Raises:
            DataError: there was one problem.
            Problems: there were several.
        """
        Problems.raise_if(self.wrong.reported(self.absent_columns(), self.name))
        return FileOfRows(
            name=self.name,
            form=self.form or RowFormat.pair,
            pairs=pairs,
            ignored=dict(sorted(self.ignored.items())),
            bad=tuple(self.bad),
        )

    def absent_columns(self) -> list[MensError]:
        """Return a problem for each optional column that `data.columns` names and no row has."""
        return [
            _no_column(f"data.columns.{name}", column, self.name, self._last)
            for name, column in self.how.columns.items()
            if self._last and not self._seen[name] and name not in self._needed
        ]

    def take(self, located: Located) -> Sequence[MensError]:
        """Read one row, and return its problems unless it is quarantined."""
        before = self.form, self._format_of_row
        self._rows += 1
        try:
            if isinstance(located.value, DataError):
                raise located.value  # reported with the others
            self._last = as_object(located.value, located.where)
            self.pairs.append(self._pair(self._last, located.where))
        except (DataError, Problems) as error:
            wrong: Sequence[MensError] = getattr(error, "problems", [error])
            self._count_bad(wrong)
            if not self.how.quarantine or located.ends:
                return wrong
            self.form, self._format_of_row = before  # a bad row does not determine the format
            self.bad.append(quarantined(located, wrong))
        return ()

    def _count_bad(self, wrong: Sequence[MensError]) -> None:
        """Stop reading a file of mostly bad rows; a compressed megabyte may hold millions.

        Raises:
            Problems: most rows are bad, and there are many.
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
            raise Problems([stop, *self.wrong.reported((), self.name)])

    def _pair(self, row: Mapping[str, object], where: str) -> TrainingPair:
        group = self._group(row, where)
        fields = self._named(row, where)
        if self.how.group_column is not None:
            fields = self._without_group_column(fields)
        pair = parse_row(fields, where, self._form(fields, where))
        return pair if group is None else dataclasses.replace(pair, group=group)

    def _group(self, row: Mapping[str, object], where: str) -> str | None:
        """Return the value of the group column as a string; integers are converted to digits."""
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
        """Drop the group column, unless it is also a field of the row."""
        column = self.how.group_column
        read = {*ALIASES, *(key for keys in KEYS.values() for key in keys)}
        if self.how.columns or (column in read and column != "group"):
            return fields
        return {name: value for name, value in fields.items() if name != column}

    def _named(self, row: Mapping[str, object], where: str) -> dict[str, Any]:
        """Return the row under our own names, and count the ignored columns.

        Raises:
            DataError: it lacks a required column.
        """
        columns = self.how.columns
        if not columns:
            return dict(row)
        named = {name: row[column] for name, column in columns.items() if column in row}
        self._seen.update(named.keys())
        for name in self._needed:
            if name in columns and name not in named:
                remedy = None
                if self._seen[name]:  # other rows have this column
                    remedy = "fix the row, or set data.on_bad_row=quarantine"
                elif likely := likely_columns(row):
                    remedy = f"name columns of the rows, such as {as_columns(likely)}"
                setting = f"data.columns.{name}"
                raise _no_column(setting, columns[name], where, row, remedy)
        used = {*columns.values(), self.how.group_column}
        self.ignored.update(column for column in row if column not in used)
        plain: dict[str, Any] = {
            n: value for n, value in named.items() if not n.startswith(_FIELDS)
        }
        further = {n.removeprefix(_FIELDS): v for n, v in named.items() if n.startswith(_FIELDS)}
        return plain | ({"fields": further} if further else {})

    def _form(self, fields: Mapping[str, object], where: str) -> RowFormat:
        """Determine the row's format, which must be that of the file's other rows."""
        if self.how.form is not RowFormat.auto:
            has_any = format_of(fields) or fields.keys() & {*KEYS[self.how.form]}
            return self.how.form if has_any else RowFormat.auto
        told = format_of(fields) or format_of(self.how.columns)
        if told is None:
            return self.form or RowFormat.auto
        both = told if self.form is None else joint_format(self.form, told)
        if both is None:
            assert self.form is not None, "two formats met"
            raise DataError(
                "rows of two formats in one file",
                where=where,
                found=told.value,
                expected=f"{self.form.value}, as {self._format_of_row} has it",
                remedy="put each format in a separate file",
            )
        if self.form is None:
            self._format_of_row = where
        self.form = both
        return told


class WrongRows:
    """The problems in rows; those of one kind are reported once, with the number of their rows.

    Problems are of one kind if their messages differ only in numbers. The first problem of a kind
    is reported in full.
    """

    def __init__(self, most: int) -> None:
        """Set the maximum number of reported problems."""
        self._most = most
        self._first: list[tuple[str, MensError]] = []
        self._total = 0
        self._rows: Counter[str] = Counter()
        self._places: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        """Whether there is any problem."""
        return self._total > 0

    def add(self, problems: Iterable[MensError]) -> None:
        """Add the problems of the next row."""
        found = [(_NUMBER.sub("N", one.what), one) for one in problems]
        new = [(kind, one) for kind, one in found if kind not in self._rows]
        self._total += len(new)
        self._first += new[: self._most - len(self._first)]
        for kind, one in dict(found).items():
            self._rows[kind] += 1
            if 1 < self._rows[kind] <= 1 + _SHOWN_PLACES:
                place = (one.where or "").rpartition(":")[2].rstrip(")")
                self._places.setdefault(kind, []).append(place)

    def reported(
        self, before: Sequence[MensError], where: str, *, is_part: bool = False
    ) -> list[MensError]:
        """Return the problems to report; those of the whole file come first.

        Args:
            before: problems of the whole file.
            where: the file, for the number of unreported problems.
            is_part: whether some rows were not read.
        """
        told = [*before, *(self._counted(kind, one, is_part) for kind, one in self._first)]
        more = len(before) + self._total - self._most
        if more <= 0:
            return told
        rest = DataError(f"{more} more problems in this file", where=where)
        return [*told[: self._most], rest]

    def _counted(self, kind: str, one: MensError, is_part: bool) -> MensError:
        more = self._rows[kind] - 1
        if not more:
            return one
        places = [*self._places[kind], *(["…"] if more > _SHOWN_PLACES else [])]
        rows = f"{more:,} more row{'s' if more > 1 else ''}{' at least' if is_part else ''}"
        return DataError(
            f"{one.what}, here and in {rows} ({', '.join(places)})",
            where=one.where,
            found=one.found,
            expected=one.expected,
            remedy=one.remedy,
        )


def _no_column(
    setting: str, column: str, where: str, row: Mapping[str, object], remedy: str | None = None
) -> DataError:
    return DataError(
        f"there is no column {column!r}",
        where=where,
        found=columns_of(row),
        expected=f"what {setting} names: {expected_name(column, row)}",
        remedy=remedy,
    )


def rows_digest(pairs: Iterable[TrainingPair]) -> str:
    """Hash rows in order.

    Args:
        pairs: the rows.

    Returns:
        The SHA-256, in hex, of the rows' canonical JSON, one per line.
    """
    state = hashlib.sha256()
    for pair in pairs:
        state.update(row_line(pair))
    return state.hexdigest()


def row_line(pair: TrainingPair) -> bytes:
    """Return the line of a row that `rows_digest` hashes."""
    return digest.canonical_json(to_json(pair)) + b"\n"


_NUMBER = re.compile(r"(?<![-\w])\d+")  # not the 8 of UTF-8


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """A quarantined row.

    Attributes:
        file: the file that contains it.
        line: its line, or its row in a table, from 1.
        raw: its content; bytes that are not text are escaped, only the start of a line over the
            limit is kept, and a row that is not a line is stored as JSON.
        problems: all its problems, in full.
    """

    file: str
    line: int
    raw: str
    problems: tuple[str, ...]
    reasons: tuple[str, ...]


def quarantined(row: Located, problems: Sequence[MensError]) -> BadRow:
    """Return a quarantined row with its problems."""
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
    """Return the problem without the parts that vary between rows: numbers and trailing details."""
    return _NUMBER.sub("N", problem.what.partition(":")[0])


def quarantine_counts(bad: Sequence[BadRow]) -> Counter[str]:
    """Count rows by reason; a row with several reasons counts for each."""
    return Counter(reason for row in bad for reason in row.reasons)


def quarantine_summary(bad: Sequence[BadRow], rows: int, most_frac: float) -> dict[str, Any]:
    """Summarize for the record how many rows were quarantined and why.

    If too many are bad, they are refused, because they were probably meant to be read differently.

    Args:
        bad: the quarantined rows.
        rows: the number of all rows, including bad ones.
        most_frac: the largest accepted fraction of bad rows.

    Raises:
        DataError: the fraction is larger.
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
        remedy="fix the rows, or raise data.max_bad_frac",
    )


def write_quarantine(path: Path, bad: Sequence[BadRow]) -> None:
    """Write quarantined rows, one JSON object per line: file, line, problems, raw.

    Raises:
        OSError: writing failed.
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
