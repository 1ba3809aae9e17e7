"""Disturbed sweeps: every launcher with every event, and stand-ins for jobs.

Real jobs, which have to end with the same bytes, are in tests/end_to_end/test_sweep_survives.py
and, on a cluster, in test_slurm_cluster.py.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from mens_exp.artifacts import host
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import AttemptLog, SweepRecord
from mens_exp.config.sweep import LOCAL_LAUNCHER, SLURM
from mens_exp.sweeps.outcome import update_from_directory

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="needs signals and /proc; run it on Linux"
)

LIMIT_S = 120
LAUNCHERS = {
    "local": {},
    "slurm": {"launcher": "slurm", "launcher_settings": {"poll_s": 0.1}},
    "joblib": {
        "launcher": "joblib",
        "launcher_settings": {
            "_target_": "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
            "n_jobs": 2,
        },
    },
    "submitit_local": {
        "launcher": "submitit_local",
        "launcher_settings": {
            "_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
            "submitit_folder": "${hydra.sweep.dir}/.submitit/%j",
        },
    },
}
# The interpreter of launchers and of Slurm's tasks: any job is the stand-in.
PYTHON = """#!/bin/bash
if [ "$1" = -u ]; then shift; fi
if [ "$2" = mens_exp.sweeps.job ]; then shift 2; exec {python} -S {stand_in} "$@"; fi
exec {python} -c 'import runpy, sys
sys.executable = sys.argv[1]
del sys.argv[:2]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)' "$0" "$2" "${{@:3}}"
"""
LAUNCHER = """
import pathlib, sys
from rich.console import Console
from mens_exp.artifacts.sweep import SweepRecord
from mens_exp.artifacts.sweep import SweepDir
from mens_exp.sweeps.launcher import Launcher
sys.executable = sys.argv[2]
directory = SweepDir(pathlib.Path(sys.argv[1]))
sys.exit(Launcher(directory, SweepRecord.read(directory.record), Console(stderr=True)).run())
"""
KILLED = -signal.SIGKILL
slurm = pytest.mark.parametrize("disturbed", ["slurm"], indirect=True)


def until(is_so):
    began = time.monotonic()
    while not (found := is_so()):
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.01)
    return found


class Disturbed:
    """A sweep of two jobs, each of which waits for a file before it succeeds."""

    def __init__(self, directory, python, environment):
        self.directory, self.place = directory, directory.path
        # Slurm and plugins get all jobs at once, and log how each attempt ends.
        self.is_local = SweepRecord.read(directory.record).launcher == LOCAL_LAUNCHER
        self._python = python
        self.environment = environment
        self.launchers = []

    def go_on(self, **more):
        """Start a launcher with changed settings, as a quicker sweep.resume."""
        record = SweepRecord.read(self.directory.record)
        record.launcher_settings.update(more.pop("launcher_settings", {}))
        for name, value in more.items():
            setattr(record, name, value)
        for job in record.jobs:
            run = RunDir(self.place / job["directory"])
            update_from_directory(job, run, here=record.launcher != SLURM)
        record.write(self.directory.record)
        with (self.place / "said").open("ab") as said:
            launcher = subprocess.Popen(
                [sys.executable, "-c", LAUNCHER, str(self.place), str(self._python)],
                env=self.environment,
                stdout=subprocess.DEVNULL,
                stderr=said,
            )
        self.launchers.append(launcher)
        return launcher

    def finish(self, **more):
        """Let the jobs succeed; return the exit code of a launcher of the remaining ones."""
        self.let_go()
        return self.go_on(**more).wait(LIMIT_S)

    def let_go(self):
        (self.place / "go").touch()

    def listens(self, number=0, attempt=0):
        """Wait until an attempt of a job is running; return its process."""
        run = RunDir(self.place / f"{number}_job")
        until((run.path / f"tried_{attempt}").exists)
        until((run.path / "listens").exists)
        (run.path / "listens").unlink()
        return until(lambda: self._pid(number, attempt))

    def _pid(self, number, attempt):
        attempts = self.jobs()[number]["attempts"]
        return attempts[attempt]["pid"] if len(attempts) > attempt else None

    def jobs(self):
        return list(SweepRecord.read(self.directory.record).jobs)

    def states(self):
        return [str(job["state"]) for job in self.jobs()]

    def codes(self):
        return [[one["exit_code"] for one in job["attempts"]] for job in self.jobs()]

    def task(self):
        """Return the queue id and the process of the first job's batch script."""
        (queue_id,) = {one["queue_id"] for one in AttemptLog(self.directory.attempts(0)).attempts()}
        return queue_id, int((self.place / "slurm" / f"{queue_id}.pid").read_text("ascii"))


