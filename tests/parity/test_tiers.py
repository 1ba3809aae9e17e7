"""Parity by tier: A, shared f32 operations; B, one 4-bit round trip, then a linear layer.

Tier C, a 4-bit model against an f32 one, is a report and never a tolerance.
"""

from __future__ import annotations

import math

import bitsandbytes as bnb
import numpy as np
import pytest
import torch
from nf4_reference import FP4_LEVELS, NF4_LEVELS, quantize
from torch.nn import functional

from mens_exp.backends.proxy import Projection
from mens_exp.objective.causal import CrossEntropy
from mens_exp.quant.bnb import dequantized
from mens_exp.quant.round_trip import round_trip

ROWS, INPUTS, OUTPUTS, VOCABULARY = 7, 128, 64, 50


@pytest.fixture
def draw():
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(shape, generator=generator)


def relative(ours, theirs):
    expected = torch.as_tensor(np.asarray(theirs), dtype=torch.float64)
    return float((ours.detach().double() - expected).norm() / expected.norm())


def test_a_matmul(draw, tiny_config):
    """The product of torch, our projection and PEFT's layer without adapter match numpy to 1e-5."""
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import Linear

    x = draw(ROWS, INPUTS)
    config = tiny_config("backend=proxy", "quant.compute_dtype=f32")
    ours = Projection(draw(OUTPUTS, INPUTS), config, name="mid0", draws_as="l0.o").eval()
    ours.lora_b.data, ours.adapts = draw(OUTPUTS, config.lora.r), False
    plain = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    plain.weight.data = ours.weight_OI.clone()
    theirs = Linear(plain, "default", LoraConfig(r=4), r=4, lora_alpha=8)
    theirs.lora_B["default"].weight.data = draw(OUTPUTS, 4)
    theirs.enable_adapters(enabled=False)
    expected = x.double().numpy() @ ours.weight_OI.double().numpy().T
    assert relative(x @ ours.weight_OI.T, expected) <= 1e-5
    assert relative(ours(x), expected) <= 1e-5
    assert relative(theirs(x), expected) <= 1e-5


def test_a_biased_linear(draw):
    """The layer of torch and PEFT's LoRA layer at initialization match numpy to 1e-5."""
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import Linear

    layer = torch.nn.Linear(INPUTS, OUTPUTS)
    x = draw(ROWS, INPUTS)
    weight, bias = (p.detach().double().numpy() for p in (layer.weight, layer.bias))
    expected = x.double().numpy() @ weight.T + bias
    assert relative(layer(x), expected) <= 1e-5
    adapted = Linear(layer, "default", LoraConfig(r=4, lora_alpha=8), r=4, lora_alpha=8)
    assert relative(adapted(x), expected) <= 1e-5


def test_a_lora_linear(draw, tiny_config):
    """Our projection and PEFT's layer with the same matrices match the formula to 1e-4."""
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import Linear

    config = tiny_config("backend=proxy", "quant.compute_dtype=f32", "lora.alpha=24")
    ours = Projection(draw(OUTPUTS, INPUTS), config, name="mid0", draws_as="l0.o").eval()
    ours.lora_b.data = draw(OUTPUTS, 16)
    plain = torch.nn.Linear(INPUTS, OUTPUTS, bias=False)
    plain.weight.data = ours.weight_OI.clone()
    theirs = Linear(plain, "default", LoraConfig(r=16), r=16, lora_alpha=24).eval()
    theirs.lora_A["default"].weight.data = ours.lora_a.data.clone()
    theirs.lora_B["default"].weight.data = ours.lora_b.data.clone()
    x = draw(ROWS, INPUTS)
    weight, a, b = (t.detach().double().numpy() for t in (ours.weight_OI, ours.lora_a, ours.lora_b))
    expected = x.double().numpy() @ (weight + 24 / 16 * b @ a).T
    assert relative(ours(x), expected) <= 1e-4
    assert relative(theirs(x), expected) <= 1e-4


def test_a_cross_entropy(draw):
    """Our chunked sum, torch's loss and PEFT's head match the formula in float64 to 5e-5."""
    from peft.tuners.lora import LoraConfig
    from peft.tuners.lora.layer import Linear

    hidden, weight = draw(ROWS, INPUTS), draw(VOCABULARY, INPUTS)
    targets = torch.arange(ROWS) * 7
    logits = hidden.double() @ weight.double().T
    expected = sum(
        math.log(sum(math.exp(v - max(row)) for v in row)) + max(row) - row[target]
        for row, target in zip(logits.tolist(), targets.tolist(), strict=True)
    )
    loss = CrossEntropy("causal", 3)(hidden, targets, lambda h: functional.linear(h, weight))
    theirs = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert abs(float(loss.total) - expected) <= 5e-5 * expected
    assert abs(float(theirs) - expected) <= 5e-5 * expected
    plain = torch.nn.Linear(INPUTS, VOCABULARY, bias=False)
    plain.weight.data = weight
    head = Linear(plain, "default", LoraConfig(r=4), r=4, lora_alpha=8)
    through = CrossEntropy("causal", 3)(hidden, targets, head)
    assert abs(float(through.total.detach()) - expected) <= 5e-5 * expected


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_b_one_round_trip_then_linear(
    draw,
    tiny_config,
    kind,
    double_quant,
):
    """bitsandbytes, the reference, our round trip and the merged path agree to 1e-5."""
    weight, x = draw(OUTPUTS, INPUTS), draw(ROWS, INPUTS)
    levels = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS}[kind]
    reference = quantize(weight, levels=levels, double_quant=double_quant).dequantize()
    expected = x.double().numpy() @ reference.double().numpy().T

    config = tiny_config(f"quant={kind}", f"quant.double_quant={str(double_quant).lower()}")
    assert relative(functional.linear(x, round_trip(weight, config.quant).values), expected) <= 1e-5

    layer = bnb.nn.Linear4bit(
        INPUTS, OUTPUTS, bias=False, compute_dtype=torch.float32, quant_type=kind,
        compress_statistics=double_quant,
    )  # fmt: skip
    layer.weight = bnb.nn.Params4bit(
        weight, requires_grad=False, quant_type=kind, compress_statistics=double_quant
    )
    layer = layer.to("cpu")
    layer.support_avx512bf16_for_cpu = False
    assert relative(layer(x), expected) <= 1e-5

    # Merged: the delta is added to the dequantized weight, which gives one float32 weight.
    a, b = draw(8, INPUTS), draw(OUTPUTS, 8)
    merged = dequantized(layer.weight) + 2.0 * (b @ a)
    whole = x.double().numpy() @ (reference + 2.0 * (b @ a)).double().numpy().T
    assert relative(functional.linear(x, merged), whole) <= 1e-5
