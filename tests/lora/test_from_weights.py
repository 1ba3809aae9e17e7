"""PiSSA and LoftQ on single matrices, compared with the exact decomposition."""

from __future__ import annotations

import pytest
import torch

from mens_exp.config.lora import LoraConfig
from mens_exp.lora.method import LOFTQ, PISSA, Site, delta, low_rank, stacked


def matrix(out=96, width=64, seed=0):
    return torch.randn(out, width, generator=torch.Generator().manual_seed(seed))


def coarse(values):
    """A quantizer with few levels, in place of NF4."""
    step = values.abs().max() / 4
    return (values / step).round() * step


def pissa(weight, **where):
    lora = LoraConfig(name="all_linear", targets=["all_linear"])
    return PISSA.start(Site(weight_OI=weight, rounded=coarse, **where), lora)


def loftq(weight, rounded, *, iters, **where):
    lora = LoraConfig(name="all_linear", targets=["all_linear"], loftq_iters=iters)
    return LOFTQ.start(Site(weight_OI=weight, rounded=rounded, **where), lora)


def best(values, r):
    """Return the best approximation of this rank by torch's SVD (Eckart and Young)."""
    left, spectrum, right = torch.linalg.svd(values.double(), full_matrices=False)
    return ((left[:, :r] * spectrum[:r]) @ right[:r]).float()


@pytest.mark.parametrize(("out", "width"), [(96, 64), (64, 96), (300, 200)])
@pytest.mark.parametrize("scale", [1.0, 0.25, 4.0])
def test_the_pair_is_the_nearest_of_its_rank(out, width, scale):
    """Its error is within 0.1 % of the exact one, also if the sketch is partial."""
    values = matrix(out, width)
    found = delta(low_rank(values, r=8, scale=scale, layer="l0.q"), scale)
    exact = (values - best(values, 8)).norm()
    assert exact <= (values - found).norm() * (1 + 1e-6)
    assert (values - found).norm() <= exact * 1.001


def test_a_matrix_of_the_rank_is_met_exactly():
    """A matrix of three directions is reproduced by rank three."""
    values = matrix(96, 3) @ matrix(3, 64, seed=1)
    found = delta(low_rank(values, r=3, scale=2.0, layer="l0.q"), 2.0)
    assert torch.allclose(found, values, atol=1e-4)


def test_the_spectrum_is_split_evenly():
    """A Aᵀ and Bᵀ B are the same diagonal: singular values over the scale."""
    A, B = low_rank(matrix(), r=4, scale=0.5, layer="l0.q")
    spectrum = torch.linalg.svdvals(matrix())[:4] / 0.5
    assert torch.allclose(A @ A.T, torch.diag(spectrum), atol=1e-3)
    assert torch.allclose(B.T @ B, torch.diag(spectrum), atol=1e-3)


def test_equal_inputs_give_equal_bits_and_leave_the_global_generator_alone():
    """The random sketch has its own generator."""
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = low_rank(matrix(300, 200), r=4, scale=1.0, layer="l0.q")
    assert torch.equal(torch.rand(3), expected)
    again = low_rank(matrix(300, 200), r=4, scale=1.0, layer="l0.q")
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_a_rank_beyond_the_matrix_is_filled_up_with_nothing():
    """The product equals the matrix, and the rest of the pair is zero."""
    values = matrix(6, 4)
    A, B = low_rank(values, r=9, scale=1.0, layer="l0.q")
    assert (A.shape, B.shape) == ((9, 4), (6, 9))
    assert torch.allclose(delta((A, B), 1.0), values, atol=1e-5)


def test_pissa_takes_out_what_it_gives_the_adapter():
    """The remainder plus the initial adapter equals the weight."""
    start = pissa(matrix(), r=8, scale=2.0, layer="l0.q")
    assert start.taken is start.pair
    assert torch.allclose(delta(start.pair, 2.0), best(matrix(), 8), atol=1e-3)


def test_loftq_of_one_round_leaves_the_base_as_it_is():
    """The adapter is the best approximation of the plain quantization error."""
    start = loftq(matrix(), coarse, r=8, scale=2.0, layer="l0.q", iters=1)
    assert start.taken is None
    error = matrix() - coarse(matrix())
    assert torch.allclose(delta(start.pair, 2.0), best(error, 8), atol=1e-3)


@pytest.mark.parametrize("iters", [2, 5])
def test_further_rounds_quantize_what_the_pair_before_leaves(iters):
    """Each round takes out the pair before it; the last pair fits the last remainder."""
    before = loftq(matrix(), coarse, r=8, scale=2.0, layer="l0.q", iters=iters - 1)
    start = loftq(matrix(), coarse, r=8, scale=2.0, layer="l0.q", iters=iters)
    assert start.taken is not None
    assert all(torch.equal(*pair) for pair in zip(start.taken, before.pair, strict=True))
    missed = matrix() - coarse(matrix() - delta(start.taken, 2.0))
    assert torch.allclose(delta(start.pair, 2.0), best(missed, 8), atol=1e-3)


@pytest.mark.parametrize("begin", [pissa, lambda w, **k: loftq(w, coarse, iters=1, **k)])
def test_both_come_nearer_to_the_weight_than_quantizing_alone(begin):
    """This also holds for the flat spectrum of random weights."""
    weight = matrix()
    start = begin(weight, r=16, scale=1.0, layer="l0.q")
    taken = delta(start.taken, 1.0) if start.taken is not None else torch.zeros(())
    seen = coarse(weight - taken) + delta(start.pair, 1.0)
    assert (weight - seen).norm() < 0.95 * (weight - coarse(weight)).norm()


def test_stacked_pairs_are_their_difference():
    """The stacked pair has twice the rank and the same scale."""
    first = (matrix(4, 64), matrix(96, 4))
    second = (matrix(4, 64, seed=1), matrix(96, 4, seed=1))
    both = stacked(first, second)
    assert (both[0].shape, both[1].shape) == ((8, 64), (96, 8))
    assert torch.allclose(delta(both, 0.5), delta(first, 0.5) - delta(second, 0.5), atol=1e-5)
