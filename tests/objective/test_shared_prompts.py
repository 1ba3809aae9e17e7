"""Pairs whose prompt is computed once, compared with the same documents computed apart."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mens_exp.corpus.source import labelling_of
from mens_exp.data.batch import packed_batch
from mens_exp.model.sources import resolve
from mens_exp.rows.documents import share_prompts
from mens_exp.rows.encode import encode
from mens_exp.rows.parse import parse_row
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training.build import objective_of
from mens_exp.training.module import TrainingModule

CLOSE = 1e-5
LONG = "Add two numbers, and say in a sentence what you have done. " * 12
ROWS = [
    {"prompt": LONG, "chosen": "def add(x, y):\n    return x + y", "rejected": "no idea"},
    {"prompt": "Hi.", "chosen": "Yes?", "rejected": "Yes, what do you want? " * 4},
    {"prompt": "Four?", "chosen": "Four", "rejected": "Four is a number"},
]
SETTINGS = ("quant=none", "backend=lora", "quant.compute_dtype=f32", "lora.dropout=0")
FAMILIES = ("tiny_llama", "tiny_gpt2", "tiny_qwen2")


@pytest.fixture
def module_of(tiny_backend, tiny_config):
    """Build a module with a non-zero adapter."""

    def built(*words):
        backend = tiny_backend(*SETTINGS, *words, live=True)
        config = tiny_config(*SETTINGS, *words)
        return TrainingModule(config, backend, objective_of(config), total_steps=1).train()

    return built


@pytest.fixture
def documents_for(cache):
    """Encode the rows for a module, with one more pair that shares no prefix."""

    def encoded(module):
        config = module.config
        tokenizer = load_tokenizer(config.tokenizer, resolve(config.model, cache).directory)
        pairs = [parse_row(row, "rows.jsonl:1") for row in ROWS]
        documents = encode(pairs, tokenizer, labelling_of(config))
        documents.ids[documents.offsets[5]] += 1  # the first token of the last rejected answer
        return documents

    return encoded


def step(module, batch):
    """Return loss, metrics and gradient of a micro-batch."""
    module.zero_grad()
    loss = module.passed(batch)[1]
    loss.total.backward()
    gradient = torch.cat([p.grad.flatten() for p in module.backend.trainable().values()])
    metrics = {name: float(one) for name, one in loss.metrics.items()}
    return float(loss.total.detach()), metrics, gradient.clone()


def same(found, expected):
    loss, metrics, gradient = found
    assert loss == pytest.approx(expected[0], rel=CLOSE)
    assert metrics == pytest.approx(expected[1], rel=CLOSE, abs=CLOSE)
    assert expected[2].norm() > 1e-3
    assert (gradient - expected[2]).norm() <= CLOSE * expected[2].norm()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("objective", ["dpo", "cpo", "simpo", "orpo"])
def test_a_shared_prompt_changes_no_loss_and_no_gradient(
    objective, family, module_of, documents_for
):
    """In float32 one micro-batch has a long prompt, a short one and an unshared pair."""
    module = module_of(f"objective={objective}", f"model={family}", "data.seq_len=2048")
    documents = documents_for(module)
    shared = share_prompts(documents)
    assert shared.shared[1] > 60
    assert 0 < shared.shared[3] < 60
    assert shared.shared[5] == 0
    every = [range(len(documents))]
    expected = step(module, packed_batch(documents, every, 0, multiple=32))
    batch = packed_batch(shared, every, 0, multiple=32)
    assert batch.tokens == len(documents.ids) - shared.shared.sum()
    same(step(module, batch), expected)


def test_an_answer_at_the_next_position_is_not_the_same(module_of, documents_for):
    """Control: with other positions the comparison fails."""
    module = module_of("objective=dpo", "model=tiny_llama", "data.seq_len=2048")
    documents = documents_for(module)
    every = [range(len(documents))]
    expected = step(module, packed_batch(documents, every, 0))
    batch = packed_batch(share_prompts(documents), every, 0)
    positions_BT = batch.position_ids_BT.clone()
    start, end = batch.documents[1]
    positions_BT[:, start:end] += 1
    with pytest.raises(AssertionError):
        same(step(module, replace(batch, position_ids_BT=positions_BT)), expected)


def test_an_answer_that_sees_its_prompt_in_part_is_not_the_same(module_of, documents_for):
    """Control: without the prompt's last token the comparison fails."""
    module = module_of("objective=dpo", "model=tiny_llama", "data.seq_len=2048")
    documents = documents_for(module)
    every = [range(len(documents))]
    expected = step(module, packed_batch(documents, every, 0))
    batch = packed_batch(share_prompts(documents), every, 0)
    start, end = batch.prefixes[1]
    prefixes = (None, (start, end - 1), *batch.prefixes[2:])
    with pytest.raises(AssertionError):
        same(step(module, replace(batch, prefixes=prefixes)), expected)
