"""Runs stopped by a signal, and what happens to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.telemetry import read_events

pytestmark = pytest.mark.skipif(
    os.name == "nt", reason="needs POSIX signals and fork; run it on Linux"
)

LONGER = "trainer.max_steps=6"


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def steps(run):
    return [e["payload"]["step"] for e in read_events(run.telemetry) if e["event"] == "step"]


def losses(run, event, metric):
    read = [e["payload"] for e in read_events(run.telemetry) if e["event"] == event]
    return [(payload["step"], payload[metric]) for payload in read]


@pytest.fixture(scope="session")
def longer(finished_with):
    """A run of six steps without an interruption."""
    return finished_with(LONGER)


@pytest.mark.parametrize(
    ("scenario", "resumed_from"),
    [
        ("in mid-accumulation", 4),
        ("before the first checkpoint", 0),
        ("while a checkpoint is written", 2),
        ("before the adapter is written", 6),
        ("twice", 4),
    ],
)
def test_a_killed_run_ends_as_if_it_had_never_stopped(stopped, longer, scenario, resumed_from):
    """The adapter has the same bytes, and telemetry has every step once, with the same loss."""
    killed = stopped(scenario)
    assert set(killed.ends) == {-signal.SIGKILL}
    assert cli.main([f"resume={killed.run.path}"]) == 0
    assert adapter(killed.run) == adapter(longer)
    assert losses(killed.run, "step", "train/loss") == losses(longer, "step", "train/loss")
    manifest = Manifest.read(killed.run.manifest)
    assert manifest.status is Status.SUCCEEDED
    assert manifest.attempts[-1]["resumed_from_step"] == resumed_from
    assert [a["status"] for a in manifest.attempts[:-1]] == ["started"] * len(killed.ends)
    one_by_one = Manifest.read(longer.manifest)
    for name in ("tuned_val_loss", "base_val_loss", "tokens", "supervised_tokens", "steps"):
        assert manifest.results[name] == one_by_one.results[name], name
    assert manifest.facts == one_by_one.facts
    assert manifest.inputs == one_by_one.inputs


def test_python_m_mens_exp_resumes_a_run_killed_in_mid_epoch(stopped, longer, cache):
    """The command runs as a user types it, in a process of its own."""
    killed = stopped("in mid-epoch")
    source = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, "-m", "mens_exp", f"resume={killed.run.path}"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": source, "MENS_EXP_CACHE": str(cache)},
    )
    assert done.returncode == 0, done.stderr
    assert adapter(killed.run) == adapter(longer)
    assert steps(killed.run) == [1, 2, 3, 4, 5, 6]


def test_validations_fall_where_they_would_have(stopped, train_in, tmp_path):
    """Each validation happens once, at its own step, checkpoint steps included."""
    through = train_in(tmp_path / "run", LONGER, "trainer.val_check_interval=2")
    killed = stopped("with validation")
    assert cli.main([f"resume={killed.run.path}"]) == 0
    assert adapter(killed.run) == adapter(through)
    assert losses(killed.run, "validation", "val/loss") == losses(through, "validation", "val/loss")


def test_kill_leaves_the_record_started_and_every_file_whole(stopped):
    """The checkpoint in progress is a hidden temporary file, which resuming removes."""
    killed = stopped("while a checkpoint is written")
    assert killed.ends == [-signal.SIGKILL]
    manifest = Manifest.read(killed.run.manifest)
    assert (manifest.status, manifest.ended_utc) == (Status.STARTED, None)
    assert sorted(p.name for p in killed.run.checkpoints.glob("*.ckpt")) == ["step_00000002.ckpt"]
    torch.load(killed.run.checkpoint(2), weights_only=True)
    json.loads(killed.run.plan.read_bytes())
    assert steps(killed.run) == [1, 2, 3, 4]
    assert len(list(killed.run.checkpoints.glob(".step_00000004.ckpt.*.tmp"))) == 1
    assert cli.main([f"resume={killed.run.path}"]) == 0
    assert [p for p in killed.run.path.rglob(".*") if p.name != ".hydra"] == []
    assert not killed.run.lock.exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_cancels_the_run_and_keeps_its_last_checkpoint(stopped, finished, name):
    """The record is closed, the message says how to resume, and the resumed run ends the same."""
    asked = stopped(name)
    assert asked.ends == [130]
    assert f"resume={asked.run.path}" in asked.log
    manifest = Manifest.read(asked.run.manifest)
    assert manifest.status is Status.CANCELLED
    assert manifest.error is None
    assert manifest.ended_utc == manifest.attempts[0]["ended_utc"] is not None
    assert read_events(asked.run.telemetry)[-1]["payload"]["status"] == "cancelled"
    assert asked.run.last_checkpoint() == asked.run.checkpoint(2)
    assert asked.run.report.is_file()
    assert cli.main([f"resume={asked.run.path}"]) == 0
    assert adapter(asked.run) == adapter(finished)
    again = Manifest.read(asked.run.manifest)
    assert [a["status"] for a in again.attempts] == [Status.CANCELLED, Status.SUCCEEDED]
    assert steps(asked.run) == [1, 2, 3, 4]


def test_a_second_signal_ends_at_once(stopped):
    """Even while the report is rendered: the status was written before that."""
    asked = stopped("SIGINT twice")
    assert asked.ends == [-signal.SIGINT]
    assert Manifest.read(asked.run.manifest).status is Status.CANCELLED
    assert not asked.run.report.exists()


def test_a_signal_while_closing_changes_nothing(stopped):
    """The run has already succeeded, and its report is still rendered."""
    asked = stopped("SIGINT while closing")
    assert asked.ends == [0]
    assert Manifest.read(asked.run.manifest).status is Status.SUCCEEDED
    assert asked.run.report.is_file()
