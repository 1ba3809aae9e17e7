"""A launcher that gets its jobs one after the other, depending on results; on this machine."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import JobState
from mens_exp.sweeps.process import Ended

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux")

DONE = [("end", "succeeded"), ("exit", 0)]
LONG = [("on interrupt", 130), ("wait", "never")]


class Fed:
    """A feed that supplies the jobs of a launcher one by one, and prunes the given ones."""

    def __init__(self, launcher, ends=None):
        self.launcher, self.ends = launcher, ends or {}
        self.coming = list(launcher.record.jobs)
        launcher.record.jobs.clear()
        launcher._feed = self
        self.settled = []

    def supply(self):
        self.launcher.record.jobs += self.coming[:1]
        return bool(self.coming and self.coming.pop(0))

    def watch(self, job):
        listens = self.launcher.directory.path / job["directory"] / "listens"
        return self.ends.get(job["number"]) if listens.exists() else None

    def job_ended(self, job):
        self.settled.append((job["number"], str(job["state"])))


def test_jobs_come_as_others_end(sweep):
    """One job at a time, and the feed learns of each end."""
    launcher = sweep([DONE], [[("exit", 2)]], [DONE])
    fed = Fed(launcher)
    assert launcher.run() == 2
    assert fed.settled == [(0, "succeeded"), (1, "failed"), (2, "succeeded")]


def test_as_many_come_as_may_run(sweep, tmp_path):
    """Two jobs wait for each other's file; the third one starts when one of them has ended."""
    files = [tmp_path / "sweep" / f"{number}_job" / "tried_0" for number in (0, 1)]
    met = [[("wait", str(other)), *DONE] for other in reversed(files)]
    launcher = sweep([met[0]], [met[1]], [DONE], n_jobs=2)
    fed = Fed(launcher)
    assert launcher.run() == 0
    assert sorted(fed.settled) == [(number, "succeeded") for number in range(3)]
    began = [job["attempts"][0]["started_utc"] for job in launcher.record.jobs]
    ended = [str(job["attempts"][0]["ended_utc"]) for job in launcher.record.jobs]
    assert began[2] >= min(ended[:2])


def test_a_killed_job_is_tried_again_beside_the_others(sweep, tmp_path):
    """The other job only ends once the killed one has restarted, so both ran at the same time."""
    again = tmp_path / "sweep" / "0_job" / "tried_1"
    patient = [("wait", str(again)), *DONE]
    launcher = sweep([[("kill", "SIGKILL")], DONE], [patient], n_jobs=2, retries=1)
    fed = Fed(launcher)
    assert launcher.run() == 0
    assert sorted(fed.settled) == [(0, "succeeded"), (1, "succeeded")]
    killed, other = (job["attempts"] for job in launcher.record.jobs)
    assert [one["exit_code"] for one in killed] == [-signal.SIGKILL, 0]
    assert killed[1]["started_utc"] <= str(other[0]["ended_utc"])


def test_a_pruned_job_is_neither_failed_nor_cancelled(sweep):
    """Its directory has the reason, it is not retried, and the exit code is 0."""
    launcher = sweep([LONG], [DONE], retries=3)
    fed = Fed(launcher, {0: "worse than others"})
    assert launcher.run() == 0
    assert fed.settled == [(0, "pruned"), (1, "succeeded")]
    job = launcher.record.jobs[0]
    assert (str(job["state"]), job["reason"]) == ("pruned", "worse than others")
    assert len(job["attempts"]) == 1
    pruned = RunDir(launcher.directory.path / job["directory"]).pruned
    assert pruned.read_text("utf-8") == "worse than others"


def test_a_job_that_ends_well_before_it_is_pruned_has_succeeded(sweep):
    """Its result counts."""
    launcher = sweep([DONE])
    run = RunDir(launcher.directory.path / launcher.record.jobs[0]["directory"])
    run.pruned.write_text("too late", encoding="utf-8")
    fed = Fed(launcher)
    assert launcher.run() == 0
    assert fed.settled == [(0, "succeeded")]


def test_only_the_job_that_is_pruned_ends(sweep):
    """The other running job gets no signal."""
    unheard = [("wait", "until_pruned"), *DONE]
    launcher = sweep([LONG], [unheard], n_jobs=2)
    beside = launcher.directory.path / "1_job"
    scripts = (beside / "scripts.json").read_text("utf-8")
    pruned = RunDir(launcher.directory.path / "0_job").pruned
    (beside / "scripts.json").write_text(scripts.replace("until_pruned", str(pruned)), "utf-8")
    fed = Fed(launcher, {0: "worse than others"})
    assert launcher.run() == 0
    assert sorted(fed.settled) == [(0, "pruned"), (1, "succeeded")]
    assert launcher.record.jobs[1]["attempts"][0]["exit_code"] == 0


class Recorded:
    """An executor that first accepts no job, and then only jobs that have already ended."""

    look_s = 0.01

    def __init__(self, *, left):
        self.left, self.is_silent, self.told_to_end = left, not left, 0
        self.waits = None

    def start(self, jobs):
        was_silent, self.is_silent = self.is_silent, False
        if was_silent:
            for job in jobs:
                job["reason"] = "nobody answers"
            return []
        return [(job, self) for job in jobs]

    def adopt(self, job):
        del job
        return self if self.left else None

    def poll(self):
        """There is nothing to poll."""

    def ended(self):
        return Ended(exit_code=130 if self.left else 0)

    def end(self):
        self.told_to_end += 1


def test_a_job_that_could_not_be_handed_over_waits(sweep, monkeypatch):
    """Its reason is shown until an executor accepts the job."""
    launcher = sweep([DONE])
    run = launcher.directory.path / "0_job"
    (run / "manifest_succeeded.json").replace(run / "manifest.json")
    RunDir(run).report.unlink()  # so that it has not succeeded yet
    monkeypatch.setattr(launcher, "_executor", Recorded(left=False))
    told = []
    monkeypatch.setattr(launcher, "_say", lambda _job, what, why: told.append(f"{what}: {why}"))
    assert launcher.run() == 0
    assert told == ["waits: nobody answers", "running: None", "succeeded: None"]


def test_a_pruned_job_that_was_not_told_so_is_ended_when_the_search_goes_on(sweep, monkeypatch):
    """The launcher died after it had written the file, and before it sent the signal."""
    launcher = sweep([LONG])
    job = launcher.record.jobs[0]
    job["state"] = JobState.RUNNING
    RunDir(launcher.directory.path / job["directory"]).pruned.write_text("worse", "utf-8")
    executor = Recorded(left=True)
    monkeypatch.setattr(launcher, "_executor", executor)
    assert launcher.run() == 0
    assert executor.told_to_end == 1
    assert (str(job["state"]), job["reason"]) == ("pruned", "worse")


def test_no_job_comes_after_a_signal(sweep):
    """A cancelled search draws no further job, and the feed learns of no end."""
    launcher = sweep([LONG], [DONE])
    fed = Fed(launcher)
    listens = Path(launcher.directory.path) / "0_job" / "listens"

    def interrupt():
        while not listens.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert launcher.run() == 130
    thread.join()
    assert [str(job["state"]) for job in launcher.record.jobs] == ["cancelled"]
    assert (fed.settled, len(fed.coming)) == ([], 1)
