"""The step curriculum: rows in the order of their difficulty."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.corpus import DifficultyOrder
from mens_exp.corpus.difficulty import HIGHEST, estimated
from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.sorted_runs import sorted_lines
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_sides
from mens_exp.rows.schema import to_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.rows.schema import TrainingPair

__all__ = ["curriculum"]

_DIGITS: Final = 12  # of a length and of a row's number: rows that are alike keep their order
_MOST: Final = 10**_DIGITS - 1


def curriculum(step: StepInput) -> StepResult:
    """Sort rows by difficulty, then by the length of the response, then as they came.

    After a split only train is sorted; the other sides pass as they are.
    """
    counts = _Counts(hardest_first=step.config.curriculum.order is DifficultyOrder.hardest_first)
    with RowWriter(step.directory) as writer:
        sorted_side = None

        def keyed() -> Iterator[bytes]:
            nonlocal sorted_side
            for side, pair in read_sides(step.files):
                if side in {None, Side.TRAIN}:
                    sorted_side = side
                    yield counts.key(pair) + json_line(to_json(pair), "curriculum")
                else:
                    writer.write(pair, side)

        for line in sorted_lines(keyed(), step.scratch):
            writer.write_line(line[_Counts.width :], sorted_side)
        total = writer.total
    return StepResult(
        rows_in=total,
        rows_out=total,
        facts={
            "rows_by_difficulty": dict(sorted(counts.by_difficulty.items())),
            "estimated": counts.estimated,
        },
    )


class _Counts:
    """Makes the keys that rows are sorted by, and counts what they say."""

    width: Final = len(str(HIGHEST)) + 2 * _DIGITS

    def __init__(self, *, hardest_first: bool) -> None:
        self.by_difficulty: Counter[str] = Counter()
        self.estimated = 0
        self._hardest_first = hardest_first
        self._number = 0

    def key(self, pair: TrainingPair) -> bytes:
        difficulty, size = pair.difficulty, min(len(pair.response), _MOST)
        if difficulty is None:
            difficulty = estimated(pair)
            self.estimated += 1
        self.by_difficulty[f"{difficulty:02d}"] += 1
        if self._hardest_first:
            difficulty, size = HIGHEST - difficulty, _MOST - size
        number, self._number = self._number, self._number + 1
        return f"{difficulty:02d}{size:0{_DIGITS}d}{number:0{_DIGITS}d}".encode("ascii")
