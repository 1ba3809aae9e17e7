"""The step validate: rows that can be read, and whose code parses."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.data import OnBadRow
from mens_exp.corpus.code_checks import CHECKED, parse_problem
from mens_exp.corpus.steps.step import INPUT, RowWriter, StepInput, StepResult, side_of_file
from mens_exp.errors import DataError, MensError, MissingExtra, Problems
from mens_exp.rows.decode import Located, decoded_rows
from mens_exp.rows.parse import parse_row
from mens_exp.rows.quarantine import BadRow, put_aside

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.corpus.split import Side
    from mens_exp.rows.schema import TrainingPair

__all__ = ["QUARANTINE", "validate"]

QUARANTINE: Final = "quarantine.jsonl"
_MOST_PROBLEMS: Final = 20  # told in full; the rest is counted


def validate(step: StepInput) -> StepResult:
    """Pass on the rows that hold, and refuse or put aside the others.

    Raises:
        DataError: a row is bad, and bad rows are errors; or a file cannot be read.
        Problems: several are.
    """
    bad = _BadRows(step)
    rows_in = 0
    checked: Counter[str] = Counter()
    with bad, RowWriter(step.directory) as writer:
        for side, located in _located(step):
            rows_in += 1
            try:
                pair = _checked(located, checked)
            except MissingExtra:
                raise
            except MensError as error:
                bad.add(located, getattr(error, "problems", [error]))
            else:
                writer.write(pair, side)
        total = writer.total
    bad.refuse()
    return StepResult(
        rows_in=rows_in,
        rows_out=total,
        dropped=dict(sorted(bad.reasons.items())),
        facts={"checked": dict(sorted(checked.items())), "bad": bad.count},
    )


def _located(step: StepInput) -> Iterator[tuple[Side | None, Located]]:
    for path in step.files:
        side = side_of_file(path)
        for located in decoded_rows(path, INPUT):
            yield side, located


def _checked(located: Located, checked: Counter[str]) -> TrainingPair:
    if isinstance(located.value, DataError):
        raise located.value
    pair = parse_row(located.value, located.where)
    language = (pair.language or "").casefold()
    wrong = parse_problem(pair)
    if wrong is not None:
        raise DataError(
            f"the {language} code does not parse: {wrong}",
            where=located.where,
            found=pair.name,
            expected=f"an answer in {language}, as the row's language says",
        )
    checked[language if language in CHECKED else "not_checked"] += 1
    return pair


class _BadRows:
    """Counts bad rows, and writes them down or keeps their problems, as the settings say."""

    def __init__(self, step: StepInput) -> None:
        self.count = 0
        self.reasons: Counter[str] = Counter()
        self._quarantines = step.config.validate.on_bad_row is OnBadRow.quarantine
        self._path = step.directory / QUARANTINE
        self._file: BinaryIO | None = None
        self._told: list[MensError] = []

    def __enter__(self) -> None:
        """Write nothing yet: without bad rows there is no file."""

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def add(self, located: Located, problems: list[MensError]) -> None:
        self.count += 1
        row = put_aside(located, problems)
        self.reasons[row.reasons[0]] += 1  # the first, so that the counts add up to the rows
        if not self._quarantines or located.ends:
            self._told += problems[: max(0, _MOST_PROBLEMS - len(self._told))]
        else:
            self._write(row)

    def refuse(self) -> None:
        if not self._told:
            return
        hidden = self.count - len(self._told)
        more = DataError(f"{hidden} more bad rows", where=INPUT)
        way = DataError(
            "bad rows are errors",
            where="corpus.validate.on_bad_row",
            found=f"error, and {self.count} bad rows",
            remedy="mend the rows, or put them aside with quarantine",
        )
        Problems.raise_if([*self._told, *([more] if hidden > 0 else []), way])

    def _write(self, row: BadRow) -> None:
        if self._file is None:
            self._file = self._path.open("xb")
        record: dict[str, Any] = {
            "file": row.file,
            "line": row.line,
            "problems": list(row.problems),
            "raw": row.raw,
        }
        self._file.write(json_line(record, QUARANTINE))
