from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mens_exp.corpus.large_files import map_in_order, pieces
from mens_exp.errors import DataError, SetupError


def doubled(piece):
    return os.getpid(), [2 * one for one in piece]


def refused(piece):
    raise DataError("is wrong", where=f"row {piece[0]}")


@pytest.mark.parametrize("processes", [1, 2])
def test_results_come_in_the_order_of_the_pieces(processes):
    """Results keep their order, also from several processes."""
    found = list(map_in_order(doubled, pieces(range(1000), 30), processes))
    assert [one for _, piece in found for one in piece] == [2 * n for n in range(1000)]
    assert (os.getpid() in {process for process, _ in found}) == (processes == 1)


def test_one_piece_starts_no_process():
    """A single chunk is processed in this process."""
    assert list(map_in_order(doubled, [[1]], 2)) == [(os.getpid(), [2])]
    assert list(map_in_order(doubled, [], 2)) == []


def test_few_pieces_are_read_ahead():
    """Two processes read at most four chunks ahead of the one awaited."""
    read = 0

    def stream():
        nonlocal read
        for number in range(40):
            read += 1
            yield [number]

    for done, _ in enumerate(map_in_order(doubled, stream(), 2), start=1):
        assert read <= done + 4


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_is_the_same_from_another_process(processes):
    """The error keeps its place."""
    with pytest.raises(DataError, match="row 0: is wrong") as caught:
        list(map_in_order(refused, [[0], [1], [2]], processes))
    assert caught.value.where == "row 0"


def killed(piece):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_the_system_ends_is_told():
    """The out-of-memory killer ends processes like this."""
    with pytest.raises(SetupError, match=r"a worker process was killed.*fewer processes"):
        list(map_in_order(killed, [[0], [1], [2]], 2))


def test_pieces_are_as_long_as_asked_but_the_last():
    """By hand: seven in chunks of three."""
    assert list(pieces(range(7), 3)) == [[0, 1, 2], [3, 4, 5], [6]]


WAITING = """
import test_side_by_side as module
from mens_exp.corpus.large_files import map_in_order

if __name__ == "__main__":
    list(map_in_order(module.told, [["a"], ["b"], ["c"]], 2))
"""


def told(piece):
    sys.stdout.write(f"{os.getpid()}\n")
    sys.stdout.flush()
    time.sleep(60)


def test_processes_end_with_the_one_that_started_them(tmp_path):
    """If the parent is killed, its two workers notice and exit."""
    (tmp_path / "main.py").write_text(WAITING)
    here = str(Path(__file__).parent)
    paths = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(tmp_path / "main.py")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths}
    ) as process:
        assert process.stdout is not None
        children = [psutil.Process(int(process.stdout.readline())) for _ in range(2)]
        process.kill()
    gone, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    assert len(gone) == 2
