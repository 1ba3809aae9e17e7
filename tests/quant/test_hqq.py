"""HQQ in the codebook's layers, compared with the package's own dequantization."""

import pytest
import torch

from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.planning.checks import machine
from mens_exp.quant.binding import binding_of
from mens_exp.quant.codebook import CodebookLinear

Quantizer = pytest.importorskip("hqq.core.quantize", reason="needs mens-exp[hqq]").Quantizer
BITS = (2, 3, 4, 8)


def weight():
    generator = torch.Generator().manual_seed(0)
    found = torch.randn(96, 256, generator=generator) * 0.02
    found[3, ::50] = 0.4  # HQQ is designed for outliers
    return found


def of_package(bits, block):
    codes, found = Quantizer.quantize(
        weight(), nbits=bits, group_size=block, axis=1, device="cpu", compute_dtype=torch.float32
    )
    return Quantizer.dequantize(codes, found | {"compute_dtype": torch.float32})


def settings(bits, block):
    return QuantConfig(quant_type=QuantType[f"hqq{bits}"], double_quant=False, block_size=block)


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("bits", BITS)
def test_a_layer_has_the_values_that_the_package_dequantizes(bits, block):
    quant = settings(bits, block)
    binding = binding_of(quant.spec)
    model = torch.nn.Sequential(torch.nn.Linear(256, 96, bias=False))
    model[0].weight.data = weight()
    binding.quantize(model, ["0"], quant)
    assert isinstance(model[0], CodebookLinear)
    expected = of_package(bits, block)
    assert torch.equal(binding.dequantized(model[0]), expected)
    assert torch.equal(binding.round_trip(weight(), quant).values, expected)
    assert binding.library == "hqq 0.2.8.post1"


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_a_merge_are_those_of_the_layer(bits):
    binding = binding_of(settings(bits, 64).spec)
    record = {"block_size": 64, "double_quant": False}
    record |= {"rounded_to": "f32", "compute_dtype": "f32"}
    rows = binding.rows(lambda first, last: weight()[first:last], (96, 256), record)
    assert torch.equal(rows(0, 96), of_package(bits, 64))
    assert torch.equal(rows(10, 30), of_package(bits, 64)[10:30])


def test_outliers_cost_less_than_with_plain_rounding():
    """The measure is HQQ's own, the mean of small powers of the errors."""
    plain = binding_of(QuantType.uint2.spec).round_trip(weight(), settings(2, 64)).values
    errors = [(values - weight()).abs().pow(0.7).mean() for values in (of_package(2, 64), plain)]
    assert errors[0] < errors[1]


def test_a_missing_package_is_named_before_a_run(tiny_config, monkeypatch):
    config = tiny_config("quant=hqq4")
    assert list(machine.check_quantizers(config)) == []
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    (problem,) = machine.check_quantizers(config)
    assert problem.remedy == "pip install 'mens-exp[hqq]'"
