"""Stand-ins for sbatch, squeue, scancel and scontrol, chosen by the name of the program.

A task's batch script runs at once, detached, as a node's daemon would run it. The state of a task
is in files of `FAKE_SLURM`, named by its queue id.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

PLACE = Path(os.environ["FAKE_SLURM"])


def family(pid):
    """Return a running process and its running descendants."""
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
    except OSError:
        return []
    return [pid, *(each for child in text.split() for each in family(int(child)))]


def send(queue_id):
    """Send SIGTERM to all processes of a task."""
    for pid in family(int((PLACE / f"{queue_id}.pid").read_text("ascii"))):
        os.kill(pid, signal.SIGTERM)


def keep(script, queue_id):
    """Run a task, again whenever it is requeued, and record its exit code."""
    array, _, index = queue_id.partition("_")
    names = {"SLURM_ARRAY_JOB_ID": array, "SLURM_ARRAY_TASK_ID": index, "SLURM_JOB_ID": queue_id}
    again = PLACE / f"{queue_id}.again"
    again.touch()
    while again.exists():
        again.unlink()
        with (PLACE / f"{queue_id}.out").open("ab") as output:
            task = subprocess.Popen(
                ["bash", script],
                env={**os.environ, **names},
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        (PLACE / f"{queue_id}.pid").write_text(str(task.pid), "ascii")
        code = task.wait()
    (PLACE / f"{queue_id}.end").write_text(str(code), "ascii")


def sbatch(*arguments):
    if "--test-only" in arguments:
        return
    script = arguments[-1]
    array = 1 + len(list(PLACE.glob("*.array")))
    (PLACE / f"{array}.array").touch()
    indices = re.search(r"--array=([\d,]+)", Path(script).read_text("utf-8"))
    for index in indices[1].split(","):
        (PLACE / f"{array}_{index}.script").write_text(script, "utf-8")
        if os.fork() == 0:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):  # the pipe that sbatch answers on
                os.dup2(null, number)
            keep(script, f"{array}_{index}")
            os._exit(0)
    print(array)


def squeue(*_):
    for script in PLACE.glob("*.script"):
        array, _, index = script.stem.partition("_")
        end, state, status = script.with_suffix(".end"), "RUNNING", 0
        if end.exists():
            code = int(end.read_text("ascii") or 0)
            state, status = ("FAILED", code << 8) if code else ("COMPLETED", 0)
            state = "CANCELLED" if script.with_suffix(".cancelled").exists() else state
        print(array, index, state, "None", status, script.read_text("utf-8"), "", sep="|")


def scancel(*queue_ids):
    for queue_id in queue_ids:
        (PLACE / f"{queue_id}.cancelled").touch()
        send(queue_id)


def scontrol(what, queue_id):
    assert what == "requeue"
    (PLACE / f"{queue_id}.again").touch()


if __name__ == "__main__":
    globals()[Path(sys.argv[0]).name](*sys.argv[1:])
