"""GPU kernels for packed documents, compared with the float64 formula."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from mens_exp.model.fused_attention import Kernel, Request, attend, kernel_for, machine_of

CUDA = torch.device("cuda", 0)
BOUNDS = (0, 300, 301, 800, 1000)
DOCUMENTS = tuple(pairwise(BOUNDS))
TOKENS = 1024
HEADS, GROUPS, WIDTH = 8, 2, 64


def draw(dtype):
    seed = torch.Generator(CUDA).manual_seed(0)
    shapes = [(1, heads, TOKENS, WIDTH) for heads in (HEADS, GROUPS, GROUPS)]
    made = [torch.randn(one, generator=seed, device=CUDA).to(dtype) for one in shapes]
    return [one.requires_grad_() for one in made]


def by_formula(query, key, value, asked):
    """Attend with the full matrix of scores; `[1, T, H, K]`."""
    key, value = (one.repeat_interleave(HEADS // GROUPS, 1) for one in (key, value))
    place = torch.arange(TOKENS, device=CUDA)
    document = torch.bucketize(place, torch.tensor(BOUNDS[1:], device=CUDA), right=True)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    if asked.window is not None:
        seen &= place[:, None] - place < asked.window
    scores = query @ key.transpose(2, 3) * asked.scale
    if asked.softcap is not None:
        scores = asked.softcap * torch.tanh(scores / asked.softcap)
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    return (weights @ value).transpose(1, 2) * (place < BOUNDS[-1])[None, :, None, None]


@pytest.mark.parametrize("layer", [{}, {"window": 200}, {"softcap": 2.0}, {"scale": 0.3}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kernel", Kernel)
def test_a_kernel_of_this_machine_attends_by_the_formula(kernel, dtype, layer):
    """Values and gradients agree within the rounding of the dtype."""
    asked = Request(dtype=dtype, width=WIDTH, value_width=WIDTH, **{"scale": WIDTH**-0.5, **layer})
    there = machine_of(CUDA)
    plain = asked.window is None and asked.softcap is None
    if kernel is not kernel_for(asked, there) and not (kernel is Kernel.CAUSAL and plain):
        pytest.skip(f"{kernel} does not compute this layer here")
    parts = draw(dtype)
    exact = [one.detach().double().requires_grad_() for one in parts]
    found, expected = attend(kernel, *parts, DOCUMENTS, asked), by_formula(*exact, asked)
    upstream = torch.randn(expected.shape, device=CUDA, dtype=torch.float64)
    found.backward(upstream.to(dtype))
    expected.backward(upstream)
    bound = 2e-2 if dtype is torch.bfloat16 else 2e-3  # float32 products may use TF32
    pairs = [(found, expected), *((a.grad, b.grad) for a, b in zip(parts, exact, strict=True))]
    for ours, theirs in pairs:
        assert float((ours.double() - theirs).norm() / theirs.norm()) < bound
