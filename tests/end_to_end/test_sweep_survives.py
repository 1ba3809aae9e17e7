"""Sweeps whose jobs, launcher or files are disturbed, through the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import fork_server
import psutil
import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepDir, SweepRecord
from mens_exp.config.compose import from_yaml
from mens_exp.sweeps.launcher import Launcher

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux")

LIMIT_S = 400


def command(tiny_run, directory, *overrides):
    """A sweep of two seeds, thirty steps each, with a checkpoint after every second step."""
    given = [*tiny_run, "trainer.max_steps=30", *overrides]
    by_key = {text.partition("=")[0]: text for text in given}
    return ["-m", *by_key.values(), "seed=1,2", f"hydra.sweep.dir={directory}"]


def adapters(directory):
    files = sorted(directory.glob("*/adapter/**/*.safetensors"))
    assert len(files) == 4
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def jobs(directory):
    return list(SweepRecord.read(SweepDir(directory).record).jobs)


def job_dirs(directory):
    return [RunDir(directory / job["directory"]) for job in jobs(directory)]


def states(directory):
    return [str(job["state"]) for job in jobs(directory)]


def codes(directory):
    return [[one["exit_code"] for one in job["attempts"]] for job in jobs(directory)]


def manifests(directory):
    return [Manifest.read(one.manifest) for one in job_dirs(directory)]


def first_of(directory, number):
    """Return the process of a job, or the first of several."""
    return psutil.Process(jobs(directory)[number]["attempts"][-1]["pid"])


def second_of(directory, number):
    children = first_of(directory, number).children()
    (other,) = (one for one in children if "mens_exp.tasks.coordinator" in one.cmdline())
    return other


class Disturbed:
    """A sweep whose launchers are separate processes."""

    def __init__(self, place, environment):
        self.place, self._environment = place, environment
        self.launcher = None
        self._seen = {}

    def launch(self, *arguments):
        self.launcher = fork_server.Popen(
            [sys.executable, "-m", "mens_exp", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=self._environment,
        )

    def go_on(self):
        # A job that was told to end may have written one more checkpoint.
        self._seen = {number: max(self._seen[number], self._last(number)) for number in self._seen}
        self.launch(f"sweep.resume='{self.place}'")

    def ends(self):
        """Wait for the launcher and return its exit code."""
        return self.launcher.wait(LIMIT_S)

    def paused(self, *numbers):
        """Suspend jobs at their next checkpoints, so that a disturbance finds them in training."""
        began, found = time.monotonic(), {}
        while len(found) < len(numbers):
            assert self.launcher.poll() is None, "it ended before these checkpoints"
            assert time.monotonic() - began < LIMIT_S
            time.sleep(0.02)
            for number in set(numbers) - set(found):
                last = self._last(number)
                if last > self._seen.get(number, ""):
                    self._seen[number] = last
                    found[number] = first_of(self.place, number)
                    found[number].suspend()
        return [found[number] for number in numbers]

    def _last(self, number):
        found = self.place.glob(f"{number}_*/checkpoints/step_*.ckpt")
        return max((one.name for one in found), default="")

    def is_left_by_its_launcher(self):
        self.launcher.kill()
        self.launcher.wait()


@pytest.fixture
def disturbed(tmp_path, cache):
    (tmp_path / "tmp").mkdir()
    source = os.pathsep.join(filter(None, sys.path))
    told = {"PYTHONPATH": source, "MENS_EXP_CACHE": str(cache), "TMPDIR": str(tmp_path / "tmp")}
    return Disturbed(tmp_path / "sweep", {**os.environ, **told})


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """The sweep without a disturbance."""
    directory = tmp_path_factory.mktemp("whole") / "sweep"
    assert cli.main(command(tiny_run, directory, "sweep.retries=0")) == 0
    return directory


def test_a_cancelled_a_killed_and_a_left_job_go_on_to_the_same_bytes(disturbed, whole, tiny_run):
    """Ctrl-C closes the record of the running job; when a job is killed, the next one starts.

    A job that outlives its launcher is waited for; the other one resumes from its checkpoint.
    """
    place = disturbed.place
    disturbed.launch(*command(tiny_run, place, "sweep.retries=0"))
    (job,) = disturbed.paused(0)
    disturbed.launcher.send_signal(signal.SIGINT)
    job.resume()
    assert disturbed.ends() == 130
    assert states(place) == ["cancelled", "cancelled"]
    first, second = job_dirs(place)
    assert Manifest.read(first.manifest).status is Status.CANCELLED
    assert not second.manifest.exists()

    disturbed.go_on()
    (job,) = disturbed.paused(0)
    job.kill()
    (left,) = disturbed.paused(1)
    assert states(place) == ["failed", "running"]
    assert "killed by SIGKILL" in jobs(place)[0]["reason"]

    disturbed.is_left_by_its_launcher()
    left.resume()
    assert cli.main([f"sweep.resume={place}", "hydra.launcher.n_jobs=2"]) == 0
    assert states(place) == ["succeeded", "succeeded"]
    assert codes(place) == [[130, -signal.SIGKILL, 0], [None]]
    taken_up, waited_for = manifests(place)
    assert [(one["resumed_from_step"] or 0) >= 2 for one in taken_up.attempts] == [
        False,
        True,
        True,
    ]
    assert len(waited_for.attempts) == 1
    assert adapters(place) == adapters(whole)


SEVERAL = ["trainer=ddp", "trainer.accelerator=cpu", "hydra.launcher.n_jobs=2"]


@pytest.fixture(scope="module")
def several(tiny_run, tmp_path_factory):
    """A sweep of two jobs at a time, each of two processes, without a disturbance."""
    directory = tmp_path_factory.mktemp("several") / "sweep"
    assert cli.main(command(tiny_run, directory, *SEVERAL)) == 0
    return directory


def wait_until_gone(process):
    began = time.monotonic()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 60, "it has outlived its first process"
        time.sleep(0.1)


def thrown_away(tmp_path):
    return [path.name for path in (tmp_path / "tmp").glob("mens_exp_process*")]


def test_jobs_of_two_processes_train_side_by_side(several):
    """The record has both processes of each job, and the memory of both."""
    assert states(several) == ["succeeded", "succeeded"]
    for job, manifest in zip(jobs(several), manifests(several), strict=True):
        assert (job["processes"], manifest.facts["processes"]) == (2, 2)
        (attempt,) = job["attempts"]
        first, second = manifest.results["peak_rss_bytes_of_processes"]
        assert attempt["peak_rss_bytes"] > 0.9 * (first + second)
        assert attempt["peak_rss_bytes"] > 1.5 * first
        assert not RunDir(several / job["directory"]).processes.exists()
    assert len(set(adapters(several).values())) == 4


def test_processes_that_train_along_end_and_go_on_with_their_jobs(
    disturbed, several, tiny_run, tmp_path
):
    """SIGTERM ends all processes and closes their records; after a move, the sweep resumes.

    Then one job loses its first process and the other its second, and both jobs are retried. Last,
    the launcher and a job are killed: the other job, with its second process, is waited for. No
    process and no temporary file remains, and the bytes are the same.
    """
    disturbed.launch(*command(tiny_run, disturbed.place, *SEVERAL, "sweep.retries=1"))
    firsts = disturbed.paused(0, 1)
    others = [second_of(disturbed.place, number) for number in (0, 1)]
    disturbed.launcher.send_signal(signal.SIGTERM)
    for one in firsts:
        one.resume()
    assert disturbed.ends() == 130
    assert [one.is_running() for one in others] == [False, False]
    assert states(disturbed.place) == ["cancelled", "cancelled"]
    assert {one.status for one in manifests(disturbed.place)} == {Status.CANCELLED}
    assert thrown_away(tmp_path) == []

    place = disturbed.place = disturbed.place.rename(tmp_path / "moved elsewhere")
    disturbed.go_on()
    killed, other = disturbed.paused(0, 1)
    left_alone = second_of(place, 0)
    second_of(place, 1).kill()
    other.resume()
    killed.kill()
    wait_until_gone(left_alone)

    killed, other = disturbed.paused(0, 1)
    log = RunDir(place / jobs(place)[1]["directory"]).log.read_text("utf-8")
    assert "process 1 of 2 has ended" in log
    assert "ended by SIGKILL" in log
    disturbed.is_left_by_its_launcher()
    left_alone = second_of(place, 0)
    killed.kill()
    other.resume()
    wait_until_gone(left_alone)
    disturbed.go_on()
    assert disturbed.ends() == 0
    assert states(place) == ["succeeded", "succeeded"]
    assert codes(place) == [[130, -signal.SIGKILL, None, 0], [130, 1, None]]
    for manifest in manifests(place):
        resumed = [(one["resumed_from_step"] or 0) >= 2 for one in manifest.attempts]
        assert resumed == [False] + [True] * (len(resumed) - 1)
    assert adapters(place) == adapters(several)
    assert thrown_away(tmp_path) == []


@pytest.mark.parametrize("edit", ["r: 4", "- not: [yaml"], ids=["other value", "broken"])
def test_editing_conf_after_the_launch_changes_nothing(tiny_run, tmp_path, monkeypatch, edit):
    """Both jobs use the configuration composed before the first one."""
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
    """Skipped and duplicate cells are named, and the path of the record is shown."""
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
