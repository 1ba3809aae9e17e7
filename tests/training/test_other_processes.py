"""Worker processes of a distributed run, and the errors when one ends."""

from __future__ import annotations

import threading

import pytest

from mens_exp.training import distributed
from mens_exp.training.distributed import started_workers

WAITS = ("-c", "import time; time.sleep(60)")
FAILS = ("-c", "import sys; print('first'); print('what went wrong'); sys.exit(3)")
KILLED = ("-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
ENDS = ("-c", "pass")


def never(error):
    pytest.fail(str(error))


def test_processes_that_end_well_leave_nothing(tmp_path):
    """There is no error and no empty log."""
    with started_workers({1: ENDS, 2: ENDS}, tmp_path / "processes", stuck=never) as others:
        assert others.failed_within(20) is None
    assert not (tmp_path / "processes").exists()


def test_a_failed_process_is_named_with_its_last_words(tmp_path):
    """The error gives the rank, the exit code, the log's last lines, and a remedy."""
    with started_workers({1: WAITS, 2: FAILS}, tmp_path / "processes", stuck=never) as others:
        found = others.failed_within(20)
        assert found is not None
        others.end()
    text = str(found)
    assert "process 2 of 3 has ended" in text
    assert "exit code 3: what went wrong" in text
    assert f"resume={tmp_path}" in text
    assert (tmp_path / "processes" / "2.log").read_text() == "first\nwhat went wrong\n"


def test_a_killed_process_is_told_by_its_signal(tmp_path):
    """A process killed without a message is reported by its signal."""
    with started_workers({1: KILLED}, tmp_path / "processes", stuck=never) as others:
        found = others.failed_within(20)
    assert found is not None
    assert found.found == "ended by SIGKILL"


def test_what_still_runs_ends_with_an_error_of_the_block(tmp_path):
    """If the main process fails, its workers are terminated."""
    with (
        pytest.raises(KeyError),
        started_workers({1: WAITS}, tmp_path / "processes", stuck=never) as others,
    ):
        raise KeyError
    assert others.processes[1].returncode < 0


def test_who_waits_for_the_dead_is_told_in_the_end(tmp_path, monkeypatch):
    """The callback is called while the main process is stuck, as in a GPU collective."""
    monkeypatch.setattr(distributed, "STUCK_S", 0.1)
    told = []
    was_told = threading.Event()

    def stuck(error):
        told.append(error)
        was_told.set()

    with started_workers({1: FAILS}, tmp_path / "processes", stuck=stuck):
        assert was_told.wait(20)
    assert "exit code 3" in str(told[0])
