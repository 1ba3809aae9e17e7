from __future__ import annotations

import multiprocessing
import signal
import threading
import time

import pytest

from mens_exp.artifacts.host import file_lock


def _hold(path, has_it):
    with file_lock(path):
        has_it.set()
        time.sleep(60)


def test_a_second_one_waits_until_the_first_is_done(tmp_path):
    """Eight threads increment a number, with a pause between read and write."""
    path = tmp_path / "lock"
    number = [0]

    def add():
        with file_lock(path):
            before = number[0]
            time.sleep(0.005)
            number[0] = before + 1

    threads = [threading.Thread(target=add) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert number == [8]
    assert list(tmp_path.iterdir()) == []


def test_a_failure_lets_go(tmp_path):
    """The next one can take the lock after an exception."""
    with pytest.raises(KeyError), file_lock(tmp_path / "lock"):
        raise KeyError
    with file_lock(tmp_path / "lock"):
        assert (tmp_path / "lock").exists()


def test_a_killed_holder_lets_go(tmp_path):
    """The kernel releases the lock; the remaining file blocks nobody."""
    context = multiprocessing.get_context("spawn")
    has_it = context.Event()
    holder = context.Process(target=_hold, args=(tmp_path / "lock", has_it))
    holder.start()
    assert has_it.wait(30)
    holder.kill()
    holder.join()
    assert holder.exitcode == -signal.SIGKILL
    with file_lock(tmp_path / "lock"):
        pass
