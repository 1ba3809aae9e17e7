"""Rows of `data=synthetic` a second, beside what merely running the same tasks takes.

    python benchmarks/generator.py [rows]

The limit beside it is to compile and execute the same references with the same tests once, as any
verification must; the generator also draws them, works out their results and breaks them. One
process, processor time and wall time.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from mens_exp.config.data import SyntheticData
from mens_exp.corpus.generator.generate import generate
from mens_exp.corpus.synthetic import counts

ROWS = 10_000


def main() -> None:
    """Generate, then run what was generated."""
    config = SyntheticData(rows=int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
    wall, began = time.perf_counter(), time.process_time()
    made = [
        generate(side, count, config.generator_seed, config.repair_frac)
        for side, count in counts(config).items()
    ]
    taken, wall = time.process_time() - began, time.perf_counter() - wall
    tasks = [task for each in made for task in each.tasks]
    began = time.process_time()
    for task in tasks:
        scope: dict[str, object] = {"__name__": "solution"}
        exec(compile("\n".join([task.solution, *task.tests]), "<task>", "exec"), scope)  # noqa: S102  # the generator's own
    alone = time.process_time() - began
    dropped: Counter[str] = Counter()
    for each in made:
        dropped.update(each.dropped)
    print(f"{len(tasks)} rows in {wall:.1f} s, {taken:.1f} s of processor time")
    print(f"{len(tasks) / taken:,.0f} rows/s; running them alone {len(tasks) / alone:,.0f} rows/s")
    print(f"that limit is {taken / alone:.1f} times as fast")
    print(f"{len({task.pair.id for task in tasks})} distinct rows")
    print(f"{len({task.solution for task in tasks})} distinct solutions; dropped {dict(dropped)}")
    repairs = Counter(task.repair.operator for task in tasks if task.repair)
    print(f"{repairs.total()} repairs: {dict(sorted(repairs.items()))}")


if __name__ == "__main__":
    main()
