from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from bitsandbytes.functional import (
    create_dynamic_map,
    dequantize_4bit,
    get_4bit_type,
    quantize_4bit,
)
from bitsandbytes.nn import Params4bit
from nf4_reference import (
    BLOCK_SIZES,
    FP4_LEVELS,
    NF4_LEVELS,
    dynamic_levels,
    quantize,
)

from mens_exp.config.fields import range_problems
from mens_exp.config.quant import QuantConfig
from mens_exp.config.rules import graph as rules
from mens_exp.quant.bnb import dequantized, quantized_like

ADMITTED = (64, 128, 256, 512, 1024, 2048, 4096)
LEVELS = {"nf4": NF4_LEVELS, "fp4": FP4_LEVELS}


def weights(*shape, seed=0):
    """Return weights of a trained layer's size whose rows have very different norms."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.logspace(-4, 0, shape[0])[:, None]
    return torch.randn(shape, generator=generator) * scale


@pytest.mark.parametrize("kind", LEVELS)
def test_levels_are_those_of_the_library(kind):
    """All 16 levels are bitwise equal, in the order of their codes."""
    theirs = get_4bit_type(kind, device="cpu")
    assert torch.equal(torch.tensor(LEVELS[kind], dtype=torch.float32), theirs)


def test_nf4_levels_by_hand():
    """By hand: eight quantiles above zero, seven below, zero, and both ends."""
    assert len(NF4_LEVELS) == 16
    assert sorted(NF4_LEVELS) == list(NF4_LEVELS)
    assert (NF4_LEVELS[0], NF4_LEVELS[7], NF4_LEVELS[15]) == (-1.0, 0.0, 1.0)


def test_dynamic_levels_are_those_of_the_library():
    """All 256 levels are bitwise equal."""
    assert torch.equal(dynamic_levels(), create_dynamic_map(signed=True))


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kind", LEVELS)
def test_codes_and_values_are_those_of_the_library(kind, block_size, double_quant):
    """Codes and magnitudes are bitwise equal, and values agree to 1e-6, for every block size."""
    weight = weights(96, 4096)
    packed, state = quantize_4bit(
        weight, blocksize=block_size, compress_statistics=double_quant, quant_type=kind
    )
    ours = quantize(weight, levels=LEVELS[kind], block_size=block_size, double_quant=double_quant)
    assert torch.equal(ours.packed(), packed.view(-1))
    assert torch.equal(ours.scales_K, state.absmax)
    if double_quant:
        assert ours.scale_scales_S is not None
        assert torch.equal(ours.scale_scales_S, state.state2.absmax)
        assert ours.offset is not None
        assert torch.equal(ours.offset, state.offset)
    theirs = dequantize_4bit(packed, state)
    assert (ours.dequantize() - theirs).abs().max() <= 1e-6


@pytest.mark.parametrize("double_quant", [False, True])
@pytest.mark.parametrize("block_size", ADMITTED)
@pytest.mark.parametrize("kind", LEVELS)
def test_a_loaded_weight_is_the_reference_s_at_every_admitted_block(kind, block_size, double_quant):
    """The published bf16 values, quantized and dequantized, agree to 1e-6."""
    published = weights(64, 4096).bfloat16()
    loaded = Params4bit(
        published, requires_grad=False, quant_type=kind, compress_statistics=double_quant
    ).to("cpu")
    made = quantized_like(loaded, published.float(), block_size=block_size)
    ours = quantize(
        published, levels=LEVELS[kind], block_size=block_size, double_quant=double_quant
    )
    assert (made.quant_state.blocksize, made.quant_state.nested) == (block_size, double_quant)
    assert torch.equal(ours.packed(), made.data.view(-1))
    rounded = ours.dequantize().bfloat16().float()  # the layer's weights have the loader's dtype
    assert (dequantized(made) - rounded).abs().max() <= 1e-6


def test_the_planner_admits_the_reference_s_blocks_but_one():
    """A block size of 32 is for other devices; schema and rule refuse it."""
    assert set(ADMITTED) == set(BLOCK_SIZES) - {32}
    for size in BLOCK_SIZES:
        config = QuantConfig(block_size=size)
        backend, task = SimpleNamespace(name="qlora"), SimpleNamespace(name="train")
        run = SimpleNamespace(quant=config, backend=backend, task=task)
        refused = [*rules.quant_problems(run), *range_problems(config)]
        assert (not refused) == (size in ADMITTED)


@pytest.mark.parametrize("kind", LEVELS)
@pytest.mark.parametrize(("double_quant", "bits"), [(False, 4.5), (True, 4.127)])
def test_bits_per_parameter_of_what_is_stored(kind, double_quant, bits):
    """By hand: 4 + 32/64, and 4 + 8/64 + 32/(64·256), for our tensors and the library's."""
    weight = weights(576, 1536)
    ours = quantize(weight, levels=LEVELS[kind], double_quant=double_quant)
    assert ours.bits_per_parameter() == pytest.approx(bits, abs=0.005)
    packed, state = quantize_4bit(weight, compress_statistics=double_quant, quant_type=kind)
    stored = [packed, state.absmax]
    if double_quant:
        stored += [state.state2.absmax, state.offset]
    size = sum(part.numel() * part.element_size() for part in stored)
    assert 8 * size / weight.numel() == pytest.approx(bits, abs=0.005)


