"""A sweep of two jobs at a time, each of two processes on the CPU, disturbed or not."""

from __future__ import annotations

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
from mens_exp.artifacts.sweep import SweepRecord
from mens_exp.artifacts.sweep_dir import SweepDir

pytestmark = [
    pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux"),
]

LIMIT_S = 400


def command(tiny_run, directory, *overrides):
    """Two seeds, each of two processes, thirty steps, a checkpoint after every second one."""
    several = ["trainer=ddp", "trainer.accelerator=cpu", "hydra.launcher.n_jobs=2"]
    given = [*tiny_run, *several, "trainer.max_steps=30", *overrides]
    by_key = {text.partition("=")[0]: text for text in given}
    return ["-m", *by_key.values(), "seed=1,2", f"hydra.sweep.dir={directory}"]


def jobs(directory):
    return list(SweepRecord.read(SweepDir(directory).record).jobs)


def manifests(directory):
    return [Manifest.read(RunDir(directory / job["directory"]).manifest) for job in jobs(directory)]


def adapters(directory):
    files = sorted(directory.glob("*/adapter/**/*.safetensors"))
    assert len(files) == 4
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in files}


def first_of(directory, number):
    return int(jobs(directory)[number]["attempts"][-1]["pid"])


def second_of(directory, number):
    children = psutil.Process(first_of(directory, number)).children()
    (other,) = (one for one in children if "mens_exp.tasks.following" in one.cmdline())
    return other


def wait_until_gone(process):
    began = time.monotonic()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 60, "it has outlived its first process"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """The sweep without a disturbance."""
    directory = tmp_path_factory.mktemp("whole") / "sweep"
    assert cli.main(command(tiny_run, directory)) == 0
    return directory


@pytest.fixture
def started(tiny_run, tmp_path, cache):
    """Launch the sweep in a process of its own, and wait until both jobs have a checkpoint."""

    def launched(*overrides):
        (tmp_path / "tmp").mkdir()
        source = os.pathsep.join(filter(None, sys.path))
        told = {"PYTHONPATH": source, "MENS_EXP_CACHE": str(cache), "TMPDIR": str(tmp_path / "tmp")}
        launcher = fork_server.Popen(
            [
                *(sys.executable, "-m", "mens_exp"),
                *command(tiny_run, tmp_path / "sweep", *overrides),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **told},
        )
        began = time.monotonic()
        while len({one.parent for one in (tmp_path / "sweep").glob("*/checkpoints/*.ckpt")}) < 2:
            assert launcher.poll() is None, "it ended before its first checkpoints"
            assert time.monotonic() - began < LIMIT_S
            time.sleep(0.02)
        return launcher

    return launched


def thrown_away(tmp_path):
    return [path.name for path in (tmp_path / "tmp").glob("mens_exp_process*")]


def test_jobs_of_two_processes_train_side_by_side(whole):
    """Each on record with both its processes, and with the memory of both."""
    assert [job["state"] for job in jobs(whole)] == ["succeeded", "succeeded"]
    for job, manifest in zip(jobs(whole), manifests(whole), strict=True):
        assert (job["processes"], manifest.facts["processes"]) == (2, 2)
        (attempt,) = job["attempts"]
        first, second = manifest.results["peak_rss_bytes_of_processes"]
        assert attempt["peak_rss_bytes"] > 0.9 * (first + second)
        assert attempt["peak_rss_bytes"] > 1.5 * first
        assert not RunDir(whole / job["directory"]).processes.exists()
    assert len(set(adapters(whole).values())) == 4


def test_killed_processes_leave_none_behind_and_their_jobs_go_on_to_the_same_bytes(
    started, whole, tmp_path
):
    """The first process of one job, the second one of the other: both jobs are tried again."""
    place = tmp_path / "sweep"
    launcher = started("sweep.retries=1")
    left_alone, killed = second_of(place, 0), second_of(place, 1)
    os.kill(first_of(place, 0), signal.SIGKILL)
    killed.kill()
    wait_until_gone(left_alone)
    assert launcher.wait(LIMIT_S) == 0
    assert [job["state"] for job in jobs(place)] == ["succeeded", "succeeded"]
    codes = [[one["exit_code"] for one in job["attempts"]] for job in jobs(place)]
    assert codes == [[-signal.SIGKILL, 0], [1, 0]]
    log = RunDir(place / jobs(place)[1]["directory"]).log.read_text("utf-8")
    assert "process 1 of 2 has ended" in log
    assert "ended by SIGKILL" in log
    assert all((one.attempts[-1]["resumed_from_step"] or 0) >= 2 for one in manifests(place))
    assert adapters(place) == adapters(whole)
    assert thrown_away(tmp_path) == []


def test_a_killed_launcher_and_job_go_on_together(started, whole, tmp_path):
    """What is still at work is waited for, with its second process; what died is started again."""
    place = tmp_path / "sweep"
    launcher = started()
    launcher.kill()
    launcher.wait()
    os.kill(first_of(place, 0), signal.SIGKILL)
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert [len(job["attempts"]) for job in jobs(place)] == [2, 1]
    assert adapters(place) == adapters(whole)


def test_sigterm_ends_all_processes_and_closes_their_records(started, whole, tmp_path):
    """Nothing is left at work or lying about; moved elsewhere, it goes on to the same bytes."""
    place = tmp_path / "sweep"
    launcher = started()
    others = [second_of(place, number) for number in (0, 1)]
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(LIMIT_S) == 130
    assert [one.is_running() for one in others] == [False, False]
    assert [job["state"] for job in jobs(place)] == ["cancelled", "cancelled"]
    assert {one.status for one in manifests(place)} == {Status.CANCELLED}
    assert thrown_away(tmp_path) == []
    moved = place.rename(tmp_path / "moved elsewhere")
    assert cli.main([f"sweep.resume='{moved}'"]) == 0
    assert adapters(moved) == adapters(whole)
