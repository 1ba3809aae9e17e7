"""Searches on a real Slurm: a cluster of one node that these tests start and stop."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import fork_server
import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepDir, SweepRecord

_STAND_IN = runpy.run_path(str(Path(__file__).with_name("slurm_cluster.py")))
_MISSING = _STAND_IN["missing"]() if os.name != "nt" else "Slurm runs on Linux"

pytestmark = [
    pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING)),
    pytest.mark.usefixtures("slurm_of_one_node"),
]

LIMIT_S = 300
SLURM = [
    "hydra/launcher=slurm",
    "hydra.launcher.poll_s=0.5",
    "hydra.launcher.array_parallelism=1",
]
SPACE = ["optim.lr=tag(log,interval(1e-5,1e-2))", "hydra.sweeper.n_trials=2"]


@pytest.fixture
def launched(tiny_run, tmp_path, cache, forked_by_slurm):
    """Launch a search whose first trial waits in the queue behind another job."""
    slurm("sbatch", "--exclusive", "--job-name=other", "--output=/dev/null", "--wrap=sleep 900")
    source = os.pathsep.join(filter(None, sys.path))
    with fork_server.Popen(
        [sys.executable, "-m", "mens_exp", *command(tiny_run, tmp_path / "search", *SLURM, *SPACE)],
        env={**os.environ, "PYTHONPATH": source, "MENS_EXP_CACHE": str(cache)},
    ) as launcher:
        until(queued, launcher)
        until(lambda: "in Slurm's queue" in str(jobs(tmp_path / "search")[0]["reason"]), launcher)
        yield launcher
        launcher.kill()
    slurm("scancel", "--name=other")


def command(tiny_run, place, *overrides):
    usual = [*tiny_run, "hydra/sweeper=optuna", "trainer.max_steps=2", f"hydra.sweep.dir={place}"]
    by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
    return ["-m", *by_key.values()]


def slurm(*arguments):
    done = subprocess.run(arguments, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def queued():
    """Return the queue ids of this search's jobs that have not ended."""
    return slurm("squeue", "--noheader", "--array", "--name=mens_exp", "--format=%i").split()


def until(is_so, launcher):
    """Wait until a condition holds, as long as the launcher lives."""
    began = time.time()
    while not is_so():
        assert launcher.poll() is None, "the launcher has ended"
        assert time.time() - began < LIMIT_S
        time.sleep(0.05)


def jobs(place):
    return list(SweepRecord.read(SweepDir(place).record).jobs)


def search_of(place):
    search = SweepRecord.read(SweepDir(place).record).search
    assert search is not None
    return search


def results(place):
    rows = search_of(place)["trials"]
    return [(str(row["state"]), row["params"], row["values"], row["job"]) for row in rows]


def queue_ids(place):
    return [[one["queue_id"] for one in job["attempts"]] for job in jobs(place)]


def submissions(place):
    return sorted(SweepDir(place).batch.glob("*.sh"))


def test_a_trial_that_learns_nothing_is_taken_out_of_slurm(tiny_run, tmp_path):
    """Each trial is an array of one; the pruned one ran once and is not recorded as failed."""
    place = tmp_path / "search"
    overrides = [
        *SLURM,
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
    good, bad = search_of(place)["trials"]
    assert [good["state"], bad["state"]] == ["complete", "pruned"]
    assert "ended by the search at step" in str(bad["reason"])
    ((first,), (second,)) = queue_ids(place)
    assert [one.partition("_")[2] for one in (first, second)] == ["0", "1"]
    assert first.partition("_")[0] != second.partition("_")[0]
    job = jobs(place)[1]
    assert (job["state"], job["reason"]) == ("pruned", bad["reason"])
    said = slurm("scontrol", "show", "job", second)
    assert "JobState=CANCELLED" in said
    assert "Restarts=0" in said
    manifest = Manifest.read(RunDir(place / job["directory"]).manifest)
    assert (manifest.status, manifest.notes[-1]) == (Status.CANCELLED, bad["reason"])
    assert SweepDir(place).search_page.exists()


def test_a_trial_in_the_queue_outlives_its_launcher(tiny_run, tmp_path, launched):
    """The resumed search has the draws and losses of a local one."""
    place, here = tmp_path / "search", tmp_path / "here"
    (first,) = queued()
    launched.kill()
    launched.wait()
    slurm("scancel", "--name=other")
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert [state for state, *_ in results(place)] == ["complete", "complete"]
    assert queue_ids(place)[0] == [first]
    assert len(submissions(place)) == 2
    assert cli.main(command(tiny_run, here, *SPACE)) == 0
    assert results(place) == results(here)


def test_ctrl_c_takes_the_trial_out_of_the_queue(tmp_path, launched):
    """Nothing more is drawn, and the trial has no result, so resuming would run it."""
    launched.send_signal(signal.SIGINT)
    assert launched.wait(LIMIT_S) == 130
    (job,) = jobs(tmp_path / "search")
    assert (job["state"], job["attempts"]) == ("cancelled", [])
    assert [state for state, *_ in results(tmp_path / "search")] == ["running"]
    assert queued() == []
