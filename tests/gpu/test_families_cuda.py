"""Windows, caps and transposed weights with the kernels of a CUDA machine."""

from __future__ import annotations

import pytest
import torch

families = pytest.mark.parametrize("name", ["mistral", "gemma2", "phi3", "gpt2", "qwen3"])


def apart(ours, theirs):
    return float((ours.cpu() - theirs.cpu()).abs().max() / theirs.abs().max().cpu())


@families
def test_logits_are_those_of_the_cpu(family_backend, packed_documents, padded_documents, name):
    """Packed and padded, they agree in float32 to a thousandth of the largest logit.

    The weights are quantized anew on the device; rounding there may fall to the other side.
    """
    here, there = family_backend(name, "cpu").eval(), family_backend(name, "cuda:0").eval()
    with torch.no_grad():
        expected = here.head(here(packed_documents))
        for batch in (packed_documents, padded_documents):
            assert apart(there.head(there(batch.to("cuda:0"))), expected) <= 1e-3


@families
def test_packed_and_padded_give_the_same_gradients(
    family_backend, packed_documents, padded_documents, name
):
    """The two kernels share only the mathematics; in float32."""
    backend = family_backend(name, "cuda:0").train()

    def gradients(batch):
        backend.zero_grad()
        backend.head(backend(batch.to("cuda:0"))).logsumexp(-1).sum().backward()
        found = {key: p.grad for key, p in backend.trainable().items()}
        return {key: gradient.clone() for key, gradient in found.items() if gradient is not None}

    expected = gradients(packed_documents)
    assert len(expected) == len(backend.trainable())
    for key, gradient in gradients(padded_documents).items():
        assert (gradient - expected[key]).norm() <= 1e-3 * expected[key].norm(), key


@families
def test_prompts_are_continued_together_as_alone(family_backend, name):
    """Left padding and a static cache change no id, also with windows shorter than the text."""
    backend = family_backend(name, "cuda:0")
    prompts = [[5, 6, 7, 8], list(range(9, 22)), [16]]

    def complete(some):
        return backend.generate(some, max_new_tokens=8, end_ids={319})

    assert complete(prompts) == [complete([prompt])[0] for prompt in prompts]
