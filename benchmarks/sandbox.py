"""Executions a second of trivial Python programs, each in a fresh sandbox, two at once.

    python benchmarks/sandbox.py

Bubblewrap and the same programs without isolation, in turns; the medians of five.
"""

from __future__ import annotations

import statistics
import time

from mens_exp.sandbox.batch import run_all
from mens_exp.sandbox.bubblewrap import Bubblewrap
from mens_exp.sandbox.program import Limits, Outcome, Sandbox, python_program
from mens_exp.sandbox.unsafe import Unsafe

ROUNDS = 5
PROGRAMS = 120
WORKERS = 2


def rate(sandbox: Sandbox) -> float:
    """Return the executions a second of one round."""
    programs = [python_program("print(1)")] * PROGRAMS
    began = time.perf_counter()
    done = run_all(sandbox, programs, Limits(), WORKERS)
    taken = time.perf_counter() - began
    assert {one.outcome for one in done} == {Outcome.ok}, "a trivial program failed"
    return PROGRAMS / taken


def main() -> None:
    """Measure in turns, so that a busy moment falls on both."""
    sandboxes: list[Sandbox] = [Bubblewrap(), Unsafe()]
    rates: dict[str, list[float]] = {sandbox.kind: [] for sandbox in sandboxes}
    for _ in range(ROUNDS):
        for sandbox in sandboxes:
            rates[sandbox.kind].append(rate(sandbox))
    for kind, found in rates.items():
        shown = " ".join(f"{one:.0f}" for one in found)
        print(f"{kind}: {statistics.median(found):.0f} a second ({shown})")


if __name__ == "__main__":
    main()
