"""Products with frozen weights in FP8, against rounding from the definition of the format."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from live_adapters import training_pass
from torch.utils._python_dispatch import TorchDispatchMode

from mens_exp.config.overrides import check
from mens_exp.data.batch import packed_batch
from mens_exp.model.kernels import add_gradient, fp8_product, linear
from mens_exp.planning.checks.machine import check_fp8
from mens_exp.planning.machine import Machine
from mens_exp.quant.layers import quantized_linears

# A bf16 result has 8 bits; sums in f32 add less.
ROUNDED = 2.0**-8


def e4m3(rows):
    """Round f64 rows to E4M3 (OFP8: 3 mantissa bits, bias 7, largest 448), with a scale each."""
    scale = np.abs(rows).max(1, keepdims=True) / 448
    scale[scale == 0] = 1
    scaled = rows / scale
    exponent = np.floor(np.log2(np.maximum(np.abs(scaled), 2.0**-6)))
    step = 2.0 ** (exponent - 3)
    return np.round(scaled / step) * step * scale  # halves to even, as in IEEE 754


def drawn(*shape, seed=0):
    values = (
        np.random.default_rng(seed).standard_normal(shape)
        * 10 ** np.linspace(-2, 2, shape[0])[:, None]
    )
    return torch.from_numpy(values).bfloat16()


def test_a_product_is_that_of_rounded_rows():
    """Rows of very different size keep their precision; one of zeros stays zero."""
    x_MI, weight_OI = drawn(40, 64), drawn(96, 64, seed=1)
    x_MI[3] = 0
    expected = e4m3(x_MI.double().numpy()) @ e4m3(weight_OI.double().numpy()).T
    found = fp8_product(x_MI, weight_OI).double().numpy()
    bound = np.abs(x_MI.double().numpy()) @ np.abs(weight_OI.double().numpy()).T
    assert (np.abs(found - expected) <= ROUNDED * bound + 1e-30).all()
    assert (found[3] == 0).all()
    exact = x_MI.double() @ weight_OI.double().T
    error = float((torch.from_numpy(found) - exact).norm() / exact.norm())
    assert 0.01 < error < 0.06  # each operand has 4 significant bits


def test_operands_are_multiplied_in_the_only_layout_of_a_gpu():
    """Rows of both operands are contiguous, whatever views they are of; Conv1D's are transposed."""
    x_MI, weight_IO = drawn(40, 64)[::2], drawn(64, 96, seed=1)
    with Counted() as counted:
        found = fp8_product(x_MI, weight_IO.t())
    ((first, second),) = counted.operands
    assert first.is_contiguous()
    assert second.t().is_contiguous()
    assert torch.equal(found, fp8_product(x_MI.contiguous(), weight_IO.t().contiguous()))


def test_a_linear_layer_and_its_gradient_use_it():
    """The gradient of the input sums over outputs, so its scales are per input of the weight."""
    x_MI, weight_OI, g_MO = drawn(40, 64), drawn(96, 64, seed=1), drawn(40, 96, seed=2)
    bias_O = torch.randn(96).bfloat16()
    plain = fp8_product(x_MI, weight_OI)
    assert torch.equal(linear(x_MI, weight_OI, bias_O, in_fp8=True), plain + bias_O)
    expected = e4m3(g_MO.double().numpy()) @ e4m3(weight_OI.T.double().numpy()).T
    found = add_gradient(torch.zeros_like(x_MI), g_MO, weight_OI, in_fp8=True)
    bound = np.abs(g_MO.double().numpy()) @ np.abs(weight_OI.double().numpy())
    assert (np.abs(found.double().numpy() - expected) <= ROUNDED * bound).all()


@pytest.mark.parametrize("shape", [(96, 56), (90, 64)])
def test_shapes_that_the_format_has_no_product_for_stay_in_bf16(shape):
    """Widths that are no multiple of 16."""
    x_MI, weight_OI = drawn(40, shape[1]), drawn(*shape, seed=1)
    plain = linear(x_MI, weight_OI, None)
    assert torch.equal(linear(x_MI, weight_OI, None, in_fp8=True), plain)


class Counted(TorchDispatchMode):
    """Counts products in FP8."""

    def __init__(self):
        super().__init__()
        self.products, self.operands = Counter(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.products[name] += 1
        if name == "_scaled_mm":
            self.operands.append(args[:2])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def batch(random_documents):
    """Return a packed micro-batch of three documents."""
    return packed_batch(random_documents((40, 30, 58), (39, 29, 57)), [[0, 1, 2]], index=0)


@pytest.mark.parametrize("lora", ["lora=all_linear", "lora=qv", "lora=lm_head"])
def test_training_multiplies_by_every_frozen_weight_in_fp8(tiny_backend, batch, lora):
    """Forward and backward, with an adapter or without; validation does not."""
    ours, theirs = (tiny_backend(lora, f"model.fp8={on}", live=True) for on in ("true", "false"))
    with Counted() as counted:
        loss, found = training_pass(ours, batch)
    layers = quantized_linears(ours.causal_lm)
    # No gradient passes below the first adapter, which the inputs of q, k and v of layer 0 are.
    below = sum(name.startswith("model.layers.0.self_attn") for name in layers) - 1
    below = len(layers) if lora == "lora=lm_head" else below
    assert counted.products["_scaled_mm"] == 2 * len(layers) - below
    expected, others = training_pass(theirs, batch)
    gradient, known = (
        torch.cat([one.flatten() for one in each.values()]) for each in (found, others)
    )
    assert loss == pytest.approx(expected, rel=0.02)
    assert loss != expected
    assert float((gradient - known).norm() / known.norm()) < 0.2
    ours.eval()
    theirs.eval()
    with torch.no_grad():
        assert torch.equal(ours(batch), theirs(batch))
    assert ours.facts()["numerics"]["products"] == "frozen weights in FP8, a scale per row 1"


REFUSED = {
    "quant=int8": "quant.quant_type",
    "quant.compute_dtype=f32": "quant.compute_dtype",
    "backend=full quant=none": "backend",
    "lora.variant=dora": "lora.variant",
    "objective=dpo": "objective",
    "objective=kto": "objective",
    "objective=grpo": "objective",
    "schedule=lr_range": "schedule",
}


@pytest.mark.parametrize("overrides", REFUSED)
def test_what_cannot_be_in_fp8_is_refused(overrides):
    """By the name of the setting."""
    given = ["model=tiny_llama", "trainer=gpu", "model.fp8=true"]
    assert REFUSED[overrides] in [one.where for one in check([*given, *overrides.split()]).problems]
    assert check(given).problems == ()
    assert check([*given, "backend=lora", "quant=none"]).problems == ()


@pytest.mark.parametrize(
    ("kind", "capability", "works"),
    [("cpu", None, False), ("cuda", "8.6", False), ("cuda", "8.9", True), ("cuda", "10.0", True)],
)
def test_a_device_without_fp8_is_refused(tiny_config, monkeypatch, kind, capability, works):
    """Ampere's compute capability is 8.6, and Ada's 8.9."""
    device = Machine(kind=kind, name="D", total_bytes=1, free_bytes=1, capability=capability)
    monkeypatch.setattr("mens_exp.planning.checks.machine.device_of_plan", lambda _: device)
    found = [*check_fp8(tiny_config("model.fp8=true"))]
    assert [one.where for one in found] == ([] if works else ["model.fp8"])
    assert [*check_fp8(tiny_config())] == []
