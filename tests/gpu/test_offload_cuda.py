"""A base in host memory, trained on a GPU: the same numbers, and little memory."""

from __future__ import annotations

import pytest
import torch
from live_adapters import training_pass

from mens_exp.data.batch import packed_batch
from mens_exp.quant.layers import quantized_linears

QLORA = ("trainer=gpu", "lora.dropout=0", "model.kernels=torch")


@pytest.mark.parametrize("checkpointing", ["on", "off"])
@pytest.mark.parametrize("quant", ["nf4", "nf3"])
def test_an_offloaded_base_gives_the_same_numbers(
    tiny_backend, random_documents, quant, checkpointing
):
    """Bit by bit over several micro-batches, copied ahead on a stream of their own."""
    documents = random_documents([40, 30, 58])
    batch = packed_batch(documents, [[0, 1, 2]], 0, multiple=1, pad_id=0).to("cuda")
    settings = [*QLORA, f"quant={quant}", f"model.gradient_checkpointing={checkpointing!r}"]
    here = tiny_backend(*settings, live=True)
    there = tiny_backend(*settings, "model.offload=true", live=True)
    layers = quantized_linears(there.causal_lm).values()
    assert {one.weight.device.type for one in layers} == {"cpu"}
    assert all(one.weight.data.is_pinned() for one in layers)
    assert {one.device.type for one in there.parameters()} == {"cuda"}
    for _ in range(4):
        (ours, mine), (theirs, known) = training_pass(there, batch), training_pass(here, batch)
        assert ours == theirs
        assert all(torch.equal(mine[name], known[name]) for name in known)


def test_the_device_holds_two_layers_of_codes(tiny_backend, random_documents):
    """The peak of a model of many layers is lower by its other codes."""
    settings = [*QLORA, "model.hidden_size=512", "model.intermediate_size=1024"]
    settings += ["model.num_hidden_layers=16", "model.gradient_checkpointing='on'"]
    batch = packed_batch(random_documents([64]), [[0]], 0, multiple=1, pad_id=0).to("cuda")
    peaks = []
    for more in ([], ["model.offload=true"]):
        backend = tiny_backend(*settings, *more)
        training_pass(backend, batch)
        torch.cuda.reset_peak_memory_stats()
        training_pass(backend, batch)
        peaks.append(torch.cuda.max_memory_allocated())
        sizes = [one.weight.data.nbytes for one in quantized_linears(backend.causal_lm).values()]
        del backend
        torch.cuda.empty_cache()
    assert peaks[0] - peaks[1] >= 0.9 * (sum(sizes) - 2 * max(sizes))
