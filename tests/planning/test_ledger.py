from __future__ import annotations

import dataclasses
import math
import sys

import fork_server
import pytest

from mens_exp.planning.throughput_model import Entry, append, entries, ledger_path, residuals

ENTRY = Entry(
    utc="2026-11-20T05:58:01.123Z",
    device="a CPU",
    family="llama",
    backend="qlora",
    run_id="run",
    contract="0" * 64,
    parameters=94_208,
    tokens_per_step=2048,
    predicted_peak_bytes=1000,
    measured_peak_bytes=1100,
    flop_per_step=1e12,
    predicted_step_s=2.0,
    measured_step_s=1.0,
)


def test_lines_are_read_back_in_order(tmp_path):
    """Every appended entry is there, in order."""
    path = ledger_path(tmp_path / "cache")
    others = [dataclasses.replace(ENTRY, run_id=str(n)) for n in range(3)]
    for one in others:
        append(path, one)
    assert entries(path) == others
    assert not path.with_suffix(".lock").exists()


def test_absent_ledger_is_empty(tmp_path):
    """The first run has no ledger yet."""
    assert entries(ledger_path(tmp_path)) == []


def test_torn_and_foreign_lines_are_passed_over(tmp_path):
    """The next writer starts a new line after a dead writer's partial one."""
    path = ledger_path(tmp_path)
    append(path, ENTRY)
    with path.open("ab") as file:
        file.write(b'{"format": "mens_exp_ledger", "ver')
    append(path, ENTRY)
    with path.open("ab") as file:
        file.write(b'{"format": "mens_exp_ledger", "version": 1}\n[]\nnot JSON\n')
    assert entries(path) == [ENTRY, ENTRY]


def test_two_processes_lose_no_line(tmp_path):
    """Two processes append twenty lines each at the same time."""
    path = ledger_path(tmp_path)
    code = (
        "import sys; from pathlib import Path\n"
        "from tests.planning.test_ledger import ENTRY\n"
        "from mens_exp.planning.throughput_model import append\n"
        f"for _ in range(20): append(Path({str(path)!r}), ENTRY)\n"
    )
    where = [entry for entry in sys.path if entry]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {where!r}\n{code}"]
    root = __file__.rpartition("/tests/")[0]
    writers = [fork_server.Popen(command, cwd=root) for _ in range(2)]
    assert [writer.wait(timeout=60) for writer in writers] == [0, 0]
    assert entries(path) == [ENTRY] * 40


def test_three_equal_runs_give_their_ratio():
    """Centre 1.1; with the minimum spread of 2%, t of 2.92 and sqrt(4/3), 7.0% each way in logs."""
    found = residuals([1.1, 1.1, 1.1])
    assert found is not None
    half = 2.920 * 0.02 * math.sqrt(4 / 3)
    assert (found.runs, found.centre) == (3, pytest.approx(1.1))
    assert found.low == pytest.approx(1.1 * math.exp(-half))
    assert found.high == pytest.approx(1.1 * math.exp(half))


def test_spread_widens_the_interval():
    """Log ratios of ±ln 1.1: the deviation of four is ln 1.1 * sqrt(4/3), and t is 2.353."""
    found = residuals([1.1, 1 / 1.1, 1.1, 1 / 1.1])
    assert found is not None
    spread = math.log(1.1) * math.sqrt(4 / 3)
    assert found.centre == pytest.approx(1.0)
    assert math.log(found.high) == pytest.approx(2.353 * spread * math.sqrt(1.25))


def test_two_runs_say_nothing():
    """Two runs are too few to estimate a spread."""
    assert residuals([1.0, 1.2]) is None
