from __future__ import annotations

import bitsandbytes as bnb
import pytest

from mens_exp.quant.bnb import four_bit_test


def test_the_kernels_of_this_machine_agree_with_torch():
    """Both passes run and differ by rounding only."""
    test = four_bit_test("cpu")
    assert test.passed, test
    assert test.forward_error is not None
    assert test.forward_error < 1e-5


def test_a_kernel_that_computes_something_else_fails(monkeypatch):
    """A kernel whose output is 1 % too large is detected."""
    right = bnb.nn.Linear4bit.forward
    monkeypatch.setattr(bnb.nn.Linear4bit, "forward", lambda self, x: right(self, x) * 1.01)
    test = four_bit_test("cpu")
    assert not test.passed
    assert test.forward_error == pytest.approx(0.01, rel=0.05)


def test_a_kernel_that_raises_is_told(monkeypatch):
    """The reason is kept, and nothing is raised."""

    def broken(self, x):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(bnb.nn.Linear4bit, "forward", broken)
    test = four_bit_test("cpu")
    assert not test.passed
    assert test.reason == "RuntimeError: no kernel image"
