"""Windows, caps and transposed weights on a CUDA machine, whose kernels are others."""

from __future__ import annotations

import pytest
import torch

from mens_exp.backends.qlora import QloraBackend
from mens_exp.data.batch import packed_batch, padded_batch

LENGTHS = [11, 6, 40, 1, 19]
families = pytest.mark.parametrize("name", ["mistral", "gemma2", "phi3", "gpt2", "qwen3"])


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS, [length - 1 for length in LENGTHS])


@pytest.fixture
def build(
    family_base,
    family_config,
):
    """Build a family on a device with B filled alike."""

    def built(name, device):
        backend = QloraBackend(family_config(name), family_base(name), torch.device(device))
        generator = torch.Generator().manual_seed(0)
        for key, parameter in backend.trainable().items():
            if key.endswith("lora_b"):
                draws = torch.empty(parameter.shape).normal_(std=0.1, generator=generator)
                parameter.data.copy_(draws)
        return backend

    return built


def apart(ours, theirs):
    return float((ours.cpu() - theirs.cpu()).abs().max() / theirs.abs().max().cpu())


@families
def test_logits_are_those_of_the_cpu(build, documents, name):
    """In f32, packed and padded, to a thousandth of the largest logit.

    The weights are quantized anew on the device; rounding there may fall to the other side.
    """
    here, there = build(name, "cpu").eval(), build(name, "cuda:0").eval()
    packed = packed_batch(documents, [list(range(5))], index=0)
    padded = padded_batch(documents, [[i] for i in range(5)], index=0, pad_id=0)
    with torch.no_grad():
        expected = here.head(here(packed))
        for batch in (packed, padded):
            assert apart(there.head(there(batch.to("cuda:0"))), expected) <= 1e-3


@families
def test_packed_and_padded_give_the_same_gradients(build, documents, name):
    """In f32, by kernels that share nothing but the mathematics."""
    backend = build(name, "cuda:0").train()

    def gradients(batch):
        backend.zero_grad()
        backend.head(backend(batch.to("cuda:0"))).logsumexp(-1).sum().backward()
        found = {key: p.grad for key, p in backend.trainable().items()}
        return {key: gradient.clone() for key, gradient in found.items() if gradient is not None}

    expected = gradients(packed_batch(documents, [list(range(5))], index=0))
    assert len(expected) == len(backend.trainable())
    padded = padded_batch(documents, [[i] for i in range(5)], index=0, pad_id=0)
    for key, gradient in gradients(padded).items():
        assert (gradient - expected[key]).norm() <= 1e-3 * expected[key].norm(), key


@families
def test_prompts_are_continued_together_as_alone(build, name):
    """Left padding and a static cache change no id, windows shorter than the text included."""
    backend = build(name, "cuda:0")
    prompts = [[5, 6, 7, 8], list(range(9, 22)), [16]]

    def complete(some):
        return backend.generate(some, max_new_tokens=8, end_ids={319}, pad_id=0)

    assert complete(prompts) == [complete([prompt])[0] for prompt in prompts]
