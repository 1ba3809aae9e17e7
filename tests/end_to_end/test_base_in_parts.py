"""Two CPU processes that shard the base train what one process trains, and leave one record.

The tests' own process keeps the record, and starts the other process.
"""

from __future__ import annotations

import numpy as np
import pytest

from mens_exp import cli
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.telemetry import read_events

F32 = ("quant.compute_dtype=f32", "trainer.max_steps=20", "checkpoint.every_n_steps=8")
PARTS = ("trainer=fsdp", "trainer.accelerator=cpu", "quant.storage_dtype=f32")
SCORED = ("suite=heldout_syntax", "suite.max_new_tokens=48")
RELATIVE = 1e-4  # sums over two processes round differently; measured: 3e-8


def steps(run):
    return [event["payload"] for event in read_events(run.telemetry) if event["event"] == "step"]


def same_course(one, other):
    """Compare two runs' steps, validation losses and adapters."""
    assert len(steps(one)) == len(steps(other)) == 20
    for ours, theirs in zip(steps(one), steps(other), strict=True):
        assert ours["batches_sha256"] == theirs["batches_sha256"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=RELATIVE)
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-3)
    manifests = [Manifest.read(run.manifest) for run in (one, other)]
    assert manifests[0].status is manifests[1].status is Status.SUCCEEDED
    for name in ("base_val_loss", "tuned_val_loss"):
        losses = [manifest.results[name] for manifest in manifests]
        assert losses[0] == pytest.approx(losses[1], rel=RELATIVE)
    adapters = [read_adapter(run.adapter)[1] for run in (one, other)]
    assert adapters[0].keys() == adapters[1].keys()
    for name, values in adapters[0].items():
        np.testing.assert_allclose(values, adapters[1][name], rtol=1e-2, atol=1e-5)


@pytest.fixture(scope="module")
def alone(finished_with):
    return finished_with(*F32, *SCORED)


@pytest.fixture(scope="module")
def parts(train_in, tmp_path_factory):
    return train_in(tmp_path_factory.mktemp("parts") / "run", *F32, *SCORED, *PARTS)


def test_parts_take_the_course_of_one(alone, parts, untimed):
    """Twenty steps with dropout; the scorecard, made with the whole base, is the same too."""
    same_course(parts, alone)
    assert untimed(parts) == untimed(alone)
    ours, theirs = (Manifest.read(run.manifest) for run in (parts, alone))
    assert (ours.contract or {})["digest"] == (theirs.contract or {})["digest"]
    expected = {"strategy": "fsdp", "processes": 2, "storage_dtype": "float32", "quant": "nf4"}
    assert {name: ours.facts[name] for name in expected} == expected
    for name in ("total_parameters", "trainable_parameters", "quantized_linears", "attention"):
        assert ours.facts[name] == theirs.facts[name]
    assert len(ours.results["peak_rss_bytes_of_processes"]) == 2
    assert (ours.data_contract or {})["probe"]["accumulation_gradient"] < 1e-3
    assert not parts.processes.exists()


def test_a_base_is_compared_before_it_is_in_parts(parts, train_in, tmp_path, monkeypatch, capsys):
    """The first process compares it with transformers; a wrong graph ends the run before step 1."""
    part = (Manifest.read(parts.manifest).data_contract or {})["probe"]["reference"]
    assert part["loss"] <= 1e-5
    assert part["gradient"] <= 1e-4
    from mens_exp.backends import forward

    right = forward.logits
    monkeypatch.setattr(forward, "logits", lambda *args: right(*args) * 1.02)
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    run = train_in(tmp_path / "run", *F32, *PARTS, "suite=none", code=4)
    assert "is not the one that transformers computes" in capsys.readouterr().err
    assert not run.checkpoints.exists()


def test_a_base_that_cannot_be_compared_says_why(train_in, tmp_path, monkeypatch):
    """The reason is the one found before sharding, not that the base is sharded now."""
    from mens_exp.training import contract_probe

    monkeypatch.setattr(contract_probe, "free_bytes", lambda _: -1)  # f32 weights need 0 here
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    run = train_in(tmp_path / "run", *F32, *PARTS, "suite=none", "trainer.max_steps=1")
    probe = (Manifest.read(run.manifest).data_contract or {})["probe"]
    assert probe["reference"] is None
    assert "not enough memory" in probe["reference_unknown"]


def test_what_they_leave_is_loaded_like_any_other(parts, tmp_path):
    """task=evaluate runs in one process, which holds the whole base."""
    out = tmp_path / "evaluated"
    command = ["task=evaluate", "logger=none", f"path={parts.path}", *SCORED, "trainer=cpu"]
    assert cli.main([*command, f"hydra.run.dir={out}"]) == 0
    assert (out / "scorecard.json").is_file()


@pytest.mark.parametrize(
    ("before", "changes"),
    [(PARTS, ("trainer.devices=1",)), ((), ("trainer.devices=2",))],
    ids=["parts, then one", "one, then two"],
)
def test_another_number_of_processes_goes_on(
    alone,
    train_in,
    tmp_path,
    before,
    changes,
):
    """After eight steps: a checkpoint does not depend on the strategy."""
    run = train_in(tmp_path / "run", *F32, *SCORED, *before, "trainer.max_steps=8")
    assert cli.main([f"resume={run.path}", *changes, "trainer.max_steps=20"]) == 0
    assert Manifest.read(run.manifest).attempts[-1]["resumed_from_step"] == 8
    same_course(run, alone)


def test_an_unquantized_base_under_bf16_is_held_in_parts_too(train_in, tmp_path):
    """With gradient checkpointing; losses in bf16 agree to 1e-3."""
    usual = ("backend=lora", "quant=none", "model.gradient_checkpointing=on")
    one = train_in(tmp_path / "one", *usual)
    both = train_in(tmp_path / "both", *usual, "trainer=fsdp", "trainer.accelerator=cpu")
    for ours, theirs in zip(steps(both), steps(one), strict=True):
        assert ours["batches_sha256"] == theirs["batches_sha256"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-3)
