"""The other backends on a CUDA machine, compared with the CPU."""

from __future__ import annotations

import pytest
import torch

from mens_exp.data.batch import packed_batch
from mens_exp.objective.causal import CrossEntropy

F32 = "quant.compute_dtype=f32"
WIDE = ["model=random", "model.name=wide", "model.hidden_size=256", "model.intermediate_size=512"]


@pytest.mark.parametrize(
    "overrides",
    [
        ["backend=proxy", F32],
        ["backend=lora", F32],
        ["backend=full", F32],
        ["backend=burn"],
        [*WIDE, "quant.block_size=256", F32],
        ["quant.skip=[mlp]", F32],
        ["quant.storage_dtype=f32", F32],
    ],
)
def test_loss_and_gradients_are_those_of_the_cpu(
    tiny_backend,
    random_documents,
    overrides,
):
    """They agree to 1e-3 in float32 without dropout."""
    found = []
    for accelerator in ("cpu", "gpu"):
        settings = [*overrides, "lora.dropout=0", f"trainer.accelerator={accelerator}"]
        backend = tiny_backend(*settings, live=True).train()
        batch = packed_batch(random_documents([11, 6, 17]), [[0, 1, 2]], index=0)
        batch = batch.to("cuda" if accelerator == "gpu" else "cpu")
        loss = CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head)
        loss.total.backward()
        gradients = {n: p.grad.to("cpu") for n, p in backend.trainable().items()}
        found.append((loss.total.detach().to("cpu"), gradients))
    (there, theirs), (here, ours) = found
    assert torch.allclose(here, there, rtol=1e-3)
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name


@pytest.mark.parametrize("overrides", [["backend=proxy"], ["backend=full"], ["backend=lora"]])
def test_bf16_learns_and_goes_back_to_its_base(
    tiny_backend,
    random_documents,
    overrides,
):
    """Every parameter has a gradient, generation works, and the context restores the base."""
    backend = tiny_backend(*overrides, "trainer.accelerator=gpu", live=True).train()
    batch = packed_batch(random_documents([11, 6]), [[0, 1]], index=0).to("cuda")
    backend.begin(0)
    loss = CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head)
    loss.total.backward()
    assert all(p.grad is not None for p in backend.trainable().values())
    made = backend.generate([[5, 6], [7]], max_new_tokens=3, end_ids=set())
    assert [len(ids) for ids in made] == [3, 3]
    with backend.base_only():
        backend.generate([[5]], max_new_tokens=1, end_ids=set())
