"""The step validate: rows that can be read, and whose code parses."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.data import OnBadRow
from mens_exp.corpus.code_checks import CHECKED, parse_problem
from mens_exp.corpus.compiling import Compiler, NoCompiler
from mens_exp.corpus.steps.step import INPUT, RowWriter, StepInput, StepResult, side_of_file
from mens_exp.errors import DataError, MensError, MissingExtra, Problems
from mens_exp.rows.decode import Located, decoded_rows
from mens_exp.rows.parse import parse_row
from mens_exp.rows.quarantine import BadRow, put_aside
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.corpus.split import Side

__all__ = ["QUARANTINE", "validate"]

QUARANTINE: Final = "quarantine.jsonl"
_MOST_PROBLEMS: Final = 20  # told in full; the rest is counted
_AT_ONCE: Final = 128  # rows that are read, then compiled, then written


def validate(step: StepInput) -> StepResult:
    """Pass on the rows that hold, and refuse or put aside the others.

    Raises:
        DataError: a row is bad, and bad rows are errors; or a file cannot be read.
        Problems: several are.
        SetupError: code is to be compiled, and the sandbox or a compiler is not there.
    """
    bad = _BadRows(step)
    rows_in = 0
    checked: Counter[str] = Counter()
    compiler = _compiler(step)
    with bad, RowWriter(step.directory) as writer:
        for some in _several(_located(step)):
            rows_in += len(some)
            tried = [_tried(located, checked) for _, located in some]
            refused = compiler.problems([one for one in tried if isinstance(one, TrainingPair)])
            for (side, located), one in zip(some, tried, strict=True):
                if not isinstance(one, TrainingPair):
                    bad.add(located, one)
                elif (wrong := next(refused)) is not None:
                    bad.add(located, [_does_not(f"compile: {wrong}", one, located)])
                else:
                    writer.write(one, side)
        total = writer.total
    bad.refuse()
    return StepResult(
        rows_in=rows_in,
        rows_out=total,
        dropped=dict(sorted(bad.reasons.items())),
        facts={
            "checked": dict(sorted(checked.items())),
            "bad": bad.count,
            "compiled": compiler.compiled(),
        },
    )


def _located(step: StepInput) -> Iterator[tuple[Side | None, Located]]:
    for path in step.files:
        side = side_of_file(path)
        for located in decoded_rows(path, INPUT):
            yield side, located


def _compiler(step: StepInput) -> Compiler | NoCompiler:
    if not step.config.validate.compile:
        return NoCompiler()
    assert step.run is not None, "the command says which sandbox"
    return Compiler(step.run.sandbox)


def _several(
    rows: Iterator[tuple[Side | None, Located]],
) -> Iterator[list[tuple[Side | None, Located]]]:
    """Yield rows so many at a time as are compiled at once."""
    while some := list(itertools.islice(rows, _AT_ONCE)):
        yield some


def _tried(located: Located, checked: Counter[str]) -> TrainingPair | list[MensError]:
    """Return the row, or what is wrong with it."""
    try:
        return _checked(located, checked)
    except MissingExtra:
        raise
    except MensError as error:
        return list(getattr(error, "problems", [error]))


def _checked(located: Located, checked: Counter[str]) -> TrainingPair:
    if isinstance(located.value, DataError):
        raise located.value
    pair = parse_row(located.value, located.where)
    language = (pair.language or "").casefold()
    wrong = parse_problem(pair)
    if wrong is not None:
        raise _does_not(f"parse: {wrong}", pair, located)
    checked[language if language in CHECKED else "not_checked"] += 1
    return pair


def _does_not(what: str, pair: TrainingPair, located: Located) -> DataError:
    language = (pair.language or "").casefold()
    return DataError(
        f"the {language} code does not {what}",
        where=located.where,
        found=pair.name,
        expected=f"an answer in {language}, as the row's language says",
    )


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
