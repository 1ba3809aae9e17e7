"""A Slurm cluster for one case of the campaign, whose daemons may be killed.

A daemon that was killed is started again at once, as a service manager does it. A node that Slurm
has set down or drained is resumed, as an administrator does it.
"""

from __future__ import annotations

import runpy
import shutil
import subprocess
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import fork_server
import psutil

_CLUSTER = runpy.run_path(str(Path(__file__).parents[1] / "sweeps/slurm_cluster.py"))
# A silent node is used again when it answers; its lost jobs are noticed after 15 seconds and not
# 300.
_CONFIGURATION = "ReturnToService=2\nSlurmdTimeout=15\n"
_DAEMONS = ("slurmctld", "slurmd")
LIMIT_S = 60
missing = _CLUSTER["missing"]


@contextmanager
def cluster():
    """Start a cluster; yield the environment for its commands."""
    with _CLUSTER["cluster"](_CONFIGURATION) as found:
        programs = _python(found).parent
        programs.mkdir()
        fork_server.write_stubs(programs)
        is_over = threading.Event()
        administrator = threading.Thread(target=_administrate, args=(found, is_over))
        administrator.start()
        try:
            yield found
        finally:
            is_over.set()
            administrator.join()


def _administrate(environment, is_over):
    """Resume nodes that Slurm has taken out of service."""
    while not is_over.wait(2):
        for name, state in _nodes(environment):
            if state.startswith(("drain", "down")):
                with suppress(AssertionError):
                    change = ["scontrol", "update", f"NodeName={name}", "State=RESUME"]
                    _CLUSTER["_run"](change, environment)


def _nodes(environment):
    """Return each node's name and state; nothing while the controller is down."""
    with suppress(AssertionError):
        listed = _CLUSTER["_run"](["sinfo", "-h", "-N", "-o", "%N %T"], environment)
        return sorted({tuple(line.split()) for line in listed.splitlines()})
    return []


def before(environment):
    """Return code that a launcher executes first, so that its job scripts use a forking Python.

    Nothing where the command is not one of a cluster.
    """
    if "SLURM_CONF" not in environment:
        return None
    return f"import sys; sys.executable = {str(_python(environment))!r}\n"


def _python(environment):
    return Path(environment["SLURM_CONF"]).with_name("programs") / "python"


def daemons(environment):
    """Return the process IDs of a cluster's daemons and of its job steps."""
    if "SLURM_CONF" not in environment:
        return []
    found = []
    for name in _DAEMONS:
        with suppress(OSError, ValueError, psutil.Error):
            process = psutil.Process(int(_pid_file(environment, name).read_text("ascii")))
            found += [process.pid]
    spool = str(Path(environment["SLURM_CONF"]).parent)
    for process in psutil.process_iter(["name"]):
        with suppress(psutil.Error):  # it has just exited
            name = process.info["name"]
            if name == "slurmstepd" and spool in " ".join(process.environ().values()):
                found.append(process.pid)
    return found


def start_again(environment, killed):
    """Restart the daemons among the killed processes."""
    if "SLURM_CONF" not in environment:
        return
    for name in _DAEMONS:
        place = _pid_file(environment, name)
        with suppress(OSError, ValueError, psutil.Error):
            old = psutil.Process(int(place.read_text("ascii")))
            if old.pid not in killed:
                continue
            old.wait(LIMIT_S)
        place.unlink(missing_ok=True)
        program = shutil.which(name, path=environment["PATH"])
        assert program is not None
        subprocess.run([program, "-f", environment["SLURM_CONF"]], check=True)
        until = time.monotonic() + LIMIT_S
        while not place.exists() and time.monotonic() < until:
            time.sleep(0.05)


def wait_until_there(environment):
    """Wait until all nodes accept jobs."""
    if "SLURM_CONF" not in environment:
        return
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        states = {state for _, state in _nodes(environment)}
        if states and states <= {"idle", "mixed", "allocated"}:
            return
        time.sleep(0.5)


def _pid_file(environment, name):
    return Path(environment["SLURM_CONF"]).with_name(f"{name}.pid")
