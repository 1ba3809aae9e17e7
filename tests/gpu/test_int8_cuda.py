"""The 8-bit base on a CUDA machine, where LLM.int8 quantizes inputs in both modes."""

from __future__ import annotations

import pytest
import torch

from mens_exp.data.batch import packed_batch
from mens_exp.objective.causal import CrossEntropy


@pytest.fixture
def batch(random_documents):
    return packed_batch(random_documents([11, 6, 17]), [[0, 1, 2]], index=0)


@pytest.fixture
def built(tiny_backend):
    """Build the graph on a device with B filled and no dropout."""

    def made(accelerator):
        settings = ["quant=int8", "lora.dropout=0", f"trainer.accelerator={accelerator}"]
        return tiny_backend(*settings, live=True)

    return made


def gradients(backend, batch):
    backend.train().zero_grad()
    CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head).total.backward()
    return {name: p.grad.to("cpu", copy=True) for name, p in backend.trainable().items()}


def logits(backend, batch):
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(batch)).float().cpu()


def test_it_is_the_cpu_s_graph_but_for_rounded_inputs(built, batch):
    """Logits agree to 3 %, and the gradient of every matrix to 10 %."""
    there, here = built("cpu"), built("gpu")  # tolerances: unverified guess, no GPU was available
    theirs, ours = logits(there, batch), logits(here, batch.to("cuda"))
    assert (ours - theirs).norm() <= 0.03 * theirs.norm()
    expected = gradients(there, batch)
    for name, gradient in gradients(here, batch.to("cuda")).items():
        assert (gradient - expected[name]).norm() <= 0.1 * expected[name].norm(), name


def test_the_peft_view_is_exact_there(built, batch):
    """The library computes the same in both modes, and the facts say so."""
    backend = built("gpu")
    assert backend.peft_view_is_exact
    assert backend.facts()["int8_inputs"] == "int8, outliers above 6.0 in f16"
    ours = logits(backend, batch.to("cuda"))
    with backend.as_peft_view():
        assert torch.equal(logits(backend, batch.to("cuda")), ours)


def test_it_learns_after_validation_and_after_a_way_to_the_cpu_and_back(built, batch):
    """When Lightning moves the module between fits, codes and scales move together."""
    backend = built("gpu")
    before = gradients(backend, batch.to("cuda"))
    expected = logits(backend, batch.to("cuda"))
    backend.cpu()
    assert torch.isfinite(logits(backend, batch)).all()
    backend.cuda()
    assert torch.equal(logits(backend, batch.to("cuda")), expected)
    after = gradients(backend, batch.to("cuda"))
    assert all(torch.allclose(after[name], before[name]) for name in before)
