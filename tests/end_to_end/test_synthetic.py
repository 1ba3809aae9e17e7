"""data=synthetic, from the command to the record."""

from __future__ import annotations

import sys

import fork_server

from mens_exp.artifacts.manifest import Manifest, Status


def test_generated_rows_train_and_their_sides_are_recorded(tmp_path):
    """The smoke run on 300 tasks, with the benchmark's held-out part."""
    command = "experiment=smoke data=synthetic data.rows=300 data.seq_len=1024 trainer=cpu"
    done = fork_server.run(
        [sys.executable, "-m", "mens_exp", *command.split()],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("outputs/train/smoke/*/manifest.json")
    manifest = Manifest.read(path)
    assert manifest.status is Status.SUCCEEDED
    data = manifest.inputs["data"]
    assert (data["source"], data["heldout_rows"]) == ("synthetic", 15)
    assert data["train_rows"] > 200


def test_impossible_settings_are_refused_together(tmp_path):
    """Each message has the range, and no directory is created."""
    command = "data=synthetic data.rows=9 data.repair_frac=1.5 data.generator_seed=-1"
    done = fork_server.run(
        [sys.executable, "-m", "mens_exp", *command.split()],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=60,
    )
    assert done.returncode == 2
    for name in ("data.rows", "data.repair_frac", "data.generator_seed"):
        assert f"{name}: out of range" in done.stderr + done.stdout
    assert not list(tmp_path.iterdir())
