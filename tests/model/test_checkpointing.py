"""Activation checkpointing gives the same numbers in less memory."""

from __future__ import annotations

import pytest
import torch

from mens_exp.config.model import checkpointing_wanted
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.model import attention
from mens_exp.objective.causal import CrossEntropy

ON, OFF = "model.gradient_checkpointing=on", "model.gradient_checkpointing=off"


@pytest.fixture
def documents(random_documents):
    return random_documents([41, 26, 37, 19], [13, 11, 22, 4])


def batch_of(documents, *, packed):
    if packed:
        return packed_batch(documents, [[0, 1, 2, 3]], index=5)
    return padded_batch(documents, [[0], [1], [2], [3]], index=5, pad_id=0)


def step(backend, batch):
    """Return the loss sum of one micro-batch and its gradients."""
    backend.train()
    backend.begin(batch.index)
    loss = CrossEntropy("causal", 8)(backend(batch), batch.targets_M, backend.head).total
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in backend.trainable().items() if p.grad is not None}
    return float(loss.detach()), gradients


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_loss_and_gradients_are_bit_for_bit_those_without(
    tiny_backend, documents, dtype, *, packed
):
    """With dropout, the recomputation draws the mask of the forward pass again."""
    batch = batch_of(documents, packed=packed)
    settings = (f"quant.compute_dtype={dtype}", "lora.dropout=0.3")
    plain = step(tiny_backend(OFF, *settings, live=True), batch)
    again = step(tiny_backend(ON, *settings, live=True), batch)
    assert again[0] == plain[0]
    assert len(plain[1]) == 28
    assert all(torch.equal(again[1][name], value) for name, value in plain[1].items())
    assert all(bool(value.any()) for value in plain[1].values())


def test_dropout_reaches_the_compared_gradients(tiny_backend, documents):
    """Control: otherwise the comparison above would not involve masks."""
    batch = batch_of(documents, packed=True)
    dropped = step(tiny_backend(ON, "lora.dropout=0.3", live=True), batch)
    kept = step(tiny_backend(ON, "lora.dropout=0", live=True), batch)
    assert dropped[0] != kept[0]


def saved_bytes(backend, batch):
    """Count the bytes that a forward pass keeps for the backward pass, each storage once."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    backend.train()
    backend.begin(batch.index)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = backend(batch)
    assert hidden.requires_grad
    return sum(kept.values())


def test_a_forward_pass_keeps_a_fraction_of_what_it_kept(tiny_backend, documents):
    """Only the inputs of layers are kept."""
    batch = batch_of(documents, packed=True)
    plain, again = (saved_bytes(tiny_backend(text, live=True), batch) for text in (OFF, ON))
    assert again < plain / 4


def test_nothing_holds_on_to_a_layer_s_inside_after_the_forward_pass(tiny_backend, documents):
    """The dropout modules must not keep their last result."""
    backend = tiny_backend(ON, "lora.dropout=0.3", live=True).train()
    batch = batch_of(documents, packed=True)
    backend.begin(batch.index)
    backend(batch)
    assert [dropout._last for dropout in backend.dropouts] == [None] * len(backend.dropouts)


def test_the_frozen_embedding_s_output_needs_no_gradient(tiny_backend, documents):
    """Only re-entrant checkpointing needs it; here it would cost a product per layer."""
    model = tiny_backend(ON).train().causal_lm.model
    ids = torch.from_numpy(documents.ids[None, :8].astype("int64"))
    assert not model.embed_tokens(ids).requires_grad


def test_embedding_and_head_keep_their_format(tiny_backend):
    """PEFT's preparation for k-bit training would cast both to float32."""
    model = tiny_backend(ON, "quant.compute_dtype=bf16").causal_lm
    assert {model.model.embed_tokens.weight.dtype, model.lm_head.weight.dtype} == {torch.bfloat16}


def test_evaluation_is_as_without(tiny_backend, documents):
    """Without gradients nothing is recomputed."""
    batch = batch_of(documents, packed=True)
    found = []
    for text in (OFF, ON):
        backend = tiny_backend(text, live=True).eval()
        with torch.no_grad():
            found.append(backend(batch))
    assert torch.equal(*found)


@pytest.mark.parametrize(("setting", "expected"), [(ON, True), (OFF, False), (None, False)])
def test_what_was_resolved_is_a_fact(tiny_backend, setting, *, expected):
    """The fact is read from the graph; auto means off on the CPU."""
    backend = tiny_backend(*([setting] if setting else []))
    assert backend.facts()["gradient_checkpointing"] is expected


@pytest.mark.parametrize(
    ("setting", "parameters", "device", "expected"),
    [
        ("auto", 8_030_261_248, "cuda", True),
        ("auto", 1_000_000_000, "cuda", True),
        ("auto", 999_999_999, "cuda", False),
        ("auto", 8_030_261_248, "cpu", False),
        ("on", 1, "cpu", True),
        ("True", 1, "cpu", True),
        ("off", 8_030_261_248, "cuda", False),
        ("false", 8_030_261_248, "cuda", False),
    ],
)
def test_auto_is_on_for_a_large_base_on_a_gpu(setting, parameters, device, *, expected):
    """An explicit setting applies everywhere."""
    assert checkpointing_wanted(setting, parameters=parameters, on_gpu=device == "cuda") is expected


class Older(torch.nn.Module):
    """A model with the attribute names of transformers 5.17 only."""

    is_gradient_checkpointing = False
    needs_input_gradients = True

    def gradient_checkpointing_enable(self, kwargs):
        assert kwargs == {"use_reentrant": False}
        self.is_gradient_checkpointing = True

    def disable_input_require_grads(self):
        self.needs_input_gradients = False


def test_a_model_of_an_older_transformers_is_switched_by_its_own_names():
    """It was an AttributeError before step 1, although pyproject.toml allows those releases."""
    model = Older()
    assert not attention.is_checkpointing(model)
    attention.enable_checkpointing(model)
    assert attention.is_checkpointing(model)
    assert not model.needs_input_gradients
