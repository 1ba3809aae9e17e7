"""Jobs in joblib's pool; stand-ins run in its threads, one sweep in its processes."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, Future

import psutil
import pytest

from mens_exp import cli
from mens_exp.artifacts.attempt_log import AttemptLog
from mens_exp.artifacts.sweep import JobState, SweepRecord
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.config.launcher import JoblibLauncher
from mens_exp.errors import MissingExtra
from mens_exp.sweeps import pool
from mens_exp.sweeps.pool import PoolWork, pool_problems
from mens_exp.sweeps.process import Ended

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux"),
    pytest.mark.skipif(
        importlib.util.find_spec("joblib") is None, reason="joblib is missing: pip install joblib"
    ),
]

DONE = [("end", "succeeded"), ("exit", 0)]
POOL = {"launcher": "joblib", "launcher_settings": {"backend": "threading"}}


def states(launcher):
    return [str(job["state"]) for job in SweepRecord.read(launcher.directory.record).jobs]


def test_all_jobs_succeed_in_the_pool(sweep, tmp_path):
    """Two at a time wait for each other's file; each is a process of its own, on record."""
    files = [tmp_path / "sweep" / f"{number}_job" / "tried_0" for number in (0, 1)]
    met = [[("wait", str(other)), *DONE] for other in reversed(files)]
    launcher = sweep([met[0]], [met[1]], [DONE], n_jobs=2, **POOL)
    assert launcher.run() == 0
    assert states(launcher) == ["succeeded"] * 3
    attempts = [one for job in launcher.record.jobs for one in job["attempts"]]
    assert len({one["pid"] for one in attempts}) == 3
    assert [one["exit_code"] for one in attempts] == [0, 0, 0]
    assert all((one["peak_rss_bytes"] or 0) > 1_000_000 for one in attempts)


def test_a_killed_job_of_the_pool_is_started_again(sweep):
    """As by the local launcher, and the other one's failure stays what it is."""
    launcher = sweep([[("kill", "SIGKILL")], DONE], [[("exit", 2)]], retries=1, **POOL)
    assert launcher.run() == 2
    assert states(launcher) == ["succeeded", "failed"]
    codes = [one["exit_code"] for one in launcher.record.jobs[0]["attempts"]]
    assert codes == [-signal.SIGKILL, 0]


def test_a_signal_goes_through_the_pool(sweep):
    """What is at work ends in order, and what waits for a place does not begin."""
    launcher = sweep([[("on interrupt", 130), ("wait", "never")]], [DONE], **POOL)
    listens = launcher.directory.path / "0_job" / "listens"

    def interrupt():
        while not listens.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert launcher.run() == 130
    thread.join()
    assert states(launcher) == ["cancelled", "cancelled"]
    assert [len(job["attempts"]) for job in launcher.record.jobs] == [1, 0]


def test_jobs_of_the_pool_take_gpus_in_turn(sweep, tmp_path):
    """Two at a time never share one."""
    files = [tmp_path / "sweep" / f"{number}_job" / "tried_0" for number in (0, 1)]
    met = [[("wait", str(other)), *DONE] for other in reversed(files)]
    launcher = sweep([met[0]], [met[1]], n_jobs=2, gpus=["4", "6"], **POOL)
    assert launcher.run() == 0
    taken = [path.read_text("utf-8") for path in files]
    devices = {device for device in "46" for text in taken if f'DEVICES": "{device}"' in text}
    assert devices == {"4", "6"}


def test_a_job_that_an_earlier_pool_left_at_work_is_waited_for(sweep):
    """It is known from the log of its attempts, and not started anew."""
    launcher = sweep([DONE], **POOL)
    directory, job = launcher.directory, launcher.record.jobs[0]
    job["state"] = JobState.RUNNING
    me = psutil.Process()
    log = AttemptLog(directory.attempts(0))
    log.began(me.pid, me.create_time(), host="here", queue_id=None)
    work = launcher._executor.adopt(job)
    assert work is not None
    assert work.ended() is None
    log.ended(0)
    assert launcher._executor.adopt(job) is None


