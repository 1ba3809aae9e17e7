"""A sharded base on CUDA: loaded in host memory, quantized on the GPU, gathered by NCCL."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor

from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.telemetry import read_events
from mens_exp.backends.qlora import QloraBackend
from mens_exp.data.batch import packed_batch
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.machine import ALONE
from mens_exp.quant.layers import quantized_linears
from mens_exp.training.distributed import joined, open_store, sharded

CUDA = torch.device("cuda", 0)
QLORA = ("trainer=gpu", "quant.storage_dtype=bf16", "lora.dropout=0")


def test_quantized_through_the_host_a_base_is_the_same(
    tiny_config,
    tiny_base,
    random_documents,
):
    """For one process that holds everything, codes and forward pass are equal."""
    config = tiny_config(*QLORA)
    whole = QloraBackend(config, tiny_base, CUDA)
    codes = [m.weight.data.clone() for m in quantized_linears(whole.causal_lm).values()]
    documents = random_documents([40, 30])
    batch = packed_batch(documents, [[0, 1]], 0, multiple=1, pad_id=0).to(CUDA)
    expected_MD = whole(batch).detach()
    with joined(ALONE, CUDA, open_store(1)):
        parts = sharded(
            config,
            ALONE,
            CUDA,
            lambda at: QloraBackend(config, tiny_base, CUDA, loaded_on=at),
        )
        assert {p.device for p in parts.parameters()} == {CUDA}
        layers = quantized_linears(parts.causal_lm).values()
        for layer, theirs in zip(layers, codes, strict=True):
            assert isinstance(layer.weight, DTensor)
            assert torch.equal(layer.weight.to_local(), theirs)
        hidden_MD = parts(batch)
        torch.testing.assert_close(hidden_MD, expected_MD, rtol=0, atol=0)
        objective = CrossEntropy(name="ce", chunk_tokens=16)
        objective(hidden_MD, batch.targets_M, parts.head).total.backward()
        gradients = [p.grad for p in parts.trainable().values()]
        assert any(g is not None and float(g.norm()) > 0 for g in gradients)


@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices: a part of the base on each"
)
@pytest.mark.parametrize(
    "base", [("quant.storage_dtype=bf16",), ("backend=lora", "quant=none")], ids=["qlora", "lora"]
)
def test_two_gpus_take_the_course_of_one(train_in, tmp_path, base):
    """The documents are the same, and losses agree up to bf16 rounding."""
    one = train_in(tmp_path / "one", *base, "trainer=gpu")
    two = train_in(tmp_path / "two", *base, "trainer=fsdp", "trainer.accelerator=gpu")
    manifest = Manifest.read(two.manifest)
    assert manifest.status is Status.SUCCEEDED
    assert len(manifest.results["peak_cuda_bytes_of_processes"]) == 2
    courses = [
        [event["payload"] for event in read_events(run.telemetry) if event["event"] == "step"]
        for run in (one, two)
    ]
    for ours, theirs in zip(*courses, strict=True):
        assert ours["batches_sha256"] == theirs["batches_sha256"]
        assert ours["train/loss"] == pytest.approx(theirs["train/loss"], rel=1e-2)
