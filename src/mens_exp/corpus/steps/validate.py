"""Steps that check rows: validate (rows can be read, and their code parses) and canonical.

canonical formats Rust with rustfmt, so that formatting hides no duplicates.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.corpus import OnUnformatted
from mens_exp.config.data import OnBadRow
from mens_exp.config.evaluation import ExecutingSandbox
from mens_exp.corpus.code_checks import CHECKED, Compiler, NoCompiler, parse_problem, spans_of
from mens_exp.corpus.rust import RustFormatter
from mens_exp.corpus.steps.step import (
    INPUT,
    RowWriter,
    StepInput,
    StepResult,
    read_sides,
    side_of_file,
)
from mens_exp.errors import DataError, MensError, MissingExtra, Problems
from mens_exp.rows.decode import Located, decoded_rows
from mens_exp.rows.parse import parse_row
from mens_exp.rows.readers import BadRow, WrongRows, quarantined
from mens_exp.rows.schema import TrainingPair
from mens_exp.sandbox.opening import limits_of, open_sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.evaluation import SandboxConfig
    from mens_exp.corpus.rust import Formatted
    from mens_exp.corpus.split import Side

QUARANTINE: Final = "quarantine.jsonl"
_MOST_PROBLEMS: Final = 20  # reported in full; the rest is counted
_COMPILED_AT_ONCE: Final = 128  # rows per batch


def validate(step: StepInput) -> StepResult:
    """Pass on valid rows, and refuse or quarantine the others.

    Raises:
        DataError: a row is bad, and bad rows are errors; or a file cannot be read.
        Problems: several are.
        SetupError: code is to be compiled, but the sandbox or a compiler is not available.
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
    """Yield rows in batches for the compiler."""
    while some := list(itertools.islice(rows, _COMPILED_AT_ONCE)):
        yield some


def _tried(located: Located, checked: Counter[str]) -> TrainingPair | list[MensError]:
    """Return the row, or its problems."""
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
    """Counts bad rows, and quarantines them or keeps their problems, as configured."""

    def __init__(self, step: StepInput) -> None:
        self.count = 0
        self.reasons: Counter[str] = Counter()
        self._quarantines = step.config.validate.on_bad_row is OnBadRow.quarantine
        self._path = step.directory / QUARANTINE
        self._file: BinaryIO | None = None
        self._wrong = WrongRows(_MOST_PROBLEMS)

    def __enter__(self) -> None:
        """Do nothing: the file is created with the first bad row."""

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def add(self, located: Located, problems: list[MensError]) -> None:
        self.count += 1
        row = quarantined(located, problems)
        self.reasons[row.reasons[0]] += 1  # only the first: counts add up to the rows
        if not self._quarantines or located.ends:
            self._wrong.add(problems)
        else:
            self._write(row)

    def refuse(self) -> None:
        if not self._wrong:
            return
        way = DataError(
            "bad rows are errors",
            where="corpus.validate.on_bad_row",
            found=f"error, and {self.count} bad rows",
            remedy="fix the rows, or quarantine them",
        )
        raise Problems([*self._wrong.reported((), INPUT), way])

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


UNFORMATTED: Final = "unformatted.jsonl"
_FORMATTED_AT_ONCE: Final = 512  # rows per batch


