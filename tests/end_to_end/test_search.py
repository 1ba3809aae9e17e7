"""Searches from the outside: drawn, ended early, killed and gone on with."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.sweep import SweepRecord
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.errors import MensError

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="needs POSIX signals; run it on Linux"),
]

RATE = "optim.lr=tag(log,interval(1e-5,1e-2))"


def command(tiny_run: list[str], place: Path, *overrides: str) -> list[str]:
    usual = [*tiny_run, "hydra/sweeper=optuna", "trainer.max_steps=2", f"hydra.sweep.dir={place}"]
    by_key = {text.partition("=")[0]: text for text in [*usual, *overrides]}
    return ["-m", *by_key.values()]


def trials(place: Path) -> list[dict[str, Any]]:
    search = SweepRecord.read(SweepDir(place).record).search
    assert search is not None
    return [dict(row) for row in search["trials"]]


def results(place: Path) -> list[tuple[Any, ...]]:
    return [(row["state"], row["params"], row["values"], row["job"]) for row in trials(place)]


def kill_in_trial(place: Path, number: int, launcher: subprocess.Popen[bytes]) -> None:
    """Kill the launcher and its job, once that job has opened its run."""
    began = time.monotonic()
    while time.monotonic() - began < 300:
        try:
            jobs = SweepRecord.read(SweepDir(place).record).jobs
        except MensError:
            jobs = []
        if len(jobs) > number and (place / jobs[number]["directory"] / "manifest.json").exists():
            break
        time.sleep(0.05)
    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    os.killpg(jobs[number]["attempts"][-1]["pid"], signal.SIGKILL)


def test_a_killed_search_goes_on_as_if_it_had_not_been(
    tiny_run: list[str], tmp_path: Path, cache: Path
) -> None:
    """The same draws and the same losses, repeats of a run included; nothing runs twice."""
    space = [RATE, "lora.r=4,8", "backend=qlora,full", "hydra.sweeper.n_trials=3"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert cli.main(command(tiny_run, whole, *space)) == 0
    source = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-m", "mens_exp", *command(tiny_run, killed, *space)],
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


def test_a_trial_that_learns_nothing_is_ended(tiny_run: list[str], tmp_path: Path) -> None:
    """By the second trial's validation loss beside the first's; its record says so."""
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
    assert cli.main([f"sweep.resume={place}"]) == 0
    assert [row["state"] for row in trials(place)] == ["complete", "pruned"]
