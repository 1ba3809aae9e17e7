"""The other processes of a run, and the first one's end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import psutil
import pytest

from mens_exp.tasks import following
from mens_exp.training.process_group import open_store

if TYPE_CHECKING:
    from pathlib import Path

# A first process that starts another one and is gone before that has looked around.
GONE = """
import subprocess, sys, os
print(subprocess.Popen([sys.executable, *sys.argv[1:], str(os.getpid()), os.environ["PLACE"]]).pid)
"""


@pytest.mark.skipif(os.name == "nt", reason="needs POSIX processes; run it on Linux")
def test_a_process_whose_first_one_is_gone_before_it_began_ends(tmp_path: Path) -> None:
    """It would wait an hour where they meet: the place of meeting is open, and nobody comes."""
    meeting = open_store(2)
    place = tmp_path / "place"
    place.mkdir()
    *command, _, _ = following.command(meeting.port, 1, 2, str(place))
    reach = os.pathsep.join(filter(None, sys.path))
    said = subprocess.run(
        [sys.executable, "-S", "-c", GONE, *command],
        env={**os.environ, "PLACE": str(place), "PYTHONPATH": reach},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )
    other, began = int(said.stdout), time.monotonic()
    while psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() - began > 60:
            psutil.Process(other).kill()
            pytest.fail("it waits for a process that is gone")
        time.sleep(0.1)
    assert not place.exists()
