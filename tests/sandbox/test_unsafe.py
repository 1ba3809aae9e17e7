from __future__ import annotations

import itertools
import os
import time

import pytest

from mens_exp.sandbox.program import Limits, Outcome, Program, python_program, run_all
from mens_exp.sandbox.supervise import Unsafe

LIMITS = Limits(memory_mib=128, wall_s=8, output_kib=4)


def test_unsafe_execution_is_labelled_and_has_its_files():
    """Every result has the label `unsafe`."""
    program = Program(argv=("/bin/sh", "-c", "cat a; cat"), files={"a": "x"}, stdin="y")
    done = Unsafe().run(program, LIMITS)
    assert (done.outcome, done.stdout, done.sandbox) == (Outcome.ok, "xy", "unsafe")


@pytest.mark.parametrize(
    ("source", "limits", "outcome"),
    [
        ("while True: print('x' * 1000)", LIMITS, Outcome.output),
        ("import time; time.sleep(60)", Limits(wall_s=0.3), Outcome.timeout),
        ("while True: pass", Limits(cpu_s=0.2), Outcome.cpu_time),
        ("bytearray(2**30)", LIMITS, Outcome.memory),
        ("import os; os.kill(os.getpid(), 11)", LIMITS, Outcome.killed_signal),
        ("raise SystemExit(5)", LIMITS, Outcome.failed),
    ],
)
def test_unsafe_execution_keeps_its_limits(source, limits, outcome):
    """Limits that need no isolation are enforced."""
    assert Unsafe().run(python_program(source), limits).outcome is outcome


def test_compiler_that_ran_out_of_memory_did_even_above_its_backtrace():
    """The compiler printed this when memory was short: the reason, then its own backtrace."""
    stack = "".join(f"  {number}: 0x7f3c7f19314b - <unknown>\n" for number in range(24))
    refused = "memory allocation of 134217728 bytes failed"
    text = f"{refused}\nstack backtrace:\n{stack}Aborted\n"
    printed = Program(argv=("/bin/sh", "-c", "cat >&2; exit 1"), stdin=text)
    assert Unsafe().run(printed, LIMITS).outcome is Outcome.memory
    other = Program(argv=printed.argv, stdin=text.replace(refused, "a panic"))
    assert Unsafe().run(other, LIMITS).outcome is Outcome.failed


def test_unsafe_execution_leaves_no_process_of_its_group():
    """A background child is killed too."""
    done = Unsafe().run(Program(argv=("/bin/sh", "-c", "sleep 60 & echo $!")), LIMITS)
    pid = int(done.stdout)
    until = time.monotonic() + 5
    while _runs(pid) and time.monotonic() < until:
        time.sleep(0.02)
    assert not _runs(pid)
    assert done.wall_s < 5


def _runs(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:  # a temporary file
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_unsafe_environment_holds_no_secret(monkeypatch):
    """The environment is scrubbed here too."""
    monkeypatch.setenv("TOKEN", "secret")
    done = Unsafe().run(Program(argv=("/usr/bin/env",)), LIMITS)
    assert "secret" not in done.stdout
    assert f"PATH={os.environ['PATH']}" in done.stdout


def test_results_come_in_the_order_of_the_programs(sandbox):
    """The first program takes longest."""
    programs = [
        python_program(f"import time; time.sleep({0.4 if number == 0 else 0}); print({number})")
        for number in range(8)
    ]
    done = run_all(sandbox, programs, LIMITS, workers=4)
    assert [one.stdout for one in done] == [f"{number}\n" for number in range(8)]


def test_several_run_at_once(sandbox):
    """Each prints its start and end, and some of these intervals overlap."""
    source = "import time; print(time.time()); time.sleep(0.8); print(time.time())"
    done = run_all(sandbox, [python_program(source)] * 4, LIMITS, workers=4)
    assert {one.outcome for one in done} == {Outcome.ok}
    spans = sorted(tuple(map(float, one.stdout.split())) for one in done)
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(spans))


def test_no_program_begins_after_the_sandbox_broke():
    """The error propagates, and programs that have not started are skipped."""
    begun = []

    class Breaking:
        kind = "breaking"

        def run(self, program, limits):
            begun.append(program)
            time.sleep(0.05)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        run_all(Breaking(), [python_program("")] * 50, LIMITS, workers=2)
    assert len(begun) < 10
