"""Executions a second of trivial Python programs, each in a fresh sandbox, two at once.

    python benchmarks/sandbox.py

The same programs without isolation are the reference. So they are of answers graded in the sandbox:
an answer takes one process of its own and a fork of the grader. All are measured in turns.
"""

from __future__ import annotations

import time

import record

from mens_exp.evals.grading import ProgramTask, Verdict, check_all
from mens_exp.sandbox.bubblewrap import Bubblewrap
from mens_exp.sandbox.program import Limits, Outcome, Sandbox, python_program, run_all
from mens_exp.sandbox.supervise import Unsafe

QUESTION = "How many programs a second does the sandbox execute?"
ROUNDS = 5
PROGRAMS = 120
WORKERS = 2


def main() -> None:
    """Measure in turns, so that load on the machine affects both."""
    given = record.begin(record.command_line(__file__, __doc__))
    rounds, programs = (1, 4) if given.smallest else (ROUNDS, PROGRAMS)
    isolated, unsafe = Bubblewrap(), Unsafe()
    graded: list[float] = []
    rates: dict[str, list[float]] = {isolated.kind: [], unsafe.kind: []}
    for _ in range(rounds):
        for sandbox in (isolated, unsafe):
            rates[sandbox.kind].append(rate(sandbox, programs))
        graded.append(graded_rate(isolated, programs))
    beside = ("without isolation", rates[unsafe.kind])
    name = f"{isolated.kind}, {WORKERS} at once"
    figures = [
        record.figure(name, rates[isolated.kind], "programs/s", record.Better.HIGHER, beside),
        record.figure(
            f"answers graded, {WORKERS} at once", graded, "answers/s", record.Better.HIGHER, beside
        ),
    ]
    record.finish(QUESTION, figures, given)


def rate(sandbox: Sandbox, count: int) -> float:
    """Return the executions per second of one round."""
    programs = [python_program("print(1)")] * count
    began = time.perf_counter()
    done = run_all(sandbox, programs, Limits(), WORKERS)
    taken = time.perf_counter() - began
    assert {one.outcome for one in done} == {Outcome.ok}, "a trivial program failed"
    return count / taken


def graded_rate(sandbox: Sandbox, count: int) -> float:
    """Return the answers graded per second in one round: one call, one test."""
    task = ProgramTask(id="f", prompt="", entry_point="f", tests="assert f(1) == 2\n", reference="")
    answers = ["def f(x):\n    return x + 1\n"] * count
    began = time.perf_counter()
    done = check_all(sandbox, [task] * count, answers, Limits(), WORKERS)
    taken = time.perf_counter() - began
    assert {one.verdict for one in done} == {Verdict.PASSED}, "a trivial answer failed"
    return count / taken


if __name__ == "__main__":
    main()
