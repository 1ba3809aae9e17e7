from __future__ import annotations

import json
import os
import threading
from contextlib import suppress

import psutil
import pytest

from mens_exp.artifacts import host
from mens_exp.artifacts.host import run_lock
from mens_exp.errors import RequestError


def test_lock_is_there_inside_the_block_and_gone_after(tmp_path):
    """The file exists only inside the block."""
    path = tmp_path / "run.lock"
    with run_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()
    assert not path.exists()


def test_second_holder_is_refused_and_named(tmp_path):
    """A live holder keeps its lock, and the error names its process."""
    path = tmp_path / "run.lock"
    with (
        run_lock(path),
        pytest.raises(RequestError, match=f"process {os.getpid()}"),
        run_lock(path),
    ):
        pass
    assert not path.exists()


@pytest.mark.parametrize(
    "content",
    [
        b'{"pid": 1, "st',
        json.dumps({"pid": os.getpid(), "started": 1.0}).encode(),
        json.dumps({"pid": 2**22 + 1, "started": psutil.Process().create_time()}).encode(),
    ],
    ids=["torn", "pid-reused", "dead"],
)
def test_lock_of_a_dead_process_is_taken_over(tmp_path, content):
    """The lock file of a killed process blocks nobody."""
    path = tmp_path / "run.lock"
    path.write_bytes(content)
    with run_lock(path):
        assert json.loads(path.read_text())["pid"] == os.getpid()


def test_lock_left_behind_is_that_of_a_killed_process_of_this_machine(tmp_path):
    """Not for a live process, nor for one that cannot be checked from here."""
    path = tmp_path / "run.lock"
    assert not host.is_left_behind(path)
    with run_lock(path):
        living = path.read_text()
        assert not host.is_left_behind(path)
    dead = json.loads(living) | {"started": 1.0}
    for record, is_left in (
        (dead, True),
        (dead | {"host": "another"}, False),
        ({"pid": dead["pid"], "started": 1.0}, False),
    ):
        path.write_text(json.dumps(record))
        assert host.is_left_behind(path) == is_left


def test_lock_is_released_when_the_block_fails(tmp_path):
    """An exception inside the block releases the lock."""
    path = tmp_path / "run.lock"
    with pytest.raises(ValueError, match="inside"), run_lock(path):
        raise ValueError("inside")
    assert not path.exists()


@pytest.mark.skipif(os.name == "nt", reason="threads share the lock of Windows; run it on Linux")
def test_of_two_that_find_a_dead_one_s_lock_only_one_takes_it(tmp_path, monkeypatch):
    """Both read the dead holder's lock before either writes, unless the second is made to wait."""
    path = tmp_path / "run.lock"
    path.write_bytes(b'{"pid": 1, "st')
    both_looked = threading.Barrier(2)
    look = host.lock_holder

    def looked(where):
        found = look(where)
        with suppress(threading.BrokenBarrierError):
            both_looked.wait(0.5)
        return found

    monkeypatch.setattr(host, "lock_holder", looked)
    refused, over = [], threading.Barrier(2)

    def take():
        try:
            with run_lock(path):
                over.wait(30)
        except RequestError as error:
            refused.append(error.found)
            over.wait(30)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused == [f"process {os.getpid()}"]
    assert list(tmp_path.iterdir()) == []
