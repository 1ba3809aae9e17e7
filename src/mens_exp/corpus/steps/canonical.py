"""The step canonical: Rust answers in rustfmt's layout, so that formatting hides no duplicate."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.corpus import OnUnformatted
from mens_exp.config.sandbox import ExecutingSandbox
from mens_exp.corpus.code_checks import spans_of
from mens_exp.corpus.rust_format import RustFormatter
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_sides
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.sandbox.opening import limits_of, open_sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.sandbox import SandboxConfig
    from mens_exp.corpus.rust_format import Formatted
    from mens_exp.rows.schema import TrainingPair

__all__ = ["LIST", "canonical"]

LIST: Final = "unformatted.jsonl"
_AT_ONCE: Final = 512  # rows that are read, then formatted, then written
_MOST_PROBLEMS: Final = 20  # told in full; the rest is counted


def canonical(step: StepInput) -> StepResult:
    """Format the Rust of each row's answers; a row in another language passes as it is.

    `unformatted.jsonl` lists the rows that rustfmt does not format, with the reason.

    Raises:
        DataError: a file cannot be read, a row in it is wrong, or it is not formatted and that
            is an error.
        Problems: several are not formatted.
        SetupError: the sandbox, rustc or rustfmt is not there.
    """
    policy = step.config.canonical.on_bad_row
    assert step.run is not None, "the command says which sandbox"
    formatter = opened(step.run.sandbox)
    facts = Counter[str](formatted=0, unchanged=0, other_language=0, unformatted=0)
    rows_in, errors = 0, _Errors()
    rows = read_sides(step.files)
    with RowWriter(step.directory) as writer, (step.directory / LIST).open("xb") as listed:
        while some := list(itertools.islice(rows, _AT_ONCE)):
            rows_in += len(some)
            made = _formatted([pair for _, pair in some], formatter)
            for (side, pair), (new, problem) in zip(some, made, strict=True):
                facts[_fate(pair, new, problem)] += 1
                if problem is not None:
                    line = {"row": pair.id, "place": pair.place, "problem": problem}
                    listed.write(json_line(line, LIST))
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
    """Return a formatter in the sandbox that the command names.

    Raises:
        SetupError: the sandbox, rustc or rustfmt is not there.
    """
    workers = config.workers if isinstance(config, ExecutingSandbox) else None
    return RustFormatter(open_sandbox(config), limits_of(config), workers)


def _formatted(
    pairs: Sequence[TrainingPair], formatter: RustFormatter
) -> Iterator[tuple[TrainingPair, str | None]]:
    """Yield each row with its Rust formatted, or as it was and what is wrong with it."""
    answers = [_answers(pair) for pair in pairs]
    codes = [said[a:b] for some in answers for said, spans in some for a, b in spans]
    results = iter(formatter.formatted(codes))
    for pair, some in zip(pairs, answers, strict=True):
        mine = [(said, [(span, next(results)) for span in spans]) for said, spans in some]
        problem = next((one.problem for _, each in mine for _, one in each if one.problem), None)
        yield (pair, problem) if problem else (_with(pair, mine), None)


def _answers(pair: TrainingPair) -> list[tuple[str, list[tuple[int, int]]]]:
    """Return the answers of a row in Rust, each with the places of its code."""
    # The turns of a conversation with tools are kept as templates take them.
    if (pair.language or "").casefold() != "rust" or pair.conversation is not None:
        return []
    return [(said, spans_of(said, "rust")) for _, said in pair.exchanges]


def _with(
    pair: TrainingPair,
    answers: Sequence[tuple[str, Sequence[tuple[tuple[int, int], Formatted]]]],
) -> TrainingPair:
    """Put formatted code in the place of the code that was there."""
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
    """The first rows that are not formatted, and the count of all."""

    def __init__(self) -> None:
        self.count, self.told = 0, list[MensError]()

    def add(self, pair: TrainingPair, problem: str) -> None:
        self.count += 1
        if len(self.told) < _MOST_PROBLEMS:
            told = DataError(f"rustfmt does not format it: {problem}", where=pair.place)
            self.told.append(told)

    def refuse(self) -> None:
        hidden = self.count - len(self.told)
        more = [DataError(f"{hidden} more rows are not formatted", where="corpus.input")]
        way = DataError(
            "rows that are not formatted are errors",
            where="corpus.canonical.on_bad_row",
            found=f"error, and {self.count} such rows",
            remedy="mend the rows, or choose keep or drop",
        )
        if self.told:
            Problems.raise_if([*self.told, *(more if hidden else []), way])
