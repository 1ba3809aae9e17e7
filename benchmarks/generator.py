"""Rows of `data=synthetic` a second, compared with only running the same tasks.

    python benchmarks/generator.py [rows]

The reference compiles and executes the same references with the same tests once, which any
verification must do; the generator also draws them, computes their results and breaks them. One
process; rates are by processor time.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import record

from mens_exp.config.data import SyntheticData
from mens_exp.corpus.generator.generate import generate
from mens_exp.corpus.synthetic import counts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.corpus.generator.family import Task

QUESTION = "How many rows of data=synthetic are made in a second of processor time?"
ROWS = 10_000


def main() -> None:
    """Generate tasks, then run them."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("rows", type=int, nargs="?", help=f"default: {ROWS}")
    given = record.begin(parser)
    config = SyntheticData(rows=given.rows or (40 if given.smallest else ROWS))
    wall, began = time.perf_counter(), time.process_time()
    made = [
        generate(side, count, config.generator_seed, config.repair_frac)
        for side, count in counts(config).items()
    ]
    taken, wall = time.process_time() - began, time.perf_counter() - wall
    tasks = [task for each in made for task in each.tasks]
    solutions = {task.solution for task in tasks}
    repairs = sum(task.repair is not None for task in tasks)
    dropped: Counter[str] = Counter()
    for each in made:
        dropped.update(each.dropped)
    alone = ("running the same tasks once", len(tasks) / seconds_alone(tasks))
    higher = record.Better.HIGHER
    figures = [
        record.figure("rows made", len(tasks) / taken, "rows/s", higher, alone),
        record.figure("rows made, by the clock", len(tasks) / wall, "rows/s", higher, alone),
        record.figure("distinct rows", len({task.pair.id for task in tasks}), "rows"),
        record.figure("distinct solutions", len(solutions), "solutions", higher),
        record.figure("repairs", repairs, "rows"),
    ]
    figures += [
        record.figure(f"dropped: {reason}", count, "tasks", record.Better.LOWER)
        for reason, count in sorted(dropped.items())
    ]
    record.finish(QUESTION, figures, given)


def seconds_alone(tasks: Sequence[Task]) -> float:
    """Return the CPU time of running each reference with its tests."""
    began = time.process_time()
    for task in tasks:
        scope: dict[str, object] = {"__name__": "solution"}
        exec(compile("\n".join([task.solution, *task.tests]), "<task>", "exec"), scope)  # noqa: S102  # the generator's own
    return time.process_time() - began


if __name__ == "__main__":
    main()
