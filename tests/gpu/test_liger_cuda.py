"""Liger's kernels on a GPU, compared with a step of torch."""

from __future__ import annotations

import pytest
import torch

from mens_exp.data.batch import packed_batch
from mens_exp.objective.causal import CrossEntropy, Passed, token_losses
from mens_exp.planning.kernels import Part, is_installed

pytestmark = pytest.mark.skipif(not is_installed(), reason="needs pip install 'mens-exp[liger]'")

GPU = ("trainer.accelerator=gpu", "lora.dropout=0")
LOSSES = {
    "plain": lambda passed: CrossEntropy("causal", 16).loss(passed).total,
    "regularised": lambda passed: (
        CrossEntropy("causal", 16, label_smoothing=0.1, z_loss=0.01).loss(passed).total
    ),
    "squares": lambda passed: token_losses(passed, 16).square().sum(),
}


def step_of(backend, batch, loss_of):
    for parameter in backend.trainable().values():
        parameter.grad = None
    backend.begin(0)
    passed = Passed(batch, backend(batch), backend.head, fused_head=backend.fused_head)
    total = loss_of(passed)
    total.backward()
    gradients = [p.grad.flatten() for p in backend.trainable().values()]
    return float(total.detach()), torch.cat(gradients)


# bf16: both round each product; the difference was never measured, so the bound is a guess.
@pytest.mark.parametrize(("dtype", "bound"), [("f32", 2e-3), ("bf16", 0.1)])
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_is_torchs(tiny_backend, random_documents, family, dtype, bound, loss):
    """Loss and gradients agree on packed documents with all kernels, which `auto` selects."""
    settings = (*GPU, f"model.family={family}", f"quant.compute_dtype={dtype}")
    ours, theirs = (
        tiny_backend(*settings, f"model.kernels={kernels}", live=True).train()
        for kernels in ("auto", "torch")
    )
    assert all(by.startswith("liger-kernel ") for by in ours.facts()["kernels"].values())
    assert set(theirs.facts()["kernels"].values()) == {"torch: model.kernels=torch"}
    batch = packed_batch(random_documents([11, 6, 17]), [[0, 1, 2]], index=0).to("cuda")
    (found, gradient), (expected, reference) = (
        step_of(backend, batch, LOSSES[loss]) for backend in (ours, theirs)
    )
    assert found == pytest.approx(expected, rel=bound)
    assert float((gradient - reference).norm()) <= bound * float(reference.norm())


def test_a_capped_head_is_torchs(tiny_backend, random_documents):
    """Gemma 2 has kernels for the head and RoPE."""
    settings = (*GPU, "model.family=gemma2", "quant.compute_dtype=f32")
    steps = []
    for kernels in ("liger", "torch"):
        backend = tiny_backend(*settings, f"model.kernels={kernels}", live=True).train()
        batch = packed_batch(random_documents([11, 6]), [[0, 1]], index=0).to("cuda")
        steps.append(step_of(backend, batch, LOSSES["plain"]))
        if kernels == "liger":
            parts = backend.facts()["kernels"].items()
            used = {part for part, library in parts if library.startswith("liger-kernel")}
            assert used == {Part.HEAD, Part.ROPE}
    (found, gradient), (expected, reference) = steps
    assert found == pytest.approx(expected, rel=2e-3)
    assert float((gradient - reference).norm()) <= 2e-3 * float(reference.norm())


def test_the_fused_head_keeps_no_logits(tiny_backend, random_documents):
    """With a vocabulary of 128,000 the peak grows by less than the size of all logits."""
    wide = ("model.vocab_size=128000", "objective.chunk_tokens=4096")
    documents = random_documents([500, 500])
    peaks = {}
    for kernels in ("liger", "torch"):
        backend = tiny_backend(*GPU, *wide, f"model.kernels={kernels}", live=True).train()
        batch = packed_batch(documents, [[0, 1]], index=0).to("cuda")
        step_of(backend, batch, LOSSES["plain"])
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        passed = Passed(batch, backend(batch), backend.head, fused_head=backend.fused_head)
        CrossEntropy("causal", 4096).loss(passed).total.backward()
        peaks[kernels] = torch.cuda.max_memory_allocated() - before
        del backend, passed
    logits = len(batch.targets_M) * 128_000 * 2  # in bf16
    assert peaks["liger"] < logits < peaks["torch"]
