"""NEFTune noise on embeddings, compared with transformers' own hook."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from mens_exp.config.validate import ineffective_overrides, problems_of
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.lora.keyed import EmbeddingNoise
from mens_exp.training.contract_probe import preserve_state

ALPHA, D = 5.0, 64
LENGTHS = [9, 21, 4]
EXACT = ("quant.compute_dtype=f32", "lora.dropout=0")
NOISY = f"objective.neftune_alpha={ALPHA}"


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


def added(noise, batch, width=D):
    """Return what is added to embeddings of zero."""
    with noise.over(batch.document_lengths):
        return noise(torch.zeros(*batch.input_ids_BT.shape, width))


def test_one_document_has_the_noise_of_transformers_own_hook(monkeypatch, documents):
    """The hook is given our random stream and scales the draws itself."""
    noise = EmbeddingNoise(ALPHA, seed=3).train()
    noise.begin(7)
    batch = packed_batch(documents, [[1]], index=7)
    embedded = torch.randn(1, LENGTHS[1], D, generator=torch.Generator().manual_seed(0))
    unit = noise.unit(embedded)

    def uniform(self, low, high):
        return self.copy_(low + (unit + 1) / 2 * (high - low))

    with noise.over(batch.document_lengths):
        ours = noise(embedded)
    module = torch.nn.Embedding(1, 1)
    module.neftune_noise_alpha = ALPHA
    monkeypatch.setattr(torch.Tensor, "uniform_", uniform)
    theirs = neftune_post_forward_hook(module, None, embedded)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
    assert not torch.equal(theirs, embedded)


@pytest.mark.parametrize("packing", [True, False])
def test_every_document_has_the_noise_of_its_own_length(documents, packing):
    """Noise is uniform up to alpha / sqrt(L · D) for a document of L tokens; padding has none.

    Of n uniform draws, the largest is above 0.97 but for a chance of 0.97^n: 4e-4 for n = 256.
    """
    noise = EmbeddingNoise(ALPHA, seed=0).train()
    if packing:
        batch = packed_batch(documents, [[0, 1, 2]], index=0, multiple=32)
        found = added(noise, batch)[0]
        assert found.shape[0] == 64
        parts = list(found.split([*LENGTHS, 64 - sum(LENGTHS)]))
        rest = parts.pop()
    else:
        batch = padded_batch(documents, [[0], [1], [2]], index=0, pad_id=0)
        found = added(noise, batch)
        parts = [found[row, :length] for row, length in enumerate(LENGTHS)]
        rest = torch.cat([found[row, length:] for row, length in enumerate(LENGTHS)])
    assert rest.numel() > 0
    assert not rest.any()
    for part, length in zip(parts, LENGTHS, strict=True):
        most = ALPHA / math.sqrt(length * D)
        assert 0.97 * most < float(part.abs().max()) <= most * (1 + 1e-6)
        values = part.flatten().double() / most
        deviation = math.sqrt(1 / 3 / len(values))  # of a mean of draws with variance 1/3
        assert abs(float(values.mean())) < 4 * deviation
        assert float(values.square().mean()) == pytest.approx(1 / 3, rel=0.2)


def test_noise_is_a_function_of_seed_and_micro_batch(documents):
    """It does not depend on global generators or earlier draws."""
    batch = packed_batch(documents, [[0]], index=0)

    def drawn(seed, micro_batch):
        noise = EmbeddingNoise(ALPHA, seed=seed).train()
        noise.begin(micro_batch)
        torch.rand(1)
        return added(noise, batch)

    assert torch.equal(drawn(1, 2), drawn(1, 2))
    assert not torch.equal(drawn(1, 2), drawn(1, 3))
    assert not torch.equal(drawn(1, 2), drawn(2, 2))


def test_bf16_embeddings_stay_bf16(documents):
    """The noise is drawn in float32 and rounded."""
    noise = EmbeddingNoise(ALPHA, seed=0).train()
    batch = packed_batch(documents, [[0]], index=0)
    with noise.over(batch.document_lengths):
        found = noise(torch.zeros(1, LENGTHS[0], D, dtype=torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert bool(found.any())


def test_a_training_pass_is_that_of_transformers_on_noisy_embeddings(tiny_backend, documents):
    """Given the noisy embeddings as input, hidden states agree to 1e-5."""
    from transformers import AutoModelForCausalLM

    lora = ("backend=lora", "quant=none")
    backend = tiny_backend(*EXACT, *lora, NOISY).train()  # B = 0, so this is the base
    batch = packed_batch(documents, [[1]], index=4)
    backend.begin(4)
    found = backend(batch).detach()
    model = AutoModelForCausalLM.from_pretrained(backend.base.directory, dtype=torch.float32).eval()
    embedded = model.get_input_embeddings()(batch.input_ids_BT)
    most = ALPHA / math.sqrt(embedded.shape[1] * embedded.shape[2])
    noisy = embedded + most * backend.noise.unit(embedded)
    with torch.no_grad():
        states = model.model(inputs_embeds=noisy).last_hidden_state[0, batch.predict_M]
        plain = model.model(inputs_embeds=embedded).last_hidden_state[0, batch.predict_M]
    assert (found - states).norm() <= 1e-5 * states.norm()
    assert (found - plain).norm() > 1e-3 * plain.norm()


@pytest.mark.parametrize("overrides", [(), ("backend=full", "quant=none")])
def test_only_training_passes_have_noise(tiny_backend, documents, overrides):
    """Validation, passes without gradients and probes equal those of a model without noise."""
    noisy = tiny_backend(*EXACT, *overrides, NOISY).train()
    plain = tiny_backend(*EXACT, *overrides).train()
    batch = packed_batch(documents, [[0, 1, 2]], index=0)
    expected = plain(batch).detach()
    assert not torch.allclose(noisy(batch).detach(), expected, rtol=1e-3)
    with preserve_state(noisy):
        assert torch.equal(noisy(batch).detach(), expected)
    with torch.no_grad():
        without = plain(batch)
        assert torch.equal(noisy(batch), without)
    noisy.eval()
    plain.eval()
    assert torch.equal(noisy(batch).detach(), plain(batch).detach())


def test_a_negative_alpha_is_refused(tiny_config):
    """The error names the setting."""
    found = problems_of(tiny_config("objective.neftune_alpha=-1"))
    assert any("objective.neftune_alpha" in str(one) for one in found)


def test_the_proxy_stack_refuses_noise(tiny_config):
    """The setting would have no effect there."""
    key = "objective.neftune_alpha"
    (problem,) = ineffective_overrides(tiny_config("backend=proxy", f"{key}=5"), [key])
    assert "backend=proxy" in str(problem)
