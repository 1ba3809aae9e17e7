"""The step generate: rows of the generator, behind the rows that there are."""

from __future__ import annotations

from collections import Counter
from typing import Final

from mens_exp.corpus.generator.generate import drawn_tasks
from mens_exp.corpus.split import Side
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_rows

__all__ = ["generate"]

_SETTING: Final = "corpus.generate.rows"


def generate(step: StepInput) -> StepResult:
    """Pass on the rows of the step before, and add those of the generator.

    They come from the families that are trained on: nothing of a family that `data=synthetic`
    validates on, or of the benchmark's, is ever among them.

    Raises:
        DataError: the families have not so many different tasks.
    """
    config = step.config.generate
    dropped: Counter[str] = Counter()
    with RowWriter(step.directory) as writer:
        for pair in read_rows(step.files):
            writer.write(pair)
        before = writer.total
        tasks = drawn_tasks(
            Side.TRAIN, config.rows, config.seed, config.repair_frac, dropped, where=_SETTING
        )
        for task in tasks:
            writer.write(task.pair)
        total = writer.total
    return StepResult(
        rows_in=total + sum(dropped.values()),
        rows_out=total,
        dropped=dict(sorted(dropped.items())),
        facts={"passed_on": before, "generated": total - before},
    )