def test_a_block_of_zeros_stays_zero():
    """There is no division by zero, and other blocks are not affected."""
    weight = torch.cat([torch.zeros(64), torch.linspace(-1, 1, 64)])
    values = quantize(weight).dequantize()
    assert torch.equal(values[:64], torch.zeros(64))
    assert (values[64:] - weight[64:]).abs().max() < 0.16


def test_a_last_block_that_is_not_full_is_quantized_by_itself():
    """100 weights are blocks of 64 and 36, as in the library."""
    weight = weights(1, 100)
    packed, state = quantize_4bit(weight, quant_type="nf4")
    ours = quantize(weight)
    assert torch.equal(ours.packed(), packed.view(-1))
    assert (ours.dequantize() - dequantize_4bit(packed, state)).abs().max() <= 1e-6


def test_levels_themselves_come_back():
    """A block of the levels times a magnitude is exact."""
    weight = torch.tensor(NF4_LEVELS * 4) * 0.25
    ours = quantize(weight)
    assert ours.codes_N[:16].tolist() == list(range(16))
    assert torch.equal(ours.dequantize(), weight)


def test_halfway_takes_the_lower_level():
    """A value halfway between -1 and the next level gets -1."""
    halfway = (torch.tensor(NF4_LEVELS[0]) + torch.tensor(NF4_LEVELS[1])) / 2
    weight = torch.cat([halfway[None], torch.ones(63)])
    assert quantize(weight).codes_N[0] == 0
    up = torch.nextafter(halfway, torch.tensor(1.0))
    assert quantize(torch.cat([up[None], torch.ones(63)])).codes_N[0] == 1


def test_without_the_cpu_kernels_grid_every_magnitude_takes_its_nearest_level():
    """By definition; the grid changes at most one code in 100, by one step each."""
    weight = weights(96, 4096)
    exact = quantize(weight, double_quant=True, scale_grid=None)
    offset, spread = exact.offset, exact.scale_scales_S
    assert offset is not None
    assert spread is not None
    values = (quantize(weight).scales_K - offset).view(-1, 256) / spread[:, None]
    nearest = (values[..., None] - dynamic_levels()).abs().argmin(-1).view(-1)
    away = (exact.scales_K.long() - nearest).abs()
    assert away.max() <= 1  # ties may round either way
    assert (away > 0).sum() <= 2
    moved = (quantize(weight, double_quant=True).scales_K.long() - exact.scales_K.long()).abs()
    assert 0 < (moved > 0).sum() <= 61
    assert moved[(values.abs() > 1e-3).view(-1)].max() <= 1
