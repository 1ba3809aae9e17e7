from __future__ import annotations

import dataclasses
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.training.callbacks.digests import Digests
from mens_exp.training.callbacks.telemetry import TelemetryWriter


def sha256(*pieces):
    return hashlib.sha256(b"".join(pieces)).hexdigest()


def array(*values, shape):
    return str(shape).encode() + np.array(values, dtype="<i8").tobytes()


def chained(*batches):
    """Return the hash chain of micro-batches from a fresh start."""
    record = SimpleNamespace(manifest=SimpleNamespace(facts={}, unknown={}), save=lambda: None)
    module = SimpleNamespace(step_digests={}, backend=SimpleNamespace(trainable=dict))
    trainer = SimpleNamespace(global_step=0, world_size=1)
    callback = Digests(record)
    callback.setup(trainer, module, "fit")
    callback.on_train_start(trainer, module)
    for batch in batches:
        callback.on_train_batch_start(trainer, module, batch, 0)
    assert module.step_digests["batches_sha256"] == callback.state_dict()["chain"]
    return callback.state_dict()["chain"]


@pytest.fixture
def packed(documents_of):
    """Return a batch of documents 5 6 7 and 8 9, in which 7 and 9 are supervised."""
    documents = documents_of([[5, 6, 7], [8, 9]], [[0, 0, 1], [0, 1]])
    return packed_batch(documents, [[0, 1]], 0)


def test_the_chain_is_over_everything_that_a_graph_sees(packed):
    """By hand: previous digest, bounds, ids, positions, mask and labels are hashed."""
    first = sha256(
        sha256().encode(),
        b"((0, 3), (3, 5))",
        array(5, 6, 7, 8, 9, shape=(1, 5)),
        array(0, 1, 2, 0, 1, shape=(1, 5)),
        b"none",
        array(1, 3, shape=(2,)),
        array(7, 9, shape=(2,)),
    )
    assert chained(packed) == first


def test_a_padded_batch_has_its_mask_in_the_chain(documents_of):
    """Padding of the second sequence appears in the ids and in the mask."""
    batch = padded_batch(
        documents_of([[5, 6, 7], [8, 9]], [[0, 0, 1], [0, 1]]), [[0], [1]], 0, pad_id=2
    )
    expected = sha256(
        sha256().encode(),
        b"None",
        array(5, 6, 7, 8, 9, 2, shape=(2, 3)),
        array(0, 1, 2, 0, 1, 2, shape=(2, 3)),
        array(1, 1, 1, 1, 1, 0, shape=(2, 3)),
        array(1, 3, shape=(2,)),
        array(7, 9, shape=(2,)),
    )
    assert chained(batch) == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"input_ids_BT": torch.tensor([[5, 6, 7, 8, 8]])},
        {"position_ids_BT": torch.arange(5)[None]},
        {"documents": ((0, 5),)},
        {"predict_M": torch.tensor([0, 3])},
        {"targets_M": torch.tensor([7, 8])},
        {"attention_mask_BT": torch.ones(1, 5, dtype=torch.int64)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_part_of_a_micro_batch_counts(packed, changed):
    """Changing any part changes the digest."""
    assert chained(dataclasses.replace(packed, **changed)) != chained(packed)


def test_order_counts_and_the_place_in_the_stream_does_not(packed, documents_of):
    """Swapping two batches changes the digest; their index in the stream does not."""
    other = packed_batch(documents_of([[1, 2]], [[0, 1]]), [[0]], 1)
    assert chained(packed, other) != chained(other, packed)
    assert chained(dataclasses.replace(packed, index=9)) == chained(packed)


def test_a_fit_leaves_the_chain_of_each_step_and_of_the_run(fit):
    """With two micro-batches per step, step 2 has the digest of the first four."""
    stream = fit.data.train_dataloader()
    batches = [stream.batch(index) for index in range(4)]
    fit.run(fit.trainer(Digests(fit.record), TelemetryWriter(fit.record)))
    events = read_events(fit.record.dir.telemetry)
    steps = [e["payload"]["batches_sha256"] for e in events if e["event"] == "step"]
    assert steps == [chained(*batches[:2]), chained(*batches)]
    assert fit.record.manifest.results["batches_sha256"] == steps[-1]


def test_the_first_adapter_is_that_before_training(fit):
    """A layer's digest is over its initial A and B, the total over all layers."""
    before = {n: p.detach().numpy().copy() for n, p in fit.module.backend.trainable().items()}
    fit.run(fit.trainer(Digests(fit.record)))
    after = fit.module.backend.trainable()["l0.q.lora_b"].detach().numpy()
    facts = Manifest.read(fit.record.dir.manifest).facts
    A, B = before["l0.q.lora_a"], before["l0.q.lora_b"]
    expected = sha256(str(A.shape).encode(), A.tobytes(), str(B.shape).encode(), B.tobytes())
    assert facts["lora_init_layers_sha256"]["l0.q"] == expected
    assert len(facts["lora_init_layers_sha256"]) == 14
    listed = ",".join(f'"{k}":"{v}"' for k, v in sorted(facts["lora_init_layers_sha256"].items()))
    assert facts["lora_init_sha256"] == sha256(f"{{{listed}}}".encode())
    assert not np.array_equal(after, B)


def test_a_graph_without_lora_says_why_it_has_no_digest(fit):
    """If every weight is trained, the digest is null with a reason."""
    callback = Digests(fit.record)
    module = SimpleNamespace(backend=SimpleNamespace(trainable=lambda: {"w": torch.ones(2)}))
    callback.setup(fit.trainer(), module, "fit")
    callback.on_train_start(fit.trainer(), module)
    manifest = Manifest.read(fit.record.dir.manifest)
    assert manifest.facts["lora_init_sha256"] is None
    assert manifest.unknown["facts.lora_init_sha256"] == "no LoRA matrix"


def test_a_checkpoint_without_the_chain_makes_it_unknown(fit):
    """A run started before digests existed has none, since its chain lacks the beginning."""
    trainer = fit.trainer(Digests(fit.record), TelemetryWriter(fit.record))
    callback = trainer.callbacks[0]
    later = SimpleNamespace(global_step=2, world_size=1)
    callback.setup(later, fit.module, "fit")
    callback.on_train_start(later, fit.module)
    callback.on_train_batch_start(later, fit.module, fit.data.train_dataloader().batch(4), 0)
    callback.on_fit_end(later, fit.module)
    assert fit.module.step_digests == {}
    assert fit.record.manifest.results["batches_sha256"] is None
    assert "no digest" in fit.record.manifest.unknown["results.batches_sha256"]
