"""Jobs of several nodes on a real Slurm, whose two nodes are daemons of this machine."""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from safetensors.numpy import load_file

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepDir, SweepRecord
from mens_exp.artifacts.telemetry import read_events

_STAND_IN = runpy.run_path(str(Path(__file__).with_name("slurm_cluster.py")))
_MISSING = _STAND_IN["missing"]() if os.name != "nt" else "Slurm runs on Linux"

pytestmark = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))

LIMIT_S = 400
STEPS = 12
TRAINS = ["quant.compute_dtype=f32", f"trainer.max_steps={STEPS}", "sweep.retries=0"]
PROCESSES = ["trainer=ddp", "trainer.accelerator=cpu", "trainer.devices=1"]
SLURM = ["hydra/launcher=slurm", "hydra.launcher.poll_s=0.5", "hydra.launcher.nodes=2"]


@pytest.fixture(scope="module")
def _two_nodes():
    """Use the cluster's commands in this process."""
    with pytest.MonkeyPatch.context() as patch, _STAND_IN["cluster"]("", ("one", "two")) as found:
        for name, value in found.items():
            patch.setenv(name, value)
        yield


@pytest.fixture
def typed(tmp_path, cache):
    """Run a sweep's command in a process of its own; its output goes to the file `said`."""

    def started(*overrides):
        with (tmp_path / "said").open("ab") as said:
            return subprocess.Popen(  # Slurm's signals have to reach real processes
                [sys.executable, "-m", "mens_exp", *overrides],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                    "MENS_EXP_CACHE": str(cache),
                },
                cwd=tmp_path,
                stdout=said,
                stderr=said,
            )

    return started


@pytest.fixture
def launched(typed, tiny_run, tmp_path):
    """Launch a sweep of one cell, in two processes on two nodes."""

    def start(*overrides):
        given = [*tiny_run, *TRAINS, *PROCESSES, *SLURM, "seed=1", *overrides]
        by_key = {text.partition("=")[0]: text for text in given}
        return typed("-m", *by_key.values(), f"hydra.sweep.dir={tmp_path / 'sweep'}")

    return start


@pytest.fixture(scope="module")
def alone(train_in, tmp_path_factory):
    """The same run in one process, undisturbed."""
    return train_in(
        tmp_path_factory.mktemp("alone") / "run", *TRAINS, "seed=1", without="sweep.retries"
    )


def job(place):
    (only,) = SweepRecord.read(SweepDir(place).record).jobs
    return only


def run_of(place):
    return RunDir(place / job(place)["directory"])


def steps(run):
    found = {}
    for event in read_events(run.telemetry):
        if event["event"] == "step":
            found[event["payload"]["step"]] = event["payload"]
    assert sorted(found) == list(range(1, STEPS + 1))
    return [found[number] for number in sorted(found)]


def trains_the_same(run, alone):
    """Compare losses, documents and the adapter with those of one process."""
    for ours, theirs in zip(steps(run), steps(alone), strict=True):
        assert ours["batches_sha256"] == theirs["batches_sha256"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-4)
    ours = load_file(run.adapter / "adapter.safetensors")
    for name, values in load_file(alone.adapter / "adapter.safetensors").items():
        assert ours[name] == pytest.approx(values, abs=1e-4)
    return True


def until(is_so, process):
    began = time.time()
    while not (found := is_so()):
        assert process.poll() is None, "the launcher has ended"
        assert time.time() - began < LIMIT_S
        time.sleep(0.05)
    return found


def trainers(run):
    """Return the training processes by rank."""
    found = {}
    for one in psutil.process_iter(["cmdline"]):
        words = one.info["cmdline"] or []
        if "mens_exp.sweeps.job" in words and str(run) in words and "srun" not in words[0]:
            found[one.environ().get("SLURM_PROCID")] = one
    return found


def last_checkpoint(run):
    return max(int(one.stem.removeprefix("step_")) for one in run.checkpoints.glob("step_*.ckpt"))


