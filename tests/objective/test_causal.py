from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mens_exp.objective.causal import CrossEntropy

M, D, V = 37, 16, 53


class Head:
    """A frozen head that records its inputs."""

    def __init__(self):
        self.weight = torch.randn(V, D, generator=torch.Generator().manual_seed(1))
        self.sizes = []
        self.with_gradient = []

    def __call__(self, hidden):
        logits = hidden @ self.weight.to(hidden.dtype).T
        self.sizes.append(logits.shape[0])
        self.with_gradient.append(logits.requires_grad)
        return logits


@pytest.fixture
def head():
    return Head()


def drawn(count=M, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(count, D, generator=generator).to(dtype)
    return hidden.requires_grad_(), torch.randint(V, (count,), generator=generator)


def test_sum_and_gradient_are_those_of_cross_entropy_on_full_logits(head):
    """The oracle is torch's loss over all logits at once, to 1e-6 in float32."""
    hidden, targets = drawn()
    loss = CrossEntropy("causal", 8)(hidden, targets, head)
    loss.total.backward()
    reference = hidden.detach().clone().requires_grad_()
    expected = functional.cross_entropy(reference @ head.weight.T, targets, reduction="sum")
    expected.backward()
    assert loss.count == M
    assert torch.allclose(loss.total, expected, rtol=1e-6, atol=0)
    assert hidden.grad is not None
    assert reference.grad is not None
    assert torch.allclose(hidden.grad, reference.grad, rtol=1e-6, atol=1e-6)


def test_one_token_by_hand():
    """By hand: logits (0, ln 3) and target 0 give ln 4 nats and the gradient (-3/4, 3/4)."""
    hidden = torch.tensor([[0.0, 3.0]]).log().nan_to_num(neginf=0.0).requires_grad_()
    loss = CrossEntropy("causal", 4)(hidden, torch.tensor([0]), lambda h: h)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(1.3862944, abs=1e-6)
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [pytest.approx([-0.75, 0.75], abs=1e-6)]


@pytest.mark.parametrize("chunk", [1, 5, 36, 37, 38, 1000])
def test_the_chunk_changes_nothing_but_memory(head, chunk):
    """Every chunk size gives the same loss and gradient."""
    results = []
    for size in (M, chunk):
        hidden, targets = drawn()
        loss = CrossEntropy("causal", size)(hidden, targets, head)
        loss.total.backward()
        assert hidden.grad is not None
        results.append((loss.total.detach(), hidden.grad))
    assert torch.allclose(results[0][0], results[1][0], rtol=1e-6, atol=0)
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-5, atol=1e-6)


def test_no_more_logits_than_a_chunk_exist_at_one_time(head):
    """37 positions in chunks of 8 reach the head as 8, 8, 8, 8 and 5, once each."""
    hidden, targets = drawn()
    loss = CrossEntropy("causal", 8)(hidden, targets, head)
    loss.total.backward()
    assert head.sizes == [8, 8, 8, 8, 5]


def test_the_gradient_scales_with_what_comes_from_above(head):
    """Lightning divides by the accumulation and the module multiplies by it."""
    plain, targets = drawn()
    scaled, _ = drawn()
    objective = CrossEntropy("causal", 8)
    objective(plain, targets, head).total.backward()
    (objective(scaled, targets, head).total * 4).backward()
    assert plain.grad is not None
    assert scaled.grad is not None
    assert torch.equal(scaled.grad, plain.grad * 4)


def test_bf16_hidden_states_get_a_bf16_gradient_and_an_f32_loss(head):
    """The loss is summed in float32 for any format of the hidden states."""
    hidden, targets = drawn(dtype=torch.bfloat16)
    loss = CrossEntropy("causal", 8)(hidden, targets, head)
    loss.total.backward()
    logits = hidden.detach() @ head.weight.bfloat16().T
    expected = functional.cross_entropy(logits.float(), targets, reduction="sum")
    assert loss.total.dtype == torch.float32
    assert torch.allclose(loss.total, expected, rtol=1e-5)
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_no_supervised_token_is_a_loss_of_zero(head):
    """Sum and count are 0, and the backward pass works."""
    hidden, targets = drawn(0)
    loss = CrossEntropy("causal", 8)(hidden, targets, head)
    loss.total.backward()
    assert (loss.total.item(), loss.count, head.sizes) == (0.0, 0, [])
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, D)


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_are_computed(head, guard):
    """Validation needs no backward pass, and the loss is equal."""
    hidden, targets = drawn()
    expected = CrossEntropy("causal", 8)(hidden, targets, head)
    head.with_gradient.clear()
    with guard():
        loss = CrossEntropy("causal", 8)(hidden, targets, head)
    assert not loss.total.requires_grad
    assert head.with_gradient == [False] * 5
    assert torch.equal(loss.total, expected.total.detach())


