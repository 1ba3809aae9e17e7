"""The follower processes of a run, when the first process ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from mens_exp.tasks import coordinator
from mens_exp.training.distributed import open_store

# A first process that starts a follower and dies before it has looked for its leader, or waits.
FIRST = """
import subprocess, sys, os
other = subprocess.Popen([sys.executable, *sys.argv[2:], str(os.getpid()), os.environ["PLACE"]])
print(other.pid, flush=True)
if sys.argv[1] == "wait":
    other.wait()
"""

# A follower that ends by itself once its leader has been killed.
LOST = """
import os, signal, sys
from mens_exp.tasks import coordinator

def ended(rank, meet, place):
    (place / "written").touch()
    first = os.getppid()
    os.kill(first, signal.SIGKILL)
    while os.getppid() == first:
        pass
    return 1

coordinator._ended = ended
sys.exit(coordinator.main(sys.argv[1:]))
"""

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX processes; run it on Linux")


def run_out(first, command, place):
    """Start a process that starts a follower, and wait until both have ended."""
    place.mkdir()
    reach = os.pathsep.join(filter(None, sys.path))
    said = subprocess.run(
        [sys.executable, "-S", "-c", FIRST, first, *command],
        env={**os.environ, "PLACE": str(place), "PYTHONPATH": reach},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=first != "wait",
        timeout=300,
    )
    other, began = int(said.stdout), time.monotonic()
    while psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() - began > 60:
            psutil.Process(other).kill()
            pytest.fail("it waits for a process that is gone")
        time.sleep(0.1)


def test_a_process_whose_first_one_is_gone_before_it_began_ends(tmp_path):
    """It ends, although the rendezvous is open and it would otherwise wait there for an hour."""
    meeting = open_store(2)
    place = tmp_path / "place"
    *command, _, _ = coordinator.command(meeting.port, 1, 2, str(place))
    run_out("go", tuple(command), place)
    assert not place.exists()


def test_a_process_that_loses_its_first_one_clears_up_for_it(tmp_path):
    """The broken connection may end it before it has noticed that the leader is gone."""
    place = tmp_path / "place"
    run_out("wait", ("-c", LOST, "1", "1", "2"), place)
    assert not place.exists()