def left_by_first(run):
    """Return the last checkpoint of the first attempt once it is cancelled, before the second."""
    *earlier, last = Manifest.read(run.manifest).attempts
    assert not earlier, "the second attempt has begun"
    return last_checkpoint(run) if last["status"] == "cancelled" else None


@pytest.mark.usefixtures("_two_nodes")
def test_a_job_of_two_nodes_is_killed_put_back_and_resumed_on_one(launched, typed, alone, tmp_path):
    """The job is requeued after a warning, loses a process, and is resumed on one node.

    Each attempt resumes from the last checkpoint of the one before. The losses, documents and
    adapter are those of a run in one process.
    """
    place = tmp_path / "sweep"
    launcher = launched(f"checkpoint.keep={STEPS}")
    until(lambda: list(place.glob("0_*/checkpoints/step_00000004.ckpt")), launcher)
    queue_id = job(place)["attempts"][0]["queue_id"]
    run = run_of(place)
    nodes = {one.environ()["SLURMD_NODENAME"] for one in trainers(run.path).values()}
    assert nodes == {"one", "two"}
    subprocess.run(["scancel", "--batch", "--signal=USR1", queue_id], check=True)
    left = [until(lambda: left_by_first(run), launcher)]
    until(lambda: len(job(place)["attempts"]) == 2, launcher)
    until(lambda: len(trainers(run.path)) == 2, launcher)
    until(lambda: '"resumed"' in run.telemetry.read_text("utf-8"), launcher)
    trainers(run.path)["1"].send_signal(signal.SIGKILL)
    assert launcher.wait(LIMIT_S) == 1
    assert job(place)["state"] == "failed"
    left.append(last_checkpoint(run))
    assert typed(f"sweep.resume={place}", "hydra.launcher.nodes=1").wait(LIMIT_S) == 0
    assert job(place)["state"] == "succeeded"
    manifest = Manifest.read(run.manifest)
    assert manifest.facts["processes"] == 1
    assert [one["resumed_from_step"] for one in manifest.attempts] == [None, *left]
    assert trains_the_same(run, alone)


@pytest.mark.soak
@pytest.mark.usefixtures("_two_nodes")
def test_a_base_in_parts_on_two_nodes_trains_what_one_process_does(launched, alone, tmp_path):
    """FSDP; here the cell itself sets the number of nodes."""
    given = ["trainer=fsdp", "quant.storage_dtype=f32", "trainer.num_nodes=2"]
    assert launched(*given).wait(LIMIT_S) == 0
    run = run_of(tmp_path / "sweep")
    assert Manifest.read(run.manifest).facts["processes"] == 2
    assert trains_the_same(run, alone)


@pytest.mark.usefixtures("_two_nodes")
@pytest.mark.parametrize("is_killed", [False, True], ids=["in time", "killed first"])
def test_a_job_of_two_nodes_that_is_cancelled_has_a_closed_record(launched, tmp_path, is_killed):
    """Its processes close it, or the batch process if srun killed them first."""
    place = tmp_path / "sweep"
    launcher = launched()
    until(lambda: list(place.glob("0_*/checkpoints/step_00000002.ckpt")), launcher)
    run, queue_id = run_of(place), job(place)["attempts"][0]["queue_id"]
    if is_killed:
        subprocess.run(["scancel", "--batch", "--signal=TERM", queue_id], check=True)
        trainers(run.path)["0"].kill()
    else:
        subprocess.run(["scancel", queue_id], check=True)
    assert launcher.wait(LIMIT_S) != 0
    manifest = Manifest.read(run.manifest)
    assert manifest.status == manifest.attempts[-1]["status"] == "cancelled"
    closed_by_batch = any("closed by the job's batch process" in one for one in manifest.notes)
    assert closed_by_batch or not is_killed
    assert [one["event"] for one in read_events(run.telemetry)][-1] == "run_finished"
    assert trainers(run.path) == {}
