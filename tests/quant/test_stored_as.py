from __future__ import annotations

import math

import pytest
import torch

from mens_exp.backends.frozen_base import load_base
from mens_exp.config.quant import ComputeDtype, QuantConfig, QuantType
from mens_exp.layout.shape import shape_of
from mens_exp.model.sources import resolve
from mens_exp.model.stored_weights import StoredWeights
from mens_exp.quant.layers import quantized_linears, values_of
from mens_exp.quant.round_trip import activation_error, sqnr_db, stored_as, variants_of


def test_sqnr_is_the_ratio_of_energies_in_decibels():
    """By hand: ‖(3, 4)‖² = 25 over ‖(0, 0.5)‖² = 0.25 is 100, or 20 dB."""
    assert sqnr_db(torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.5]])) == pytest.approx(20)


def test_sqnr_of_what_lost_nothing_is_unknown():
    """For an exact copy, or weights of zero, the ratio is not finite."""
    weight = torch.tensor([[3.0, 4.0]])
    assert sqnr_db(weight, weight) is None
    assert sqnr_db(torch.zeros(1, 2), torch.ones(1, 2)) is None


def test_activation_error_weighs_a_loss_by_what_is_read():
    """By hand: W = (3, 4), Ŵ = (3, 3), and inputs that never use the second weight lose nothing."""
    weight, stored = torch.tensor([[3.0, 4.0]]), torch.tensor([[3.0, 3.0]])
    first, second = torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 2.0]])
    assert activation_error(weight, stored, [first]) == 0
    assert activation_error(weight, stored, [second]) == pytest.approx(4 / 64)
    assert activation_error(weight, stored, [first, second]) == pytest.approx(4 / (36 + 64))


def test_activation_error_without_an_output_is_unknown():
    """An output of zeros cannot be divided by."""
    assert activation_error(torch.ones(1, 2), torch.zeros(1, 2), [torch.zeros(3, 2)]) is None


@pytest.mark.parametrize(
    ("quant", "names"),
    [
        (QuantConfig(), ["nf4_double", "nf4", "fp4_double"]),
        (QuantConfig(double_quant=False), ["nf4", "nf4_double", "fp4"]),
        (QuantConfig(quant_type=QuantType.fp4), ["fp4_double", "fp4", "nf4_double"]),
        (QuantConfig(quant_type=QuantType.nf3, double_quant=False), ["nf3", "nf4_double"]),
    ],
)
def test_variants_change_one_thing_each(quant, names):
    """The order is the configured variant, the other double_quant, the other type."""
    assert [one.name for one in variants_of(quant)] == names
    assert variants_of(quant)[0].quant == quant


def test_a_weight_of_exact_levels_loses_nothing():
    """NF4 has 0, 1 and -1 exactly."""
    weight = torch.tensor([0.0, 1.0, -1.0, 1.0]).repeat(64).view(4, 64)
    made = stored_as(weight, QuantConfig(double_quant=False))
    assert torch.equal(made.values, weight)
    assert 8 * made.stored_bytes / weight.numel() == 4.5


@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2"])
@pytest.mark.parametrize("compute", ["bf16", "f32"])
@pytest.mark.parametrize("quant", [(), ("quant.double_quant=false",), ("quant=nf3",)])
def test_stored_weight_is_that_of_the_loaded_model(tiny_config, cache, model, compute, quant):
    """Values equal what each quantized layer dequantizes to in the compute dtype, bit for bit."""
    config = tiny_config(f"model={model}", f"quant.compute_dtype={compute}", *quant)
    base, dtype = (
        resolve(config.model, cache),
        getattr(torch, {"f32": "float32"}.get(compute, "bfloat16")),
    )
    loaded = load_base(config, base, torch.device("cpu"))
    weights = StoredWeights(base.directory, shape_of(config.model).family)
    layers = quantized_linears(loaded)
    assert layers
    for path, layer in layers.items():
        made = stored_as(weights.read(path, torch.device("cpu")), config.quant)
        assert torch.equal(made.values, values_of(layer).to(dtype).float()), path


def test_double_quantization_costs_decibels():
    """On random weights SQNR falls by less than 0.1 dB."""
    weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    found = []
    for variant in variants_of(QuantConfig(compute_dtype=ComputeDtype.f32)):
        db = sqnr_db(weight, stored_as(weight, variant.quant).values)
        assert db is not None
        found.append(db)
    double, plain, fp4 = found
    assert 0 < plain - double < 0.1
    assert plain > fp4
    assert math.isclose(plain, 20.7, abs_tol=0.3)  # NF4 on normal weights in blocks of 64
