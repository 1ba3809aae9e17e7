from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mens_exp.objective import causal
from mens_exp.objective.causal import summed_cross_entropy


def draws(rows, vocabulary, dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 5).to(dtype)
    return logits, torch.randint(vocabulary, (rows,), generator=generator)


def gradient(loss, logits):
    (found,) = torch.autograd.grad(loss * 3, logits)
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("rows_at_once", [1, 3, 7, 100])
def test_loss_and_gradient_are_those_of_torch(monkeypatch, dtype, tolerance, rows_at_once):
    """Seven rows in chunks: the sum agrees to 1e-6, the gradient to its format's rounding."""
    monkeypatch.setattr(causal, "_CPU_ELEMENTS", rows_at_once * 50)
    logits, targets = draws(7, 50, dtype)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = summed_cross_entropy(ours, targets)
    expected = functional.cross_entropy(theirs.float(), targets, reduction="sum")
    assert loss.dtype == torch.float32
    assert torch.allclose(loss, expected, rtol=1e-6)
    assert gradient(loss, ours).dtype == dtype
    assert torch.allclose(
        gradient(summed_cross_entropy(ours, targets), ours),
        gradient(expected, theirs),
        rtol=tolerance,
        atol=tolerance,
    )


def test_logits_are_left_as_they_were():
    """The pass works in place on copies only, also in float32."""
    logits, targets = draws(4, 50, torch.float32)
    before = logits.clone()
    summed_cross_entropy(logits.requires_grad_(), targets).backward()
    assert torch.equal(logits.detach(), before)


def test_by_hand():
    """By hand: equal logits over four ids give ln 4, and gradients 1/4 and, at the target, -3/4."""
    logits = torch.zeros(2, 4, requires_grad=True)
    loss = summed_cross_entropy(logits, torch.tensor([0, 3]))
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2 * 1.3862943611)
    assert logits.grad is not None
    assert logits.grad[0].tolist() == [-0.75, 0.25, 0.25, 0.25]
    assert logits.grad[1].tolist() == [0.25, 0.25, 0.25, -0.75]


def test_a_hopeless_target_has_a_finite_loss():
    """Its probability underflows, but the logarithm does not."""
    logits = torch.tensor([[0.0, 300.0]])
    assert float(summed_cross_entropy(logits, torch.tensor([0]))) == 300.0


def test_no_target_costs_nothing():
    """With zero rows the loss is zero, and no gradient is made if none is needed."""
    logits, targets = torch.zeros(0, 4), torch.zeros(0, dtype=torch.long)
    assert float(summed_cross_entropy(logits, targets)) == 0.0