def test_the_frozen_head_gets_no_gradient(head):
    """Only the hidden states get a gradient."""
    head.weight.requires_grad_(requires_grad=False)
    hidden, targets = drawn()
    CrossEntropy("causal", 8)(hidden, targets, head).total.backward()
    assert head.weight.grad is None
    assert hidden.grad is not None
    assert bool(hidden.grad.abs().sum() > 0)


class LearningHead(Head):
    """A frozen head with a trainable low-rank update."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.a = torch.randn(3, D, generator=generator).requires_grad_()
        self.b = torch.randn(V, 3, generator=generator).requires_grad_()

    def __call__(self, hidden):
        return super().__call__(hidden) + hidden @ self.a.T @ self.b.T


@pytest.mark.parametrize("chunk", [1, 5, 37, 1000])
@pytest.mark.parametrize("hidden_learns", [True, False])
def test_a_head_that_learns_gets_the_gradients_of_full_logits(chunk, *, hidden_learns):
    """Its parameters are found automatically, also if only it is trained; to 1e-5 in float32."""
    head, reference = LearningHead(), LearningHead()
    hidden, targets = drawn()
    plain = hidden.detach().clone().requires_grad_(hidden_learns)
    hidden = hidden.detach().clone().requires_grad_(hidden_learns)
    (CrossEntropy("causal", chunk)(hidden, targets, head).total * 3).backward()
    (functional.cross_entropy(reference(plain), targets, reduction="sum") * 3).backward()
    pairs = [(head.a.grad, reference.a.grad), (head.b.grad, reference.b.grad)]
    if hidden_learns:
        pairs.append((hidden.grad, plain.grad))
    for found, expected in pairs:
        assert found is not None
        assert expected is not None
        assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert max(head.sizes) == min(chunk, M)


def test_gradients_of_a_head_add_up_over_micro_batches():
    """Two backward passes give twice the gradient of one."""
    once, twice = LearningHead(), LearningHead()
    objective = CrossEntropy("causal", 8)
    for head, times in ((once, 1), (twice, 2)):
        for _ in range(times):
            hidden, targets = drawn()
            objective(hidden, targets, head).total.backward()
    assert once.a.grad is not None
    assert twice.a.grad is not None
    assert torch.allclose(twice.a.grad, 2 * once.a.grad)


def test_no_chunk_s_graph_outlives_it(head):
    """The graph of the loss is a single node and the leaves."""
    hidden, targets = drawn()
    loss = CrossEntropy("causal", 8)(hidden, targets, head)
    assert loss.total.grad_fn is not None
    parents = [type(node).__name__ for node, _ in loss.total.grad_fn.next_functions if node]
    assert parents == ["AccumulateGrad"]


def test_measuring_a_head_that_learns_computes_no_gradient():
    """This is the validation of a head with an adapter."""
    head = LearningHead()
    hidden, targets = drawn()
    with torch.no_grad():
        loss = CrossEntropy("causal", 8)(hidden, targets, head)
    assert not loss.total.requires_grad
    assert head.a.grad is None


@pytest.mark.parametrize("chunk_tokens", [1, 8, 100])
def test_without_gradients_the_loss_of_each_token_is_torch_s_own(head, chunk_tokens):
    """Each token agrees to 1e-6, and the sum equals the training loss bit for bit."""
    hidden, targets = drawn()
    objective = CrossEntropy("causal", chunk_tokens)
    with torch.no_grad():
        loss = objective(hidden, targets, head)
    expected = functional.cross_entropy(hidden @ head.weight.T, targets, reduction="none")
    assert torch.allclose(loss.losses_M, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(loss.total, objective(hidden, targets, head).total.detach())
    assert objective(hidden, targets, head).losses_M is None


def test_no_target_has_no_token_loss(head):
    """An empty batch has a sum of 0."""
    with torch.no_grad():
        loss = CrossEntropy("causal", 8)(torch.zeros(0, D), torch.zeros(0, dtype=torch.long), head)
    assert (float(loss.total), loss.count, loss.losses_M.tolist()) == (0, 0, [])