# Each of submitit's jobs really starts Python, so these run in `make soak`.
PARAMS = [
    pytest.param(name, marks=pytest.mark.soak if name == "submitit_local" else ())
    for name in LAUNCHERS
]


@pytest.fixture(params=PARAMS)
def disturbed(request, scripted, stand_in, tmp_path):
    """Make a sweep of one of the launchers."""
    python, commands = tmp_path / "python", Path(__file__).with_name("fake_slurm.py")
    words = {"python": shlex.quote(sys.executable), "stand_in": shlex.quote(str(stand_in))}
    python.write_text(PYTHON.format(**words), "ascii")
    python.chmod(0o755)
    for name in ("sbatch", "squeue", "scancel", "scontrol"):
        program = tmp_path / name
        program.write_text(f"#!{sys.executable} -S\n{commands.read_text('utf-8')}", "utf-8")
        program.chmod(0o755)
    script = [("on end", 130), ("on interrupt", 130), ("wait", str(tmp_path / "sweep" / "go"))]
    script += [("end", "succeeded"), ("exit", 0)]
    directory, record = scripted([script], [script], **LAUNCHERS[request.param])
    record.write(directory.record)
    (directory.path / "slurm").mkdir()
    environment = {**os.environ, "FAKE_SLURM": str(directory.path / "slurm")}
    environment["PYTHONPATH"] = host.python_path({})
    environment["PATH"] = os.pathsep.join([str(tmp_path), environment["PATH"]])
    made = Disturbed(directory, python, environment)
    yield made
    made.let_go()
    for launcher in made.launchers:
        launcher.kill()
        launcher.wait()


def test_a_killed_job_stops_no_other_and_is_taken_up_again(disturbed):
    """The sweep records which one failed and why, and the other one succeeds."""
    launcher = disturbed.go_on()
    os.kill(disturbed.listens(), signal.SIGKILL)
    disturbed.let_go()
    assert launcher.wait(LIMIT_S) == 1
    assert disturbed.states() == ["failed", "succeeded"]
    assert "killed by SIGKILL" in disturbed.jobs()[0]["reason"]
    assert disturbed.finish() == 0
    assert disturbed.states() == ["succeeded", "succeeded"]
    assert disturbed.codes() == [[KILLED, 0], [0]]


@slurm
def test_a_killed_job_is_tried_again_by_its_launcher(disturbed):
    """As often as sweep.retries allows; for the local launcher see test_launcher."""
    launcher = disturbed.go_on(retries=1)
    os.kill(disturbed.listens(), signal.SIGKILL)
    disturbed.listens(attempt=1)
    disturbed.let_go()
    assert launcher.wait(LIMIT_S) == 0
    assert disturbed.codes() == [[KILLED, 0], [0]]


def test_a_killed_launcher_leaves_its_job_at_work(disturbed):
    """Resuming waits for it; only Slurm's task recorded how it ended."""
    launcher = disturbed.go_on()
    pid = disturbed.listens()
    launcher.kill()
    launcher.wait()
    second = disturbed.go_on()
    until(lambda: "is still at work" in (disturbed.place / "said").read_text("utf-8"))
    assert psutil.pid_exists(pid)
    disturbed.let_go()
    assert second.wait(LIMIT_S) == 0
    assert disturbed.states() == ["succeeded", "succeeded"]
    assert disturbed.codes() == [[None if disturbed.is_local else 0], [0]]


