"""Products in FP8 on a GPU, against those on a CPU."""

from __future__ import annotations

import pytest
import torch

from mens_exp.model.kernels import fp8_product


@pytest.mark.parametrize("tokens", [1, 17, 4096])
def test_a_product_is_that_of_a_cpu(tokens):
    """With any number of tokens, to the rounding of the result."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    generator = torch.Generator().manual_seed(0)
    x_MI = torch.randn(tokens, 512, generator=generator).bfloat16()
    weight_OI = torch.randn(256, 512, generator=generator).bfloat16()
    expected = fp8_product(x_MI, weight_OI).float()
    found = fp8_product(x_MI.cuda(), weight_OI.cuda()).float().cpu()
    assert float((found - expected).norm() / expected.norm()) < 5e-3
