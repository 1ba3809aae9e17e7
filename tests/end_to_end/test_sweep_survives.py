"""Sweeps whose jobs, launcher or files do not stay as they were, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import fork_server
import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepRecord
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.config.compose import from_yaml
from mens_exp.sweeps.launcher import Launcher

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux"),
]

LIMIT_S = 240


def command(tiny_run, directory, *overrides):
    """A sweep of two seeds, thirty steps each, a checkpoint after every second one."""
    given = [*tiny_run, "trainer.max_steps=30", "sweep.retries=0", *overrides]
    by_key = {text.partition("=")[0]: text for text in given}
    return ["-m", *by_key.values(), "seed=1,2", f"hydra.sweep.dir={directory}"]


def adapters(directory):
    files = sorted(directory.glob("*/adapter/**/*.safetensors"))
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def job_dirs(directory):
    return [RunDir(directory / job["directory"]) for job in jobs(directory)]


def jobs(directory):
    return list(SweepRecord.read(SweepDir(directory).record).jobs)


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """The sweep without a disturbance."""
    directory = tmp_path_factory.mktemp("whole") / "sweep"
    assert cli.main(command(tiny_run, directory)) == 0
    assert len(adapters(directory)) == 4
    return directory


@pytest.fixture
def started(tiny_run, tmp_path, cache):
    """Launch the sweep in a process of its own, and wait until its first job has a checkpoint."""

    def launched(*overrides):
        source = os.pathsep.join(filter(None, sys.path))
        arguments = command(tiny_run, tmp_path / "sweep", *overrides)
        launcher = fork_server.Popen(
            [sys.executable, "-m", "mens_exp", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": source, "MENS_EXP_CACHE": str(cache)},
        )
        began = time.time()
        while not list((tmp_path / "sweep").glob("0_*/checkpoints/step_00000002.ckpt")):
            assert launcher.poll() is None, "it ended before its first checkpoint"
            assert time.time() - began < LIMIT_S
            time.sleep(0.02)
        return launcher

    return launched


def pid_of(directory, number):
    return int(jobs(directory)[number]["attempts"][-1]["pid"])


def test_a_killed_job_stops_no_other_and_goes_on_to_the_same_bytes(started, whole, tmp_path):
    """The sweep says that one failed, and resuming takes it up from its checkpoint."""
    place = tmp_path / "sweep"
    launcher = started()
    os.kill(pid_of(place, 0), signal.SIGKILL)
    assert launcher.wait(LIMIT_S) == 1
    assert [job["state"] for job in jobs(place)] == ["failed", "succeeded"]
    assert "killed by SIGKILL" in jobs(place)[0]["reason"]
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert [job["state"] for job in jobs(place)] == ["succeeded", "succeeded"]
    assert [len(job["attempts"]) for job in jobs(place)] == [2, 1]
    resumed_from = Manifest.read(job_dirs(place)[0].manifest).attempts[-1]["resumed_from_step"]
    assert (resumed_from or 0) >= 2
    assert adapters(place) == adapters(whole)


def test_a_killed_launcher_leaves_its_job_at_work(started, whole, tmp_path):
    """Resuming waits for it instead of starting it anew."""
    place = tmp_path / "sweep"
    launcher = started()
    launcher.kill()
    launcher.wait()
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert [len(job["attempts"]) for job in jobs(place)] == [1, 1]
    assert len(Manifest.read(job_dirs(place)[0].manifest).attempts) == 1
    assert adapters(place) == adapters(whole)


def test_ctrl_c_cancels_what_is_at_work(started, whole, tmp_path):
    """Its record is closed, the other has not begun, and both go on to the same bytes."""
    place = tmp_path / "sweep"
    launcher = started()
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(LIMIT_S) == 130
    assert [job["state"] for job in jobs(place)] == ["cancelled", "cancelled"]
    first, second = job_dirs(place)
    assert Manifest.read(first.manifest).status is Status.CANCELLED
    assert not second.manifest.exists()
    assert cli.main([f"sweep.resume={place}", "hydra.launcher.n_jobs=2"]) == 0
    assert adapters(place) == adapters(whole)


@pytest.mark.parametrize("edit", ["r: 4", "- not: [yaml"], ids=["other value", "broken"])
def test_editing_conf_after_the_launch_changes_nothing(tiny_run, tmp_path, monkeypatch, edit):
    """Both jobs run what was composed before the first one."""
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "conf" / "lora" / "mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.write_text("defaults: [all_linear, _self_]\nr: 2\n", "utf-8")
    run = Launcher.run

    def edited(self):
        mine.write_text(edit, "utf-8")
        return run(self)

    monkeypatch.setattr(Launcher, "run", edited)
    place = tmp_path / "sweep"
    assert cli.main(command(tiny_run, place, "task=plan", "lora=mine")) == 0
    for one in job_dirs(place):
        assert from_yaml(one.config).lora.r == 2
        assert "r 2" in json.loads(one.plan.read_text("utf-8"))["lora"]


def test_the_terminal_shows_the_cells_before_and_after(tiny_run, tmp_path, capsys):
    """A skipped cell and a collapsed one are named, and where the record lies."""
    place = tmp_path / "sweep"
    swept = ["lora.r=2,0,2", "sweep.invalid=skip", "task=plan", "trainer.max_steps=1"]
    usual = [text for text in tiny_run if not text.startswith("trainer.max_steps")]
    assert cli.main(["-m", *usual, *swept, f"hydra.sweep.dir={place}"]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "1 cell, 1 at a time" in said
    assert "left out: cell 1 (lora.r=0): lora.r: out of range" in said
    assert "left out: cell 2 (lora.r=2): the same as cell 0" in said
    assert "1 succeeded" in said
    assert f"The record: {SweepDir(place).record}" in said
