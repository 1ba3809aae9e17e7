"""The same command gives the same bytes on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def test_the_same_command_twice_gives_the_same_adapter(finished, train_in, tmp_path):
    """The losses are the same to the last bit, too."""
    again = train_in(tmp_path / "run")
    assert adapter(again) == adapter(finished)
    first, second = (Manifest.read(run.manifest).results for run in (finished, again))
    assert first["tuned_val_loss"] == second["tuned_val_loss"]


def test_another_process_gives_the_same_adapter_and_no_logger_means_no_wandb(
    finished, tiny_run, tmp_path
):
    """The result does not depend on the process, and unused libraries are not imported."""
    run = RunDir(tmp_path / "run")
    code = (
        f"import json, sys; sys.path[:0] = {[entry for entry in sys.path if entry]!r}\n"
        "from mens_exp.cli import main\n"
        f"code = main({[*tiny_run, f'hydra.run.dir={run.path}']!r})\n"
        "print(json.dumps('wandb' in sys.modules))\nsys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) is False
    assert adapter(run) == adapter(finished)


def test_a_sink_changes_nothing(finished, train_in, tmp_path):
    """A run with logger=wandb and one without have the same adapter."""
    mirrored = train_in(tmp_path / "run", "logger=wandb")
    assert list(mirrored.wandb.glob("offline-run-*"))
    assert adapter(mirrored) == adapter(finished)


@pytest.mark.parametrize("override", ["seed=43", "lora.dropout=0.2", "optim.lr=3e-3", "lora.r=8"])
def test_every_factor_reaches_the_adapter(finished, train_in, tmp_path, override):
    """Without this, a determinism test would pass on an adapter that nothing changes."""
    assert adapter(train_in(tmp_path / "run", override)) != adapter(finished)
