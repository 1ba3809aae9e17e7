"""Codebooks, compared with bitsandbytes, torchao's MXFP4 and NVFP4, and scipy's quantiles."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy.stats import norm

from mens_exp.config.quant import BUILT_IN, ComputeDtype, QuantConfig, QuantType
from mens_exp.quant import codebook
from mens_exp.quant.codebook import Codebook, CodebookLinear, integers, normal_float
from mens_exp.quant.layers import quantizer_named

BINDINGS = {
    one.name: one
    for one in vars(codebook).values()
    if isinstance(one, codebook.CodesBinding)  # the types in the settings
}


def draw(outputs=48, inputs=128):
    seed = torch.Generator().manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=seed)
    weight[0] = 0
    weight[1, 3] = 40  # the top of its block
    return weight


@pytest.mark.parametrize("block", [64, 128])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_codes_are_those_of_bitsandbytes(name, block):
    """Codes are bitwise equal, given bitsandbytes' levels and rounding of ties."""
    from bitsandbytes.functional import dequantize_4bit, get_4bit_type, quantize_4bit

    weight = draw()
    codes, state = quantize_4bit(weight, blocksize=block, quant_type=name)
    levels = get_4bit_type(name, device="cpu").tolist()
    order = sorted(range(16), key=levels.__getitem__)
    if name == "fp4":  # zero has two codes
        order.remove(8)
    book = Codebook(levels=tuple(levels[one] for one in order), to_even=False)
    packed, scales = book.quantize(weight, block)
    theirs = torch.tensor(order)[book.unpacked(packed).long()]
    expected = torch.stack([codes.flatten() >> 4, codes.flatten() & 15], -1).view(weight.shape)
    expected[expected == 8] = 8 if name == "nf4" else 0
    assert torch.equal(theirs, expected.long())
    assert torch.equal(book.dequantize(packed, scales), dequantize_4bit(codes, state))


