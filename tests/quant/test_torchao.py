"""torchao's integers in the codebook's layers, compared with the package."""

import json

import pytest
import torch
from safetensors.torch import load_file

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.quant import BUILT_IN, QuantConfig, QuantType
from mens_exp.planning.checks import machine
from mens_exp.quant.binding import binding_of

NAMES = ("torchao4", "torchao8")


@pytest.fixture(autouse=True)
def torchao(importable):
    """Import torchao, which is not in the dev extra because PEFT imports it in every process."""
    importable("torchao", "torchao==0.18.0")


def settings(name):
    return QuantConfig(quant_type=QuantType[name], double_quant=False, block_size=64)


def plain(dtype):
    torch.manual_seed(0)
    layer = torch.nn.Linear(256, 96, bias=False).to(dtype)
    layer.weight.data[3, ::50] = 0.4
    layer.weight.data[5] = 0
    return torch.nn.Sequential(layer)


def of_package(name, model, block=64):
    """Quantize a model as torchao's documentation does."""
    from torchao.quantization import (
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    quantize_(
        model,
        Int8WeightOnlyConfig()
        if name == "torchao8"
        else IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(block)),
    )
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_computes_what_the_package_computes(name, dtype):
    """The weight is bitwise equal; output and gradient agree with its own layer."""
    theirs, ours = of_package(name, plain(dtype)), plain(dtype)
    binding = binding_of(BUILT_IN[name])
    binding.quantize(ours, ["0"], settings(name))
    expected = theirs[0].weight.dequantize()
    assert torch.equal(ours[0].dequantized(dtype), expected)
    assert binding.library == "torchao 0.18.0"
    found = []
    for model in (theirs, ours):
        x = torch.linspace(-1, 1, 3 * 256, dtype=dtype).view(3, 256).requires_grad_()
        y = model(x)
        y.float().square().sum().backward()
        found.append((y.detach(), x.grad))
    close = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found[0], found[1], rtol=close, atol=close)


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_counts_the_bytes_of_a_layer(name):
    found = binding_of(BUILT_IN[name]).round_trip(
        plain(torch.float32)[0].weight.data, settings(name)
    )
    bits = BUILT_IN[name].bits_per_weight(
        compute_bits=16, block=64, double_quant=False, rows_per_weight=1 / 256
    )
    assert found.stored_bytes * 8 == bits * 96 * 256


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_merged_into_the_weights_of_the_package(
    train_in, tiny_base, tmp_path, name, capsys
):
    """In float32, modules without an adapter equal torchao's values of the published weights."""
    told = (f"quant={name}", "lora.targets=[q_proj]", "trainer.max_steps=2", "optim.lr=1e-2")
    run = train_in(tmp_path / "run", *told)
    assert Manifest.read(run.manifest).data_contract["probe"]["reference"]["gradient"] < 1e-4
    out = tmp_path / "merged"
    words = [
        "task=merge",
        "parity.tokens=64",
        f"path={run.path}",
        f"out={out}",
        "merge.dtype=f32",
        "logger=none",
    ]
    assert cli.main(words) == 0, capsys.readouterr().err
    assert json.loads((out / "parity.json").read_text("utf-8"))["passed"]
    merged = load_file(out / "model.safetensors")
    published = load_file(tiny_base.directory / "model.safetensors")
    adapter = load_file(run.adapter / "adapter.safetensors")
    written = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    delta = (
        written["alpha"]
        / written["rank"]
        * (adapter["l0.q.lora_b"].float() @ adapter["l0.q.lora_a"].float())
    )
    assert delta.abs().max() > 1e-3
    for module, change in (("self_attn.q_proj", delta), ("mlp.down_proj", 0)):
        key = f"model.layers.0.{module}.weight"
        rounded = published[key].to(torch.bfloat16)
        layer = torch.nn.Linear(*rounded.shape[::-1], bias=False)
        layer.weight.data = rounded
        theirs = of_package(name, torch.nn.Sequential(layer))[0].weight.dequantize().float()
        torch.testing.assert_close(merged[key], theirs + change, rtol=1e-5, atol=1e-6)


def test_a_missing_package_is_named_before_a_run(tiny_config, monkeypatch):
    config = tiny_config("quant=torchao8")
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    (problem,) = machine.check_quantizers(config)
    assert problem.remedy == "pip install 'mens-exp[torchao]'"
