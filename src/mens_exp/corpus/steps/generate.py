"""The step generate: rows of the generator, behind the rows that there are."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Final

from mens_exp.corpus.generator.generate import drawn_tasks
from mens_exp.corpus.split import PROJECT_END, Side
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_rows

__all__ = ["generate"]

_SETTING: Final = "corpus.generate.rows"
_PROJECT: Final = "generated"


def generate(step: StepInput) -> StepResult:
    """Pass on the rows of the step before, and add those of the generator.

    They come from the families that are trained on: nothing of a family that `data=synthetic`
    validates on, or of the benchmark's, is ever among them. A row's group is ``generated`` and its
    family, its category the family's theme.

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
            group = f"{_PROJECT}{PROJECT_END}{task.pair.group}"
            writer.write(dataclasses.replace(task.pair, group=group, language="python"))
        total = writer.total
    return StepResult(
        rows_in=total + sum(dropped.values()),
        rows_out=total,
        dropped=dict(sorted(dropped.items())),
        facts={"passed_on": before, "generated": total - before},
    )