def test_a_killed_launcher_and_job_go_on_together(disturbed):
    """The dead job is started again once, by a retry if the launcher still found it running."""
    launcher = disturbed.go_on()
    pid = disturbed.listens()
    launcher.kill()
    launcher.wait()
    os.kill(pid, signal.SIGKILL)
    second = disturbed.go_on(retries=1)
    disturbed.listens(attempt=1)
    disturbed.let_go()
    assert second.wait(LIMIT_S) == 0
    assert disturbed.states() == ["succeeded", "succeeded"]
    assert disturbed.codes() == [[None if disturbed.is_local else KILLED, 0], [0]]


def test_ctrl_c_cancels_what_is_at_work(disturbed):
    """Waiting jobs do not start, and the sweep can be resumed with another number of jobs."""
    launcher = disturbed.go_on()
    pids = [disturbed.listens(number) for number in range(1 if disturbed.is_local else 2)]
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 130
    assert disturbed.states() == ["cancelled", "cancelled"]
    assert disturbed.codes() == [[130], [] if disturbed.is_local else [130]]
    assert not any(map(psutil.pid_exists, pids))
    assert disturbed.finish(n_jobs=2) == 0
    assert disturbed.states() == ["succeeded", "succeeded"]


@slurm
@pytest.mark.parametrize("by", ["its own task, which was warned", "Slurm"])
def test_a_job_that_another_takes_the_node_of_is_put_back(disturbed, by):
    """The launcher waits for its second start, which has the same queue id."""
    launcher = disturbed.go_on()
    pid = disturbed.listens()
    queue_id, task = disturbed.task()
    if by == "Slurm":
        (disturbed.place / "slurm" / f"{queue_id}.again").touch()
        for one in (task, pid):
            os.kill(one, signal.SIGTERM)
    else:
        os.kill(task, signal.SIGUSR1)
    disturbed.listens(attempt=1)
    disturbed.let_go()
    assert launcher.wait(LIMIT_S) == 0
    assert disturbed.codes() == [[130, 0], [0]]
    first, last = disturbed.jobs()[0]["attempts"]
    assert first["queue_id"] == last["queue_id"] == queue_id
    assert first["why"] == (None if by == "Slurm" else "PREEMPTED")


@slurm
def test_a_job_that_is_out_of_time_too_often_has_failed(disturbed):
    """The reason has Slurm's word; with a longer limit, it can be resumed."""
    settings = {"timeout_min": 1, "signal_delay_s": 30, "max_num_timeout": 0}
    launcher = disturbed.go_on(retries=1, launcher_settings=settings)
    disturbed.listens()
    os.kill(disturbed.task()[1], signal.SIGUSR1)
    until(lambda: AttemptLog(disturbed.directory.attempts(0)).attempts()[0]["ended_utc"])
    disturbed.let_go()
    assert launcher.wait(LIMIT_S) == 1
    assert disturbed.states() == ["failed", "succeeded"]
    assert disturbed.jobs()[0]["reason"] == "TIMEOUT: its 1 minutes were over, 1 time"
    assert disturbed.finish(launcher_settings={"timeout_min": 20}) == 0
    first, second = disturbed.jobs()[0]["attempts"]
    assert (first["why"], second["exit_code"]) == ("TIMEOUT", 0)
    assert first["queue_id"] != second["queue_id"]


@slurm
def test_a_job_that_is_cancelled_from_outside_says_so(disturbed):
    """The other job runs to its end."""
    launcher = disturbed.go_on()
    disturbed.listens()
    queue_id, _ = disturbed.task()
    scancel = disturbed.place.parent / "scancel"
    subprocess.run([scancel, queue_id], check=True, env=disturbed.environment)
    disturbed.let_go()
    assert launcher.wait(LIMIT_S) == 1
    assert disturbed.states() == ["cancelled", "succeeded"]
    assert disturbed.jobs()[0]["reason"] == "CANCELLED: ended by scancel"