def test_a_job_whose_worker_was_killed_is_still_its_process(sweep):
    """Waited for while that lives; without one it has ended, and the log says so."""
    launcher = sweep([DONE], **POOL)
    job, log = launcher.record.jobs[0], AttemptLog(launcher.directory.attempts(0))
    told = Future()
    work = PoolWork(job, log, told)
    assert work.ended() is None
    assert work.waits == "it waits for a worker of joblib's pool"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        log.began(
            process.pid, psutil.Process(process.pid).create_time(), host="here", queue_id=None
        )
        told.set_exception(BrokenExecutor("a worker was killed"))
        assert (work.ended(), work.waits) == (None, None)
    assert work.ended() == Ended(exit_code=None)
    assert job["attempts"][0]["ended_utc"] is not None


def test_a_pool_that_broke_is_replaced(sweep, monkeypatch):
    """The next job gets a worker of a new one."""
    broken = Future()
    broken.set_exception(BrokenExecutor("a worker was killed"))
    launcher, made = sweep([DONE], [DONE], **POOL), pool._pool

    class Broken:
        def submit(self, *_):
            monkeypatch.setattr(pool, "_pool", made)
            monkeypatch.setattr(self, "submit", self.refuse, raising=False)
            return broken

        def refuse(self, *_):
            raise BrokenExecutor("a worker was killed")

    monkeypatch.setattr(pool, "_pool", lambda *_: Broken())
    assert launcher.run() == 1
    assert states(launcher) == ["failed", "succeeded"]
    assert launcher.record.jobs[0]["reason"] == "its process died, and nobody saw how"


def test_without_joblib_the_launcher_is_refused(monkeypatch):
    """With the way to install it; no jobs at a time are refused too."""
    (wrong,) = pool_problems(JoblibLauncher(n_jobs=0))
    assert "hydra.launcher.n_jobs: out of range" in str(wrong)
    assert pool_problems(JoblibLauncher(n_jobs=-1)) == []
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    (missing,) = pool_problems(JoblibLauncher())
    assert isinstance(missing, MissingExtra)
    assert "mens-exp[joblib]" in str(missing)


def test_a_sweep_runs_in_processes_of_the_pool(tiny_run, tmp_path, capsys):
    """From the command line, with loky; no worker is a job."""
    place = tmp_path / "sweep"
    given = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "task=plan", "seed=1,2"]
    assert cli.main(["-m", *tiny_run, *given, f"hydra.sweep.dir={place}"]) == 0
    record = SweepRecord.read(SweepDir(place).record)
    assert record.launcher == "joblib"
    assert record.launcher_settings["backend"] == "loky"
    assert [job["state"] for job in record.jobs] == ["succeeded", "succeeded"]
    assert os.getpid() not in {job["attempts"][0]["pid"] for job in record.jobs}
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert "2 of 2 jobs are done" in capsys.readouterr().err


def test_a_worker_of_the_pool_that_is_killed_takes_no_job_with_it(tiny_run, tmp_path):
    """What it had at work comes to its end, and the next job gets another worker."""
    place = tmp_path / "sweep"
    directory, killed = SweepDir(place), []

    def kill():
        began, log = time.monotonic(), AttemptLog(directory.attempts(0))
        while not log.attempts() and time.monotonic() - began < 300:
            time.sleep(0.05)
        worker = psutil.Process(log.attempts()[0]["pid"]).parent()
        assert worker is not None
        worker.kill()
        killed.append(worker.pid)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    given = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=1", "seed=1,2", "sweep.retries=0"]
    given.append("task=plan")
    assert cli.main(["-m", *tiny_run, *given, f"hydra.sweep.dir={place}"]) == 0
    thread.join()
    assert killed != [os.getpid()]
    jobs = SweepRecord.read(directory.record).jobs
    assert [job["state"] for job in jobs] == ["succeeded", "succeeded"]
    assert [[one["exit_code"] for one in job["attempts"]] for job in jobs] == [[None], [0]]
