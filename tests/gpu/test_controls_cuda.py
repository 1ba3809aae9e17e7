"""Training controls that need a CUDA machine or that its kernels could break."""

from __future__ import annotations

import pytest
import torch

from mens_exp.artifacts.manifest import Manifest
from mens_exp.backends.qlora import QloraBackend
from mens_exp.data.batch import packed_batch
from mens_exp.objective.causal import CrossEntropy
from mens_exp.training.optimizer import build_optimizer

CUDA = torch.device("cuda", 0)
PAGED = 1024, 128  # bitsandbytes pages state from 100,000 elements on


@pytest.mark.parametrize("option", ["paged_adamw_8bit", "adamw_8bit", "lion"])
def test_an_optimizer_moves_the_parameters_themselves(tiny_config, option):
    """The tensor of the graph itself is changed in place and not a copy."""
    parameter = torch.nn.Parameter(torch.ones(PAGED, device=CUDA))
    place = parameter.data_ptr()
    optimizer = build_optimizer(
        tiny_config(f"optim={option}", "optim.lr=1e-2").optim, {"it": parameter}
    )
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.cuda.synchronize()
    assert parameter.data_ptr() == place
    assert torch.allclose(parameter, torch.full_like(parameter, 0.99), atol=1e-4)


def test_paged_state_is_paged_and_survives_a_checkpoint(tiny_config, tmp_path):
    """Three steps, a file and two more steps equal five steps."""
    config = tiny_config("optim=paged_adamw_8bit")
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(PAGED, generator=generator).to(CUDA) for _ in range(5)]

    def stepped(parameter, optimizer, first, last):
        for gradient in gradients[first:last]:
            parameter.grad = gradient
            optimizer.step()
        torch.cuda.synchronize()

    through, stopped = (torch.nn.Parameter(torch.ones(PAGED, device=CUDA)) for _ in range(2))
    stepped(through, build_optimizer(config.optim, {"it": through}), 0, 5)
    before = build_optimizer(config.optim, {"it": stopped})
    stepped(stopped, before, 0, 3)
    assert before.state[stopped]["state1"].is_paged
    torch.save(before.state_dict(), tmp_path / "state")
    after = build_optimizer(config.optim, {"it": stopped})
    after.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    stepped(stopped, after, 3, 5)
    assert torch.equal(stopped, through)


def test_checkpointed_activations_give_the_same_gradients(
    tiny_base,
    tiny_config,
    random_documents,
):
    """The GPU's generator draws dropout masks again from their keys."""
    batch = packed_batch(random_documents([11, 6, 17, 9], [3, 1, 12, 4]), [[0, 1, 2, 3]], index=2)
    batch = batch.to(CUDA)
    found = []
    for value in ("off", "on"):
        config = tiny_config(f"model.gradient_checkpointing={value}", "lora.dropout=0.3")
        backend = QloraBackend(config, tiny_base, CUDA).train()
        assert backend.facts()["gradient_checkpointing"] is (value == "on")
        backend.begin(batch.index)
        loss = CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head)
        loss.total.backward()
        found.append({n: p.grad for n, p in backend.trainable().items() if p.grad is not None})
    assert all(torch.allclose(found[1][n], g, atol=1e-5) for n, g in found[0].items())


def test_a_run_with_a_paged_optimizer_succeeds(train_in, tmp_path):
    """It has checkpointing, validation and the best adapter, as in the SigilDERG presets."""
    run = train_in(
        tmp_path / "run",
        "trainer=gpu",
        "optim=paged_adamw_8bit",
        "model.gradient_checkpointing=on",
        "adapter.select=best",
        "trainer.val_check_interval=4",
    )
    results = Manifest.read(run.manifest).results
    assert results["tuned_val_loss"] < results["base_val_loss"]
