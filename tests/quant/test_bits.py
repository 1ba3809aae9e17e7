from __future__ import annotations

import pytest
import torch
from bitsandbytes import functional

from mens_exp.config.quant import QuantConfig
from mens_exp.planning.memory import bits_per_weight


@pytest.mark.parametrize("double_quant", [False, True])
def test_bits_of_a_weight_are_those_that_bitsandbytes_keeps(double_quant):
    """Packed weights and all scales of a large matrix are counted to the byte."""
    weight = torch.randn(1024, 2048)
    packed, state = functional.quantize_4bit(
        weight, quant_type="nf4", compress_statistics=double_quant
    )
    kept = [packed, state.absmax]
    if double_quant:
        kept.append(state.state2.absmax)
    bits = 8 * sum(one.numel() * one.element_size() for one in kept) / weight.numel()
    assert bits == pytest.approx(bits_per_weight(QuantConfig(double_quant=double_quant)), abs=1e-9)
