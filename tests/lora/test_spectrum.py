"""Size and shape of an update, compared with the decomposition of the full product."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mens_exp.artifacts.adapter_tensors import singular_values, spectrum


def pair(rows, rank, columns):
    generator = np.random.default_rng(rows * 100 + rank * 10 + columns)
    A_RI = generator.standard_normal((rank, columns)).astype(np.float32)
    return A_RI, generator.standard_normal((rows, rank)).astype(np.float32)


@pytest.mark.parametrize("shape", [(48, 4, 32), (32, 16, 48), (5, 5, 5), (3, 8, 40), (40, 8, 3)])
@pytest.mark.parametrize("scale", [1.0, 0.25, -2.0])
def test_singular_values_are_those_of_the_full_product(shape, scale):
    """Cases are tall, wide and square, and a rank above either side."""
    A_RI, B_OR = pair(*shape)
    product = scale * (B_OR.astype(np.float64) @ A_RI.astype(np.float64))
    expected = np.linalg.svd(product, compute_uv=False)[: min(shape)]
    np.testing.assert_allclose(singular_values(A_RI, B_OR, scale), expected, rtol=1e-10)


def test_norms_are_those_of_the_full_product():
    """The oracle is numpy's Frobenius and spectral norms."""
    A_RI, B_OR = pair(20, 4, 30)
    found = spectrum(A_RI, B_OR, 0.5)
    product = 0.5 * (B_OR.astype(np.float64) @ A_RI.astype(np.float64))
    assert found.frobenius == pytest.approx(np.linalg.norm(product), rel=1e-12)
    assert found.spectral == pytest.approx(np.linalg.norm(product, 2), rel=1e-12)


def test_equal_singular_values_have_the_rank_of_their_number():
    """A scaled identity of four has both ranks equal to four."""
    found = spectrum(np.eye(4, 9), np.eye(7, 4), 3.0)
    assert (found.spectral, found.frobenius) == (pytest.approx(3), pytest.approx(6))
    assert found.effective_rank == pytest.approx(4)
    assert found.stable_rank == pytest.approx(4)


def test_unequal_singular_values_by_hand():
    """By hand for 3 and 1: the entropy of 3/4 and 1/4, and 10 over 9."""
    found = spectrum(np.diag([3.0, 1.0]), np.eye(2), 1.0)
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert found.effective_rank == pytest.approx(math.exp(entropy))
    assert found.stable_rank == pytest.approx(10 / 9)


def test_a_dead_direction_adds_no_rank():
    """A zero row in A leaves rank one."""
    found = spectrum(np.array([[2.0, 0.0], [0.0, 0.0]]), np.eye(2), 1.0)
    assert (found.effective_rank, found.stable_rank) == (pytest.approx(1), pytest.approx(1))


def test_a_delta_of_nothing_has_no_rank():
    """At initialization B is zero."""
    found = spectrum(np.ones((2, 3)), np.zeros((4, 2)), 1.0)
    assert (found.frobenius, found.spectral) == (0, 0)
    assert (found.effective_rank, found.stable_rank) == (None, None)
