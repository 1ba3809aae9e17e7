from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.training.contract_probe import preserve_state

pytestmark = pytest.mark.probes


def states():
    legacy = np.random.get_state()  # the global generator
    return [torch.get_rng_state().tolist(), legacy[1].tolist(), random.getstate()]


def test_a_block_leaves_modes_gradients_and_generators_as_they_were():
    """Random state, gradients and modes are restored, and dropout is off inside."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.ReLU())
    model[2].eval()
    model[0].weight.grad = torch.ones(3, 3)
    state, deterministic = states(), torch.are_deterministic_algorithms_enabled()
    with preserve_state(model):
        assert [module.training for module in model] == [True, False, False]
        model(torch.rand(2, 3)).sum().backward()
        np.random.rand(5)  # the global generator, which other code may use
        random.random()  # not a secret
        model.train()
        torch.use_deterministic_algorithms(not deterministic)
    assert [module.training for module in model] == [True, True, False]
    assert model[0].weight.grad.tolist() == [[1.0] * 3] * 3
    assert model[0].bias.grad is None
    assert torch.are_deterministic_algorithms_enabled() is deterministic
    assert states() == state


def losses(run):
    steps = [event["payload"] for event in read_events(run.telemetry) if event["event"] == "step"]
    return [step["train/loss"] for step in steps]


@pytest.mark.parametrize(
    "overrides", [(), ("data.packing=false", "data.micro_batch_size=2"), ("backend=full",)]
)
def test_a_run_with_the_probe_trains_bit_for_bit_as_without(train_in, tmp_path, overrides):
    """This includes dropout; a run without the probe records why it has none."""
    with_it, without = (
        train_in(tmp_path / name, *overrides, f"data.contract.probe={name}")
        for name in ("true", "false")
    )
    assert losses(with_it) == losses(without)
    made = "weights" if "backend=full" in overrides else "adapter"
    outputs = [Manifest.read(run.manifest).outputs for run in (with_it, without)]
    tensors = [{k: v for k, v in one.items() if k.endswith(".safetensors")} for one in outputs]
    assert tensors[0] == tensors[1]
    assert any(name.startswith(made) for name in tensors[0])
    node = Manifest.read(without.manifest).data_contract
    assert node is not None
    assert node["probe"] is None
    assert node["unknown"] == {"probe": "switched off by data.contract.probe=false"}


def test_a_resumed_run_keeps_its_certificate(train_in, tmp_path, monkeypatch):
    """The probe is not repeated when training resumes."""
    from mens_exp import cli
    from mens_exp.training import contract_probe

    run = train_in(tmp_path / "run")
    before = Manifest.read(run.manifest).data_contract
    monkeypatch.delattr(contract_probe, "probe")
    assert cli.main([f"resume={run.path}", "trainer.max_steps=5"]) == 0
    assert Manifest.read(run.manifest).data_contract == before


@pytest.mark.parametrize(
    "overrides",
    [
        ("quant.compute_dtype=f32",),
        ("quant=int8",),
        ("backend=lora", "quant=none"),
        ("backend=burn",),
        ("backend=proxy",),
        ("model=tiny_gpt2",),
        ("objective=causal",),
    ],
)
def test_every_backend_is_within_tolerance(train_in, tmp_path, overrides):
    """Differences by rounding are far below the limit."""
    node = Manifest.read(train_in(tmp_path / "run", *overrides).manifest).data_contract
    assert node is not None
    probe = node["probe"]
    assert probe["documents"] == probe["accumulation_documents"] == 4
    differences = ("together_loss", "together_hidden", "accumulation_loss", "accumulation_gradient")
    assert max(probe[name] for name in differences) < probe["tolerance"] / 2
    assert probe["peek"] <= 1e-6


def test_a_refused_run_is_refused_again_when_it_goes_on(train_in, tmp_path):
    """A refused probe is no certificate for the resumed run."""
    from mens_exp import cli

    run = train_in(tmp_path / "run", "data.contract.min_supervised_frac=0.99", code=4)
    first = Manifest.read(run.manifest).data_contract
    assert cli.main([f"resume={run.path}"]) == 4
    assert Manifest.read(run.manifest).data_contract == first
    assert not run.checkpoints.exists()