def canonical(step: StepInput) -> StepResult:
    """Format the Rust code in answers; rows in other languages are unchanged.

    `unformatted.jsonl` lists the rows that rustfmt cannot format, with the reason.

    Raises:
        DataError: a file cannot be read, a row in it is invalid, or a row cannot be formatted and
            that is an error.
        Problems: several rows cannot be formatted.
        SetupError: the sandbox, rustc or rustfmt is not available.
    """
    policy = step.config.canonical.on_bad_row
    assert step.run is not None, "the command says which sandbox"
    formatter = opened(step.run.sandbox)
    facts = Counter[str](formatted=0, unchanged=0, other_language=0, unformatted=0)
    rows_in, errors = 0, _Errors()
    rows = read_sides(step.files)
    with RowWriter(step.directory) as writer, (step.directory / UNFORMATTED).open("xb") as listed:
        while some := list(itertools.islice(rows, _FORMATTED_AT_ONCE)):
            rows_in += len(some)
            made = _formatted([pair for _, pair in some], formatter)
            for (side, pair), (new, problem) in zip(some, made, strict=True):
                facts[_fate(pair, new, problem)] += 1
                if problem is not None:
                    line = {"row": pair.id, "place": pair.place, "problem": problem}
                    listed.write(json_line(line, UNFORMATTED))
                    errors.add(pair, problem)
                if problem is None or policy is OnUnformatted.keep:
                    writer.write(new, side)
        total = writer.total
    if policy is OnUnformatted.error:
        errors.refuse()
    dropped = {"not formatted": rows_in - total} if rows_in > total else {}
    return StepResult(
        rows_in=rows_in,
        rows_out=total,
        dropped=dropped,
        facts={**facts, "rustfmt": formatter.version},
    )


def opened(config: SandboxConfig) -> RustFormatter:
    """Return a formatter in the configured sandbox.

    Raises:
        SetupError: the sandbox, rustc or rustfmt is not available.
    """
    workers = config.workers if isinstance(config, ExecutingSandbox) else None
    return RustFormatter(open_sandbox(config), limits_of(config), workers)


def _formatted(
    pairs: Sequence[TrainingPair], formatter: RustFormatter
) -> Iterator[tuple[TrainingPair, str | None]]:
    """Yield each row with its Rust formatted, or unchanged with the problem."""
    answers = [_answers(pair) for pair in pairs]
    codes = [said[a:b] for some in answers for said, spans in some for a, b in spans]
    results = iter(formatter.formatted(codes))
    for pair, some in zip(pairs, answers, strict=True):
        mine = [(said, [(span, next(results)) for span in spans]) for said, spans in some]
        problem = next((one.problem for _, each in mine for _, one in each if one.problem), None)
        yield (pair, problem) if problem else (_with(pair, mine), None)


def _answers(pair: TrainingPair) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the answers of a Rust row, each with the spans of its code."""
    # Conversations with tools are kept in the form that templates need.
    if (pair.language or "").casefold() != "rust" or pair.conversation is not None:
        return []
    return [(said, spans_of(said, "rust")) for _, said in pair.exchanges]


def _with(
    pair: TrainingPair,
    answers: Sequence[tuple[str, Sequence[tuple[tuple[int, int], Formatted]]]],
) -> TrainingPair:
    """Replace the code in answers with its formatted form."""
    if not answers:
        return pair
    made = []
    for said, codes in answers:
        text = said
        for (start, end), one in reversed(codes):
            is_whole = (start, end) == (0, len(said))
            new = one.text.strip("\n") if is_whole else one.text
            text = text[:start] + new + text[end:]
        made.append(text if text.strip() else said)
    history = tuple((asked, new) for (asked, _), new in zip(pair.history, made, strict=False))
    return dataclasses.replace(pair, history=history, response=made[-1])


def _fate(pair: TrainingPair, new: TrainingPair, problem: str | None) -> str:
    if problem is not None:
        return "unformatted"
    if (pair.language or "").casefold() != "rust":
        return "other_language"
    return "unchanged" if new == pair else "formatted"


class _Errors:
    """The first rows that cannot be formatted, and their total count."""

    def __init__(self) -> None:
        self.count, self.shown = 0, list[MensError]()

    def add(self, pair: TrainingPair, problem: str) -> None:
        self.count += 1
        if len(self.shown) < _MOST_PROBLEMS:
            problem_of_row = DataError(f"rustfmt does not format it: {problem}", where=pair.place)
            self.shown.append(problem_of_row)

    def refuse(self) -> None:
        hidden = self.count - len(self.shown)
        more = [DataError(f"{hidden} more rows are not formatted", where="corpus.input")]
        way = DataError(
            "rows that are not formatted are errors",
            where="corpus.canonical.on_bad_row",
            found=f"error, and {self.count} such rows",
            remedy="fix the rows, or choose keep or drop",
        )
        if self.shown:
            Problems.raise_if([*self.shown, *(more if hidden else []), way])
