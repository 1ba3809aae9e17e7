"""Label smoothing, z-loss and DFT, compared with torch on all logits and by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from mens_exp.config.validate import problems_of
from mens_exp.objective import causal
from mens_exp.objective.causal import CrossEntropy, summed_cross_entropy
from mens_exp.training.build import objective_of

CLOSE = 1e-5
BOTH = (0.1, 0.02)  # an exaggerated z-loss, so that it matters
VALUES = pytest.mark.parametrize(
    ("smoothing", "z_loss"), [(0.1, 0.0), (0.0, 0.02), BOTH, (0.9, 1e-4)]
)


def by_torch(logits_CV, targets_C, smoothing, z_loss):
    """Return torch's smoothed loss plus the squared log-normalizers."""
    smoothed = functional.cross_entropy(
        logits_CV, targets_C, label_smoothing=smoothing, reduction="sum"
    )
    return smoothed + z_loss * torch.logsumexp(logits_CV, dim=1).square().sum()


def drawn(rows, vocabulary, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(rows, vocabulary, generator=generator) * 5 + 2).to(dtype)
    return logits, torch.randint(vocabulary, (rows,), generator=generator)


def close(found, expected, tolerance=CLOSE):
    return bool((found - expected).norm() <= tolerance * expected.norm())


@VALUES
@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
def test_loss_and_gradient_are_those_of_torch(monkeypatch, smoothing, z_loss, rows_at_once):
    """Seven rows in chunks of any size agree to 1e-5 in float32."""
    monkeypatch.setattr(causal, "_CPU_ELEMENTS", rows_at_once * 50)
    logits, targets = drawn(7, 50)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = summed_cross_entropy(ours, targets, label_smoothing=smoothing, z_loss=z_loss)
    expected = by_torch(theirs, targets, smoothing, z_loss)
    (loss * 3).backward()
    (expected * 3).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=CLOSE)
    assert close(ours.grad, theirs.grad)


def test_one_token_by_hand():
    """By hand: for logits (0, ln 3), log Z = ln 4; smoothing moves a quarter to the other id."""
    logits = torch.tensor([[0.0, math.log(3)]], requires_grad=True)
    loss = summed_cross_entropy(logits, torch.tensor([0]), label_smoothing=0.5, z_loss=0.1)
    loss.backward()
    log_z = math.log(4)
    smoothed = 0.75 * math.log(4) + 0.25 * math.log(4 / 3)
    assert float(loss.detach()) == pytest.approx(smoothed + 0.1 * log_z**2, rel=1e-6)
    chances = torch.tensor([[0.25, 0.75]])
    expected = chances * (1 + 2 * 0.1 * log_z) - torch.tensor([[0.75, 0.25]])
    assert torch.allclose(logits.grad, expected, atol=1e-6)


def test_bf16_logits_get_a_bf16_gradient():
    """The loss is computed in float32; the gradient equals torch's up to bf16 rounding."""
    logits, targets = drawn(7, 50, torch.bfloat16)
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    summed_cross_entropy(ours, targets, label_smoothing=0.1, z_loss=0.02).backward()
    by_torch(theirs.float(), targets, *BOTH).backward()
    assert ours.grad.dtype == torch.bfloat16
    assert close(ours.grad.float(), theirs.grad.float(), 1e-2)


@VALUES
def test_weights_multiply_each_token_s_loss_and_gradient(smoothing, z_loss):
    """The oracle is torch's loss per token times its weight; a weight of 0 has no gradient."""
    logits, targets = drawn(7, 50)
    weights = torch.tensor([0.5, 2, 1, 0, 0.25, 3, 1])
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    objective = CrossEntropy("causal", 3, smoothing, z_loss)
    loss = objective(ours, targets, lambda it: it, weights).total
    each = (
        functional.cross_entropy(theirs, targets, label_smoothing=smoothing, reduction="none")
        + z_loss * torch.logsumexp(theirs, dim=1).square()
    )
    (loss * 3).backward()
    ((each * weights).sum() * 3).backward()
    assert float(loss.detach()) == pytest.approx(float((each * weights).sum().detach()), rel=CLOSE)
    assert close(ours.grad, theirs.grad)
    assert not ours.grad[3].any()