def levels_of_bitsandbytes(name):
    from bitsandbytes.functional import get_4bit_type

    return sorted({0.0 if one == 0 else one for one in get_4bit_type(name, device="cpu").tolist()})


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize(("name", "block"), [("nf4", 64), ("nf4", 128), ("fp4", 64)])
def test_given_levels_are_stored_as_bitsandbytes_stores_them(name, block, double_quant):
    """With bitsandbytes' levels, values are bitwise equal; so is the reader of rows of a merge."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight = torch.cat([draw(300, 512), draw()[:, :64].repeat(1, 8)])
    stored = quantize_4bit(
        weight, blocksize=block, quant_type=name, compress_statistics=double_quant
    )
    expected = dequantize_4bit(*stored)
    quant = QuantConfig(
        quant_type=QuantType.codebook,
        levels=levels_of_bitsandbytes(name),
        double_quant=double_quant,
        block_size=block,
    )
    found = codebook.LEVELS.round_trip(weight, quant)
    assert torch.equal(found.values, expected)
    bits = quant.spec.bits_per_weight(
        compute_bits=16, block=block, double_quant=double_quant, rows_per_weight=0
    )
    assert found.stored_bytes == pytest.approx(bits * weight.numel() / 8, rel=1e-3)
    record = quantizer_named(quant, rounded_to=ComputeDtype.f32, skip=[])
    record["compute_dtype"] = "f32"
    rows = codebook.LEVELS.rows(lambda first, last: weight[first:last], weight.shape, record)
    assert torch.equal(rows(5, 77), expected[5:77])


@pytest.mark.parametrize(
    "levels",
    [
        pytest.param([-1.0, 1.0], id="binary"),
        pytest.param([-2.0, 0.5, 1.0], id="largest below zero"),
        pytest.param([0.25, 1.0], id="above zero alone"),
        pytest.param(np.linspace(-7, 9, 200).tolist(), id="200 levels"),
    ],
)
def test_any_levels_are_stored(levels):
    """The oracle tries all levels, in f64; the largest magnitude of a block meets that of a level.

    A block of zeros stays zero, even without a level for it.
    """
    weight = draw()
    quant = QuantConfig(
        quant_type=QuantType.codebook, levels=levels, double_quant=False, block_size=64
    )
    found = codebook.LEVELS.round_trip(weight, quant)
    known = np.array(levels)
    blocks = weight.double().numpy().reshape(48, -1, 64)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.abs(known).max()
    errors = np.abs(blocks[..., None] - scale[..., None] * known)
    expected = np.take_along_axis(scale * known, errors.argmin(-1), -1)
    near = np.sort(errors, -1)
    clear = near[..., 1] - near[..., 0] > 1e-6  # ties may round to either level
    difference = np.abs(found.values.numpy().reshape(blocks.shape) - expected)
    assert difference[clear].max() < 1e-5
    assert clear.mean() > 0.9
    assert not found.values[0].any()
    bits = quant.spec.bits_per_weight(
        compute_bits=16, block=64, double_quant=False, rows_per_weight=0
    )
    assert found.stored_bytes == bits * weight.numel() / 8


def test_double_quantization_of_scales_is_kept_in_the_layer():
    """The layer stores 8-bit codes of scales, computes with them, and says so."""
    model = torch.nn.ModuleDict({"it": torch.nn.Linear(512, 96, bias=False)})
    weight = model["it"].weight.data.clone()
    quant = QuantConfig(quant_type=QuantType.int4, double_quant=True)
    BINDINGS["int4"].quantize(model, ["it"], quant)
    layer = model["it"].to(torch.bfloat16)
    expected = BINDINGS["int4"].round_trip(weight, quant).values
    plain = BINDINGS["int4"].round_trip(weight, replace(quant, double_quant=False)).values
    assert torch.equal(layer.dequantized(), expected)
    assert 0 < (expected - plain).norm() / plain.norm() < 0.01
    assert layer.scale_codes.dtype == torch.uint8
    assert (layer.scale_codes.shape, layer.scale_bytes.nbytes) == ((96, 8), 4 * (3 + 1))
    assert BINDINGS["int4"].facts(layer)["double_quant"]


def test_four_bits_of_normal_float_are_those_of_the_library():
    """The formula gives bitsandbytes' constants."""
    from bitsandbytes.functional import get_4bit_type

    theirs = get_4bit_type("nf4", device="cpu")
    torch.testing.assert_close(torch.tensor(normal_float(4)), theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
def test_normal_float_spaces_levels_evenly_in_probability(bits):
    """Probabilities are even on both sides of zero; the upper side has one level more."""
    levels = np.array(normal_float(bits))
    assert len(levels) == 2**bits
    assert (levels[0], levels[-1]) == (-1, 1)
    outermost = 1 - (1 / (2 * (2**bits - 1)) + 1 / (2 * 2**bits)) / 2
    shares = norm.cdf(levels * norm.ppf(outermost))
    zero = 2 ** (bits - 1) - 1
    assert levels[zero] == 0
    for side in (shares[: zero + 1], shares[zero:]):
        np.testing.assert_allclose(np.diff(side), np.diff(side)[0], rtol=1e-6)


@pytest.mark.parametrize(("name", "block"), [("mxfp4", 32), ("nvfp4", 16)])
def test_values_are_those_of_torchao(name, block):
    """Weights have many magnitudes, zero blocks and ties; the file's metadata names packages."""
    known = load_file(Path(__file__).with_name("torchao_0_18.safetensors"))
    book = BINDINGS[name].book
    assert torch.equal(book.dequantize(*book.quantize(known["x"], block)), known[name])


@pytest.mark.parametrize("name", ["uint2", "uint3", "uint4", "uint8"])
def test_integers_with_a_zero_point_are_those_of_torchao(name):
    """Weights have both signs or one; the file's metadata names the packages."""
    known = load_file(Path(__file__).with_name("torchao_0_18_affine.safetensors"))
    book = BINDINGS[name].book
    assert torch.equal(book.dequantize(*book.quantize(known["x"], 32)), known[name])


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_integers_are_rounded_to_the_nearest(bits):
    """The oracle is numpy's rounding, with the largest magnitude at the largest integer."""
    weight = draw()
    most = 2 ** (bits - 1) - 1
    blocks = weight.numpy().reshape(48, -1, 64)
    step = np.abs(blocks).max(-1, keepdims=True) / np.float32(most)
    with np.errstate(invalid="ignore"):
        expected = np.nan_to_num(np.round(blocks / step)) * step
    book = Codebook(levels=integers(bits))
    found = book.dequantize(*book.quantize(weight, 64)).numpy()
    np.testing.assert_allclose(found, expected.reshape(48, 128), atol=2e-6)


@pytest.mark.parametrize("name", BINDINGS)
def test_a_code_is_the_nearest_level(name, monkeypatch):
    """The oracle tries all levels; quantizing in pieces gives the same codes."""
    book, weight = BINDINGS[name].book, draw()
    packed, scales = book.quantize(weight, 16)
    found = book.dequantize(packed, scales)
    levels = torch.tensor(book.levels)
    scale, zero = (scales, 0 * scales) if scales.ndim == 2 else scales.unbind(-1)
    scale = torch.where(scale == 0, 1, scale)  # zero blocks
    scaled = weight.reshape(48, -1, 16) / scale[..., None]
    nearest = (scaled[..., None] - (levels - zero[..., None, None])).abs().amin(-1)
    distance = (found.reshape(48, -1, 16) / scale[..., None] - scaled).abs()
    f32 = max(1e-5, 1e-7 * len(levels))
    torch.testing.assert_close(distance, nearest, atol=f32, rtol=1e-5)
    assert packed.shape == (48, 128 * book.stored_bits // 8)
    monkeypatch.setattr(codebook, "_PIECE", 5 * 128)
    assert all(map(torch.equal, book.quantize(weight, 16), (packed, scales)))
    assert torch.equal(book.dequantize(packed, scales), found)


@pytest.mark.parametrize("bits", range(2, 9))
def test_codes_are_one_stream_of_bits(bits):
    """Python's own integers give the same bytes, from the first code's highest bit to the end."""
    book = Codebook(levels=tuple(map(float, range(2**bits))))
    codes = torch.randint(2**bits, (3, 40), generator=torch.Generator().manual_seed(0))
    packed = book.packed(codes.to(torch.uint8))
    for row, found in zip(codes.tolist(), packed.tolist(), strict=True):
        number = functools.reduce(lambda stream, code: stream << bits | code, row, 0)
        assert bytes(found) == number.to_bytes(40 * bits // 8, "big")
    assert torch.equal(book.unpacked(packed).long(), codes)
    assert torch.equal(book.dequantize(packed, torch.ones(3, 5)).long(), codes)


@pytest.mark.parametrize("name", BINDINGS)
def test_a_plan_counts_the_bits_that_are_stored(name):
    """The table of quantizers is independent of the codebooks."""
    assert BUILT_IN[name].code_bits == BINDINGS[name].book.stored_bits


def layer_of(name, *, bias=True, dtype=torch.float32):
    layer = torch.nn.Linear(128, 48, bias=bias, dtype=dtype)
    layer.weight.data = draw().to(dtype)
    model = torch.nn.ModuleDict({"it": layer})
    quant = QuantConfig(quant_type=QuantType(name), double_quant=False, block_size=16)
    BINDINGS[name].quantize(model, ["it"], quant)
    return model["it"]


@pytest.mark.parametrize("name", BINDINGS)
def test_a_layer_multiplies_with_what_its_codes_stand_for(name):
    """Output and input gradient agree, and no parameter is trained."""
    layer = layer_of(name)
    assert isinstance(layer, CodebookLinear)
    x = torch.randn(5, 128, requires_grad=True)
    upstream = torch.randn(5, 48)
    output = layer(x)
    output.backward(upstream)
    values = BINDINGS[name].dequantized(layer)
    torch.testing.assert_close(output, x @ values.T + layer.bias)
    torch.testing.assert_close(x.grad, upstream @ values)
    assert not layer.weight.requires_grad


def test_another_dtype_of_the_model_leaves_codes_and_scales():
    """Rounding a scale to bf16 would change every weight of its block."""
    layer = layer_of("nf3", bias=False)
    before = layer.dequantized()
    assert torch.equal(layer.to(torch.bfloat16).dequantized(), before)
    assert layer(torch.ones(1, 128, dtype=torch.bfloat16)).dtype == torch.bfloat16
