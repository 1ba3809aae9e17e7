"""The step dedupe: drops exact and near-duplicates, and lists what each one was a duplicate of."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts.atomic import json_line
from mens_exp.corpus.duplicates import duplicates
from mens_exp.corpus.steps.step import RowWriter, StepResult, read_rows, read_sides

if TYPE_CHECKING:
    from mens_exp.corpus.steps.step import StepInput

__all__ = ["LIST", "dedupe"]

LIST = "duplicates.jsonl"


def dedupe(step: StepInput) -> StepResult:
    """Keep the first row of each cluster of duplicates.

    A line of ``duplicates.jsonl`` has the id and the place of a row that is gone, the id of the
    one that stays, their Jaccard similarity, and whether they are exact duplicates. After a split
    the sides are one corpus, train first: what validates or is held out is then no duplicate of
    what is trained on.

    Args:
        step: what to read and where to write.

    Raises:
        DataError: a file cannot be read, or a row in it is wrong.
        MissingExtra: datasketch is needed, and is not installed.
    """
    config = step.config.dedupe
    found = duplicates(read_rows(step.files), config, step.scratch)
    ids = np.zeros(len(found.kept), np.uint64)
    chained = 0
    with RowWriter(step.directory) as writer, (step.directory / LIST).open("xb") as gone:
        for row, (side, pair) in enumerate(read_sides(step.files)):
            ids[row] = int(pair.id, 16)
            first = int(found.kept[row])
            if first == row:
                writer.write(pair, side)
                continue
            similarity, exact = found.similarity(row), bool(found.exact[row])
            if config.threshold is not None and similarity is not None and not exact:
                chained += similarity < config.threshold
            line = {
                "row": pair.id,
                "place": pair.place,
                "kept": f"{int(ids[first]):016x}",
                "jaccard": similarity,
                "exact": exact,
            }
            gone.write(json_line(line, LIST))
    facts = found.facts()
    if config.threshold is not None:
        facts["chained"] = int(chained)
    return StepResult(
        rows_in=len(found.kept),
        rows_out=writer.total,
        dropped={"exact duplicate": facts["exact"], "near-duplicate": facts["near"]},
        facts=facts,
    )
