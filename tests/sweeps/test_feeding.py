"""A launcher whose jobs come one after the other, as their results decide."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mens_exp.artifacts.run_dir import RunDir

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.artifacts.sweep import SweepJob
    from mens_exp.sweeps.launcher import Launcher

    Sweep = Callable[..., Launcher]

pytestmark = pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux")

DONE: list[tuple[str, Any]] = [("end", "succeeded"), ("exit", 0)]
LONG: list[tuple[str, Any]] = [("on interrupt", 130), ("wait", "never")]


class Fed:
    """Hands out the jobs of a launcher one by one, and ends those it is told to."""

    def __init__(self, launcher: Launcher, ends: dict[int, str] | None = None) -> None:
        self.launcher, self.ends = launcher, ends or {}
        self.coming = list(launcher.record.jobs)
        launcher.record.jobs.clear()
        launcher._feed = self
        self.settled: list[tuple[int, str]] = []

    def supply(self) -> bool:
        self.launcher.record.jobs += self.coming[:1]
        return bool(self.coming and self.coming.pop(0))

    def watch(self, job: SweepJob) -> str | None:
        listens = self.launcher.directory.path / job["directory"] / "listens"
        return self.ends.get(job["number"]) if listens.exists() else None

    def settle(self, job: SweepJob) -> None:
        self.settled.append((job["number"], str(job["state"])))


def test_jobs_come_as_others_end(sweep: Sweep) -> None:
    """One at a time here; each end is told."""
    launcher = sweep([DONE], [[("exit", 2)]], [DONE])
    fed = Fed(launcher)
    assert launcher.run() == 2
    assert fed.settled == [(0, "succeeded"), (1, "failed"), (2, "succeeded")]


def test_a_pruned_job_is_neither_failed_nor_cancelled(sweep: Sweep) -> None:
    """Its directory says why, it is not tried again, and the exit code is 0."""
    launcher = sweep([LONG], [DONE], retries=3)
    fed = Fed(launcher, {0: "worse than others"})
    assert launcher.run() == 0
    assert fed.settled == [(0, "pruned"), (1, "succeeded")]
    job = launcher.record.jobs[0]
    assert (str(job["state"]), job["reason"]) == ("pruned", "worse than others")
    assert len(job["attempts"]) == 1
    pruned = RunDir(launcher.directory.path / job["directory"]).pruned
    assert pruned.read_text("utf-8") == "worse than others"


def test_a_job_that_ends_well_before_it_is_pruned_has_succeeded(sweep: Sweep) -> None:
    """What it measured counts."""
    launcher = sweep([DONE])
    run = RunDir(launcher.directory.path / launcher.record.jobs[0]["directory"])
    run.pruned.write_text("too late", encoding="utf-8")
    fed = Fed(launcher)
    assert launcher.run() == 0
    assert fed.settled == [(0, "succeeded")]


def test_no_job_comes_after_a_signal(sweep: Sweep) -> None:
    """A search that is cancelled draws nothing more, and tells of no end."""
    launcher = sweep([LONG], [DONE])
    fed = Fed(launcher)
    listens = Path(launcher.directory.path) / "0_job" / "listens"

    def interrupt() -> None:
        while not listens.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    assert launcher.run() == 130
    thread.join()
    assert [str(job["state"]) for job in launcher.record.jobs] == ["cancelled"]
    assert (fed.settled, len(fed.coming)) == ([], 1)
