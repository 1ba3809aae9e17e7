"""The arithmetic of a merge, worked out by hand."""

from __future__ import annotations

import torch

from mens_exp.lora.method import Delta


def test_the_delta_is_added_at_its_scale():
    """By hand: B A of rank 2 and all ones is 2; times alpha / r = 2, plus 1, that is 5."""
    ones = Delta(A_RI=torch.ones(2, 3), B_OR=torch.ones(4, 2), scale=2.0)
    assert ones.shape == (4, 3)
    assert torch.equal(ones.onto(torch.ones(4, 3), 0), torch.full((4, 3), 5.0))


def test_rows_are_merged_wherever_they_begin():
    """Rows 1 and 2 of three use their own rows of B."""
    delta = Delta(A_RI=torch.tensor([[1.0, 10.0]]), B_OR=torch.tensor([[1.0], [2], [3]]), scale=1)
    found = delta.onto(torch.zeros(2, 2), 1)
    assert found.tolist() == [[2, 20], [3, 30]]


def test_dora_gives_each_row_its_length():
    """By hand: (3, 4) has norm 5, and m = 10 doubles it."""
    delta = Delta(
        A_RI=torch.tensor([[1.0, 0.0]]),
        B_OR=torch.tensor([[2.0]]),
        scale=1.0,
        magnitude_O=torch.tensor([10.0]),
    )
    assert delta.onto(torch.tensor([[1.0, 4.0]]), 0).tolist() == [[6.0, 8.0]]


def test_a_doubled_pair_is_what_was_trained_less_what_was_taken_out():
    """The base was quantized from W - s·B0 A0, and s·B A is added to it."""
    whole = Delta(A_RI=torch.tensor([[1.0], [5.0]]), B_OR=torch.tensor([[3.0, -2.0]]), scale=2.0)
    apart = whole.as_trained()
    assert apart.left_of(torch.tensor([[100.0]]), 0).item() == 100 - 2 * 2 * 5
    assert apart.onto(torch.tensor([[0.0]]), 0).item() == 2 * 3 * 1
    assert whole.left_of(torch.tensor([[100.0]]), 0).item() == 100