@pytest.mark.parametrize("weighed", [False, True])
def test_dft_multiplies_each_loss_by_a_probability_without_a_gradient(weighed):
    """The oracle is the paper's formula on all logits; a probability of 0 gives no gradient."""
    logits, targets = drawn(7, 50)
    logits[2, targets[2]] = -200
    weights = torch.tensor([0.5, 2, 1, 0, 0.25, 3, 1]) if weighed else None
    ours, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    loss = CrossEntropy("causal", 3, dft=True)(ours, targets, lambda it: it, weights).total
    chosen = functional.softmax(theirs, dim=1)[torch.arange(7), targets].detach()
    each = functional.cross_entropy(theirs, targets, reduction="none") * chosen
    expected = (each if weights is None else each * weights).sum()
    (loss * 3).backward()
    (expected * 3).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=CLOSE)
    assert close(ours.grad, theirs.grad)
    assert not ours.grad[2].any()


def test_a_validation_takes_the_plain_cross_entropy():
    """Without gradients neither changes the loss, so validation losses are comparable."""
    logits, targets = drawn(7, 50)
    with torch.no_grad():
        plain = CrossEntropy("causal", 3)(logits, targets, lambda it: it)
        weights = torch.arange(7.0)
        other = CrossEntropy("causal", 3, *BOTH)(logits, targets, lambda it: it, weights)
        dft = CrossEntropy("causal", 3, dft=True)(logits, targets, lambda it: it)
    assert torch.equal(plain.total, dft.total)
    assert torch.equal(plain.total, other.total)
    assert torch.equal(plain.losses_M, other.losses_M)


def gradient_of(loss, parameters):
    """Return the gradient as one vector."""
    loss.backward()
    found = torch.cat([one.grad.flatten() for one in parameters if one.grad is not None])
    for one in parameters:
        one.grad = None
    return found


def agrees(backend, batch):
    """Compare loss and adapter gradient with torch's on all logits at once."""
    parameters = list(backend.trainable().values())
    backend.begin(0)
    ours = CrossEntropy("causal", 7, *BOTH)(backend(batch), batch.targets_M, backend.head)
    found = gradient_of(ours.total, parameters)
    backend.begin(0)
    logits_MV = backend.head(backend(batch)).float()
    assert len(logits_MV) > 7, "one chunk is not enough"
    expected = by_torch(logits_MV, batch.targets_M, *BOTH)
    assert float(ours.total.detach()) == pytest.approx(float(expected.detach()), rel=CLOSE)
    assert close(found, gradient_of(expected, parameters))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_a_model_s_gradient_is_that_of_torch_on_its_logits(name, family_backend, packed_documents):
    """Cases: a separate head, a tied head with Conv1D layers, and capped logits."""
    agrees(family_backend(name).train(), packed_documents)


@pytest.mark.parametrize(
    "overrides",
    [
        ("lora.targets=[q_proj,lm_head]",),
        ("backend=lora", "quant=none", "lora.targets=[lm_head]"),
        ("backend=full", "quant=none"),
    ],
    ids=["adapted head", "adapted head alone", "every weight"],
)
def test_a_head_that_learns_gets_the_gradient_of_torch(overrides, tiny_backend, packed_documents):
    """The gradients of all chunks accumulate in its parameters."""
    backend = tiny_backend("quant.compute_dtype=f32", "lora.dropout=0", *overrides)
    agrees(backend.train(), packed_documents)


def test_the_settings_reach_the_loss(tiny_config):
    """The objective is built with the configured values."""
    config = tiny_config("objective.label_smoothing=0.1", "objective.z_loss=1e-4")
    made = objective_of(config)
    assert (made.label_smoothing, made.z_loss) == (0.1, 1e-4)
    made = objective_of(tiny_config())
    assert (made.label_smoothing, made.z_loss, made.dft) == (0, 0, False)
    assert objective_of(tiny_config("objective.dft=true")).dft


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("objective.label_smoothing=1", "label_smoothing"),
        ("objective.label_smoothing=-0.1", "label_smoothing"),
        ("objective.z_loss=-1e-4", "z_loss"),
        ("objective.dft=true objective.z_loss=1e-4", "z_loss"),
        ("objective.dft=true objective.label_smoothing=0.1", "label_smoothing"),
    ],
)
def test_a_value_without_a_meaning_is_refused(tiny_config, override, said):
    """The error names the setting."""
    assert any(said in str(one) for one in problems_of(tiny_config(*override.split())))
