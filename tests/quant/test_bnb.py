from __future__ import annotations

import bitsandbytes
import pytest
import torch
from bitsandbytes.nn import Linear4bit

from mens_exp.config.quant import ComputeDtype, QuantConfig, QuantType, StorageDtype
from mens_exp.quant.binding import compute_dtype
from mens_exp.quant.bnb import quantization_config
from mens_exp.quant.layers import keep_trainable, quantized_linears

needs_the_repacking_kernel = pytest.mark.skipif(
    not getattr(bitsandbytes.functional, "has_avx512bf16", lambda: False)(),
    reason="needs a CPU with avx512_bf16 and a bitsandbytes that repacks weights for it (0.50)",
)


def two_layers(quant_type="nf4"):
    """Quantize two square layers with a fixed seed."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [
            Linear4bit(64, 64, bias=False, compute_dtype=torch.float32, quant_type=quant_type)
            for _ in range(2)
        ]
        return torch.nn.Sequential(*layers).to("cpu")


def input_gradient(model):
    """Return the gradient of a sum of squares by the input, or None without one."""
    x = torch.ones(3, 64, requires_grad=True)
    model.train()(x).square().sum().backward()
    return x.grad


def validate(model):
    with torch.no_grad():
        model.eval()(torch.ones(3, 64))


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("kind", [QuantType.nf4, QuantType.fp4])
def test_every_quant_setting_reaches_bitsandbytes(kind, double_quant):
    """Type, double quantization and compute dtype have the loader's own names."""
    config = quantization_config(
        QuantConfig(quant_type=kind, double_quant=double_quant, compute_dtype=ComputeDtype.f32)
    )
    assert config is not None
    assert config.load_in_4bit is True
    assert config.bnb_4bit_quant_type == kind.value
    assert config.bnb_4bit_use_double_quant is double_quant
    assert config.bnb_4bit_compute_dtype == torch.float32
    assert config.bnb_4bit_quant_storage == torch.uint8
    assert config.llm_int8_skip_modules is None


def test_no_quantization_is_no_configuration():
    """The loader then keeps the weights as they are."""
    assert quantization_config(QuantConfig(quant_type=QuantType.none, double_quant=False)) is None


def test_modules_left_out_do_not_bring_the_head_in():
    """A list replaces the loader's default, so the head is added to it."""
    config = quantization_config(QuantConfig(storage_dtype=StorageDtype.f32), ["model.layers.0"])
    assert config is not None
    assert config.llm_int8_skip_modules == ["model.layers.0", "lm_head"]
    assert config.bnb_4bit_quant_storage == torch.float32


@pytest.mark.parametrize(
    ("named", "expected"), [(ComputeDtype.bf16, torch.bfloat16), (ComputeDtype.f32, torch.float32)]
)
def test_compute_formats_have_torch_s_names(named, expected):
    """Every member of the enum has a torch dtype."""
    assert compute_dtype(QuantConfig(compute_dtype=named)) == expected
    assert len(ComputeDtype) == 2


def test_four_bit_modules_are_found_by_path():
    """Other linear layers are not included."""
    model = torch.nn.ModuleDict({"four": two_layers(), "plain": torch.nn.Linear(4, 4)})
    assert list(quantized_linears(model)) == ["four.0", "four.1"]


def test_gradients_are_the_same_after_a_validation_pass():
    """After train, validate, train the input's gradient is bitwise equal."""
    model = two_layers()
    keep_trainable(model)
    before = input_gradient(model)
    validate(model)
    after = input_gradient(model)
    assert before is not None
    assert after is not None
    assert torch.equal(before, after)


@needs_the_repacking_kernel
@pytest.mark.filterwarnings("ignore:bitsandbytes..gemv_4bit. an autograd kernel was not registered")
def test_without_the_guard_a_validation_pass_ends_learning():
    """Control: without the guard the gradient disappears without an error."""
    model = two_layers()
    assert input_gradient(model) is not None
    validate(model)
    assert input_gradient(model) is None


@pytest.mark.parametrize(("kind", "limit"), [("nf4", 0.10), ("fp4", 0.13)])
def test_four_bits_hold_a_normal_weight_to_a_tenth(kind, limit):
    """The relative error on normal weights is that of the QLoRA paper's types."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weight = torch.randn(64, 256)
    layer = Linear4bit(256, 64, bias=False, compute_dtype=torch.float32, quant_type=kind)
    layer.load_state_dict({"weight": weight})
    layer.to("cpu")
    seen = layer(torch.eye(256)).T
    error = float((seen - weight).norm() / weight.norm())
    assert 0.05 < error < limit
