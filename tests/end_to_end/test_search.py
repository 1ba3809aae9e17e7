"""Searches through the command line: completed, pruned, killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import disk_faults
import fork_server
import pytest
from disk_faults import Fault, Site, Watcher

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepDir, SweepRecord
from mens_exp.errors import MensError

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux")

RATE = "optim.lr=tag(log,interval(1e-5,1e-2))"
SOAK = pytest.mark.soak
SPACE = [RATE, "lora.r=4,8", "backend=qlora,full", "hydra.sweeper.n_trials=3"]


def command(tiny_run, place, *overrides):
    usual = [*tiny_run, "hydra/sweeper=optuna", "trainer.max_steps=2", f"hydra.sweep.dir={place}"]
    by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
    return ["-m", *by_key.values()]


def trials(place):
    search = SweepRecord.read(SweepDir(place).record).search
    assert search is not None
    return [dict(row) for row in search["trials"]]


def results(place):
    return [(row["state"], row["params"], row["values"], row["job"]) for row in trials(place)]


def pid_at_work(directory, job):
    """Return the process of a job that has opened its run, as the launcher recorded it."""
    opened = RunDir(directory.path / job["directory"]).manifest.exists()
    return job["attempts"][-1]["pid"] if job["attempts"] and opened else None


def kill_in_trial(place, number, launcher):
    """Kill the launcher and its job, once the job has opened its run."""
    began, pid = time.monotonic(), None
    while pid is None and time.monotonic() - began < 300:
        try:
            jobs = SweepRecord.read(SweepDir(place).record).jobs
        except MensError:
            jobs = []
        pid = pid_at_work(SweepDir(place), jobs[number]) if len(jobs) > number else None
        time.sleep(0.05)
    assert pid is not None
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    os.killpg(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """An undisturbed search, one trial at a time."""
    place = tmp_path_factory.mktemp("whole") / "search"
    assert cli.main(command(tiny_run, place, *SPACE)) == 0
    return place


def test_a_killed_search_goes_on_as_if_it_had_not_been(tiny_run, whole, tmp_path, cache):
    """Draws and losses equal those of an undisturbed search, and no trial runs twice."""
    killed = tmp_path / "killed"
    source = os.pathsep.join(filter(None, sys.path))
    with fork_server.Popen(
        [sys.executable, "-m", "mens_exp", *command(tiny_run, killed, *SPACE)],
        env={**os.environ, "PYTHONPATH": source, "MENS_EXP_CACHE": str(cache)},
        stderr=subprocess.DEVNULL,
    ) as launcher:
        kill_in_trial(killed, 1, launcher)
    assert [row["state"] for row in trials(killed)] == ["complete", "running"]
    assert cli.main([f"sweep.resume={killed}"]) == 0
    assert results(killed) == results(whole)
    assert [row["state"] for row in trials(whole)] == ["complete"] * 3
    for row in trials(whole):
        assert ("lora.r" in row["params"]) == (row["params"]["backend"] == "backend=qlora")
    page = SweepDir(killed).search_page.read_text("utf-8")
    assert "3 of 3 trials: 3 complete" in page
    tried = [len(job["attempts"]) for job in SweepRecord.read(SweepDir(killed).record).jobs]
    assert tried == [1, 2, 1]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="seccomp; run it on Linux")
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault(Site("write", "search.journal"), 4, "kill"), -signal.SIGKILL),
        pytest.param(Fault(Site("write", "search.journal"), 4, "full"), 3, marks=SOAK),
        pytest.param(Fault(Site("write", "#_#/telemetry.jsonl"), 9, "full"), 3, marks=SOAK),
    ],
    ids=["killed in a draw", "full in a draw", "full in a job"],
)
def test_a_search_whose_disk_fails_goes_on(
    tiny_run, whole, tmp_path, cache, monkeypatch, fault, code
):
    """Draws and losses equal those of an undisturbed search; the error says how to resume."""
    monkeypatch.setattr(fork_server, "_before_each", disk_faults.source())
    place = tmp_path / "search"
    words = command(tiny_run, place, *SPACE, "hydra.sweeper.n_trials=1")
    with Watcher(place, fault) as watcher:
        done = fork_server.run(
            [sys.executable, "-m", "mens_exp", *words],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                "MENS_EXP_CACHE": str(cache),
                disk_faults.VARIABLE: watcher.address,
            },
        )
    assert watcher.fired
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert code < 0 or f"sweep.resume={place}" in done.stderr
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert results(place) == results(whole)[:1]


def test_a_killed_trial_is_tried_again_while_tpe_draws_others(tiny_run, tmp_path):
    """Two at a time: the next trial starts as soon as one has ended."""
    place = tmp_path / "search"
    given = [RATE, "hydra.launcher.n_jobs=2", "hydra.sweeper.n_trials=4"]
    killed = []

    def kill():
        began, directory = time.monotonic(), SweepDir(place)
        while not killed and time.monotonic() - began < 300:
            jobs = SweepRecord.read(directory.record).jobs if directory.record.exists() else []
            for job in jobs[:1]:
                pid = pid_at_work(directory, job)
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
            time.sleep(0.05)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    assert cli.main(command(tiny_run, place, *given, "hydra.sweeper.startup_trials=1")) == 0
    thread.join()
    assert [row["state"] for row in trials(place)] == ["complete"] * 4
    jobs = SweepRecord.read(SweepDir(place).record).jobs
    codes = [[one["exit_code"] for one in job["attempts"]] for job in jobs]
    assert codes == [[-signal.SIGKILL, 0], [0], [0], [0]]
    begun = [job["attempts"][0]["started_utc"] for job in jobs]
    ended = sorted(str(job["attempts"][-1]["ended_utc"]) for job in jobs)
    assert begun[1] < ended[0] < begun[2]
    assert ended[1] < begun[3]


def test_a_trial_that_learns_nothing_is_ended(tiny_run, tmp_path):
    """The second trial's validation loss is worse than the first's; its record says so."""
    place = tmp_path / "search"
    overrides = [
        "optim.lr=choice(1e-9,1e-2)",
        "trainer.max_steps=60",
        "trainer.val_check_interval=4",
        "checkpoint.every_n_steps=60",
        "hydra.sweeper.sampler=random",
        "hydra.sweeper.seed=1",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.pruner=median",
        "hydra.sweeper.pruner_startup_trials=1",
    ]
    assert cli.main(command(tiny_run, place, *overrides)) == 0
    good, bad = trials(place)
    assert [good["params"], bad["params"]] == [
        {"optim.lr": "optim.lr=0.01"},
        {"optim.lr": "optim.lr=1e-09"},
    ]
    assert [good["state"], bad["state"]] == ["complete", "pruned"]
    record = SweepRecord.read(SweepDir(place).record)
    assert record.jobs[1]["state"] == "pruned"
    run = RunDir(place / record.jobs[1]["directory"])
    manifest = Manifest.read(run.manifest)
    assert manifest.status is Status.CANCELLED
    assert manifest.notes[-1] == bad["reason"]
    assert "ended by the search at step" in manifest.notes[-1]
    assert bad["intermediate"][-1][0] < 60
    assert len(record.jobs[1]["attempts"]) == 1
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert [row["state"] for row in trials(place)] == ["complete", "pruned"]
