"""Initialization from layer inputs, compared with PEFT's EVA on the same rows; refusals."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mens_exp.config.validate import problems_of
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.errors import TrainingError
from mens_exp.model.quiet import quiet
from mens_exp.planning.preflight import preflight
from mens_exp.training import data_driven_init
from mens_exp.training.data_driven_init import start_from_inputs

EVA = ("lora.init=eva", "lora.r=4", "backend=lora", "quant=none", "quant.compute_dtype=f32")
LENGTHS = (40, 31, 57, 44, 60, 38)
MANY = 3


def stream(documents, *, packing):
    """Return the micro-batches, of two documents each, in order."""
    make = packed_batch if packing else padded_batch
    extra = {} if packing else {"pad_id": 0}
    blocks = [[[2 * n], [2 * n + 1]] for n in range(MANY)]
    return SimpleNamespace(
        total=MANY, batch=lambda index: make(documents, blocks[index], index, **extra)
    )


def rows(documents):
    """Return the same batches for transformers: ids, mask and labels, padded on the right."""
    found = []
    for n in range(MANY):
        spans = [documents.offsets[2 * n + k : 2 * n + k + 2] for k in range(2)]
        width = max(end - start for start, end in spans)
        ids, mask, labels = (torch.full((2, width), fill) for fill in (0, 0, -100))
        for row, (start, end) in enumerate(spans):
            one = torch.from_numpy(documents.ids[start:end]).long()
            learned = torch.from_numpy(documents.supervised[start:end])
            ids[row, : len(one)], mask[row, : len(one)] = one, 1
            labels[row, : len(one)] = one.masked_fill(~learned, -100)
        found.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return found


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


@pytest.mark.parametrize("packing", [False, True])
def test_matrices_are_those_of_peft_s_eva(packing, tiny_backend, tiny_base, documents):
    """PEFT runs on transformers' model with padding and `rho=1`, which keeps the ranks."""
    from peft import EvaConfig, LoraConfig, get_peft_model, initialize_lora_eva_weights
    from transformers import AutoModelForCausalLM

    backend = tiny_backend(*EVA).train()
    before = {name: one.detach().clone() for name, one in backend.trainable().items()}
    facts = start_from_inputs(backend, stream(documents, packing=packing))
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=names,
        init_lora_weights="eva",
        eva_config=EvaConfig(rho=1.0),
    )
    theirs = get_peft_model(model, settings, low_cpu_mem_usage=True)
    initialize_lora_eva_weights(theirs, rows(documents), show_progress_bar=False)
    layers = dict(theirs.named_modules())
    for one in backend.modules_chosen:
        A_RI = layers[f"base_model.model.{one.path}"].lora_A["default"].weight
        ours_RI = backend.trainable()[f"{one.logical}.lora_a"]
        assert (ours_RI - A_RI).abs().max() < 1e-3, one.path
        assert (ours_RI - before[f"{one.logical}.lora_a"]).abs().max() > 0.1
        assert not backend.trainable()[f"{one.logical}.lora_b"].any()
    assert facts["init_micro_batches"] >= 2
    assert backend.training


def test_the_first_direction_is_that_of_all_inputs(tiny_backend, tiny_base, documents):
    """The oracle is a float64 SVD of what transformers' own layer reads."""
    from transformers import AutoModelForCausalLM

    backend = tiny_backend(*EVA)
    one_batch = stream(documents, packing=False)
    one_batch.total = 1
    start_from_inputs(backend, one_batch)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32)
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    read = []
    layer.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    (row, *_) = rows(documents)
    with torch.no_grad():
        model(input_ids=row["input_ids"], attention_mask=row["attention_mask"])
    x_NI = read[0][row["labels"] != -100].double().numpy()
    first_I = np.linalg.svd(x_NI - x_NI.mean(axis=0))[2][0]
    A_RI = backend.trainable()["l1.down.lora_a"].detach().double().numpy()
    assert abs(A_RI[0] @ first_I) > 0.999
    assert np.abs(A_RI @ A_RI.T - np.eye(4)).max() < 1e-4


def test_directions_that_do_not_settle_end_the_run(tiny_backend, documents, monkeypatch):
    """PEFT would loop forever, as it would if no micro-batch has enough tokens."""
    monkeypatch.setattr(data_driven_init, "_MOST", 1)
    backend = tiny_backend(*EVA)
    with pytest.raises(TrainingError, match="do not converge"):
        start_from_inputs(backend, stream(documents, packing=True))
    assert not any(layer._forward_pre_hooks for layer in backend.layers.values())


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["lora=ia3"], "lora.init"),
        (["lora.init_from=x"], "lora.init"),
        (["backend=proxy"], "lora.init"),
        (["trainer=ddp", "trainer.devices=2"], "trainer.devices"),
    ],
)
def test_what_has_no_such_start_is_refused(overrides, where, tiny_config):
    """The error comes before anything is loaded."""
    config = tiny_config("lora.init=eva", "lora.r=4", *overrides)
    assert where in {one.where for one in problems_of(config)}
    assert problems_of(tiny_config("lora.init=eva", "lora.r=4")) == []


@pytest.mark.parametrize(
    ("overrides", "where"),
    [(["lora.r=33"], "lora.r"), (["lora.r=4", "lora.targets=[lm_head]"], "lora.init")],
)
def test_layers_that_cannot_start_so_are_refused(overrides, where, tiny_config):
    """The head is refused, and so is a rank above half of the 64 inputs."""
    found = preflight(tiny_config("lora.init=eva", *overrides))
    assert where in {one.where for one in found}
    assert where not in {one.where for one in preflight(tiny_config("lora.init=eva", "lora.r=32"))}
