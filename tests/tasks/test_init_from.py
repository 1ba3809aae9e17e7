"""Runs that start from the adapter of another run: the second phase of a curriculum."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch

from mens_exp import cli
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.compose import from_yaml, typed

ONE = "trainer.max_steps=1"


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def validations(run):
    read = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "validation"]
    return [(p["step"], p["condition"], p["val/loss"]) for p in read]


@pytest.fixture(scope="module")
def second(finished, train_in, tmp_path_factory):
    """Two steps from the adapter of `finished`; do not change it."""
    directory = tmp_path_factory.mktemp("second") / "run"
    return train_in(directory, f"lora.init_from={finished.path}", "trainer.max_steps=2", "seed=7")


def test_training_starts_from_the_adapter(finished, second):
    """The loss before the first step is the final loss of the other run."""
    theirs, ours = Manifest.read(finished.manifest).results, Manifest.read(second.manifest).results
    assert ours["initial_val_loss"] == theirs["tuned_val_loss"]
    assert ours["base_val_loss"] == theirs["base_val_loss"]
    assert [(step, condition) for step, condition, _ in validations(second)] == [
        (0, "base"),
        (0, "tuned"),
        (2, "tuned"),
    ]
    assert ours["tuned_val_loss"] < ours["initial_val_loss"]


def test_its_optimizer_is_fresh(finished, second):
    """The optimizer of the new run has counted only its own two steps."""
    checkpoint = torch.load(second.checkpoint(2), weights_only=True)
    states = checkpoint["optimizer_states"][0]["state"].values()
    assert {int(state["step"]) for state in states} == {2}
    assert (
        Manifest.read(second.manifest).results["tokens"]
        < (Manifest.read(finished.manifest).results["tokens"])
    )


def test_the_adapter_is_an_input_on_record(finished, second):
    """The inputs have the adapter's hash, the base it was trained on, and its path."""
    manifest = Manifest.read(second.manifest)
    assert manifest.inputs["init_from"] == {
        "path": str(finished.adapter.resolve()),
        "form": "v3",
        "adapter_sha256": sha256_file(finished.adapter / "adapter.safetensors"),
        "base_weights_sha256": manifest.inputs["base_weights_sha256"],
    }


def test_a_peft_directory_starts_the_same_run(finished, second, train_in, tmp_path):
    """The directory is copied out of its run, so that it has only PEFT's own files."""
    shutil.copytree(finished.peft, tmp_path / "peft")
    run = train_in(
        tmp_path / "run", f"lora.init_from={tmp_path / 'peft'}", "trainer.max_steps=2", "seed=7"
    )
    assert adapter(run) == adapter(second)
    manifest = Manifest.read(run.manifest)
    assert manifest.inputs["init_from"]["form"] == "peft"
    assert "a PEFT directory does not record it" in manifest.unknown.values()


def test_latest_is_settled_when_the_command_is_given(train_in, tmp_path, monkeypatch):
    """The record has the run's path instead of the word, and reads back when the run is resumed."""
    monkeypatch.chdir(tmp_path)
    first = train_in("outputs/train/default/a", ONE)
    run = train_in("outputs/train/default/b", ONE, "lora.init_from=latest")
    stored = typed(from_yaml(run.config)).lora.init_from
    assert stored == str(first.adapter.resolve())
    assert Manifest.read(run.manifest).inputs["init_from"]["path"] == stored


def test_a_killed_second_phase_goes_on_to_the_same_bytes(finished, broken, train_in, tmp_path):
    """The run resumes from a checkpoint or, killed earlier, reads the adapter again."""
    start = f"lora.init_from={finished.path}"
    through = train_in(tmp_path / "through", start)
    for at in (2, 7):
        run = broken(tmp_path / str(at), at, start)
        assert cli.main([f"resume={run.path}"]) == 0
        assert adapter(run) == adapter(through)
        assert validations(run) == validations(through)


def test_an_adapter_that_has_changed_is_refused_on_resume(train_in, broken, tmp_path, capsys):
    """With another adapter, the run would not be the one that was started."""
    first = train_in(tmp_path / "first", ONE)
    run = broken(tmp_path / "run", 2, f"lora.init_from={first.path}")
    other = train_in(tmp_path / "other", ONE, "seed=9")
    shutil.copy(other.adapter / "adapter.safetensors", first.adapter)
    manifest, name = Manifest.read(first.manifest), "adapter/adapter.safetensors"
    manifest.outputs[name] = Manifest.read(other.manifest).outputs[name]
    manifest.write(first.manifest)  # or else its own hash would refuse it
    capsys.readouterr()
    assert cli.main([f"resume={run.path}"]) == 2
    assert "inputs.adapter_sha256" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("lora.r=8",), "lora.r"),
        (("lora=qv",), "layers that this run does not train"),
        (("model.init_seed=3",), "trained on another base model"),
    ],
)
def test_an_adapter_of_another_run_is_refused(
    finished,
    train_in,
    tmp_path,
    capsys,
    overrides,
    text,
):
    """Another rank, other layers or another base is refused before weights are loaded."""
    capsys.readouterr()
    train_in(tmp_path / "run", f"lora.init_from={finished.path}", *overrides, code=2)
    assert text in capsys.readouterr().err


def test_sigilderg_s_phases_chain(rows_file, tmp_path, monkeypatch):
    """Both presets on a tiny model and a CPU: few steps, their own rates, one adapter."""
    monkeypatch.chdir(tmp_path)
    small = {
        "trainer.max_steps": 3,
        "trainer.accumulate_grad_batches": 2,
        "data.micro_batch_size": 2,
        "schedule.warmup_steps": 1,
        "optim": "adamw",
    }
    overrides = [f"{key}={value}" for key, value in small.items()]
    runs = []
    for number in (1, 2):
        directory = f"outputs/train/default/phase{number}"
        base = ["model=tiny_llama", "trainer=cpu", "logger=none", "suite=none", "data=jsonl"]
        data = [f"data.path={rows_file}", "data.seq_len=192"]
        preset = [f"preset=sigilderg_phase{number}", *data]
        assert cli.main([*base, *preset, *overrides, f"hydra.run.dir={directory}"]) == 0
        runs.append(tmp_path / directory)
    first, second = (typed(from_yaml(run / "config.yaml")) for run in runs)
    assert (first.optim.lr, second.optim.lr) == (1e-4, 5e-5)
    assert (first.lora.r, first.lora.alpha, first.lora.dropout) == (16, 16, 0.05)
    assert second.lora.init_from == str(runs[0] / "adapter")
    before, after = (Manifest.read(run / "manifest.json").results for run in runs)
    assert after["initial_val_loss"] == before["tuned_val_loss"]
    moved = [read_adapter(run / "adapter")[1]["l0.q.lora_b"] for run in runs]
    assert not np.array_equal(*moved)


def test_a_preset_for_a_gpu_is_refused_elsewhere_with_what_would_run(capsys, rows_file):
    """Only the paged optimizer needs a GPU, and overriding it is enough."""
    command = ["task=plan", "preset=sigilderg_phase1", "model=tiny_llama", "trainer=cpu"]
    data = ["data=jsonl", f"data.path={rows_file}", "data.seq_len=192"]
    assert cli.main([*command, *data]) == 2
    message = capsys.readouterr().err
    assert "paged memory needs a CUDA GPU" in message
    assert "optim=adamw" in message
