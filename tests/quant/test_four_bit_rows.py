"""Quantizing a 4-bit weight by rows, compared with bitsandbytes on the whole weight."""

from __future__ import annotations

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit

from mens_exp.errors import RequestError
from mens_exp.quant import codebook, round_trip
from mens_exp.quant.binding import DTYPES
from mens_exp.quant.round_trip import quantized_rows


def quantizer(**changes):
    usual = {
        "quant_type": "nf4",
        "block_size": 64,
        "double_quant": True,
        "compute_dtype": "f32",
        "rounded_to": "f32",
        "skip": [],
        "library": "here",
    }
    return {**usual, **changes}


@pytest.mark.parametrize("double_quant", [True, False])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("rounded_to", ["f32", "bf16"])
@pytest.mark.parametrize("block", [64, 256])
def test_rows_are_those_of_the_whole_weight(
    double_quant,
    quant_type,
    rounded_to,
    block,
    monkeypatch,
):
    """Quantized three rows at a time and dequantized five at a time, values are bitwise equal."""
    monkeypatch.setattr(round_trip, "_PIECE", 3 * 512)
    weight_OI = torch.randn(70, 512, generator=torch.Generator().manual_seed(0))
    dtype = DTYPES[rounded_to]
    codes, state = quantize_4bit(
        weight_OI.to(dtype),
        blocksize=block,
        compress_statistics=double_quant,
        quant_type=quant_type,
    )
    theirs = dequantize_4bit(codes, state).float()
    how = quantizer(
        double_quant=double_quant, quant_type=quant_type, rounded_to=rounded_to, block_size=block
    )
    read = quantized_rows(lambda a, b: weight_OI[a:b], (70, 512), how, where="w")
    pieces = [read(first, min(first + 5, 70)) for first in range(0, 70, 5)]
    assert torch.equal(torch.cat(pieces), theirs)


@pytest.mark.parametrize("rounded_to", ["f32", "bf16"])
@pytest.mark.parametrize(("quant_type", "block"), [("nf3", 64), ("nvfp4", 16), ("mxfp4", 32)])
def test_rows_of_a_codebook_are_those_of_the_whole_weight(
    quant_type, block, rounded_to, monkeypatch
):
    """NVFP4 has one scale per tensor, whose largest weight may be in another chunk."""
    monkeypatch.setattr(codebook, "_PIECE", 3 * 512)
    weight_OI = torch.randn(70, 512, generator=torch.Generator().manual_seed(0))
    weight_OI[66, 1] = 9
    book = getattr(codebook, quant_type.upper()).book
    theirs = book.dequantize(*book.quantize(weight_OI.to(DTYPES[rounded_to]), block))
    how = quantizer(
        double_quant=False, quant_type=quant_type, rounded_to=rounded_to, block_size=block
    )
    read = quantized_rows(lambda a, b: weight_OI[a:b], (70, 512), how, where="w")
    pieces = [read(first, min(first + 5, 70)) for first in range(0, 70, 5)]
    assert torch.equal(torch.cat(pieces), theirs)


def test_values_are_rounded_as_they_are_computed():
    """The proxy quantizes float32 weights and computes with their values in bf16."""
    weight_OI = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))

    def rows(dtype):
        how = quantizer(compute_dtype=dtype)
        return quantized_rows(lambda a, b: weight_OI[a:b], (4, 64), how, where="w")(0, 4)

    assert torch.equal(rows("bf16"), rows("f32").bfloat16().float())
    assert not torch.equal(rows("bf16"), rows("f32"))


def test_blocks_that_run_over_rows_are_refused():
    """The library's values are silently wrong there."""
    with pytest.raises(RequestError, match=r"w: the width is not a multiple.*found 96.*of 64"):
        quantized_rows(lambda a, b: torch.zeros(b - a, 96), (2, 96), quantizer(), where="w")
