"""Log-likelihoods of the base before training, compared with transformers."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mens_exp.corpus.source import labelling_of
from mens_exp.data.stream import MicroBatches
from mens_exp.errors import ConfigError
from mens_exp.objective.causal import Objective, OverTokens
from mens_exp.objective.preference import KnownReference
from mens_exp.planning.machine import ALONE
from mens_exp.rows.encode import encode
from mens_exp.rows.parse import parse_row
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training import cached_pass, precompute
from mens_exp.training.build import build_backend, objective_of
from mens_exp.training.cached_pass import CachedPass
from mens_exp.training.module import TrainingModule
from mens_exp.training.precompute import known_reference

ROWS = [
    {"prompt": f"Add {n}.", "chosen": f"x + {n}", "rejected": "no idea, " * (1 + n % 3)}
    for n in range(9)
]


@pytest.fixture(scope="module")
def parts(tiny_config, tiny_base):
    """Return a module with an unquantized base in float32, and the encoded rows."""
    words = ("objective=dpo", "backend=lora", "quant=none", "quant.compute_dtype=f32")
    config = tiny_config(*words, "data.seq_len=256")
    module = TrainingModule(
        config, build_backend(config, tiny_base), objective_of(config), total_steps=1
    ).train()
    tokenizer = load_tokenizer(config.tokenizer, tiny_base.directory)
    pairs = [parse_row(row, "rows.jsonl:1") for row in ROWS]
    return module, encode(pairs, tokenizer, labelling_of(config))


@pytest.fixture
def side(parts, tmp_path, monkeypatch):
    """Return the pass over some blocks, with its cache in the test's directory."""
    monkeypatch.setattr(cached_pass, "writable_cache", lambda: tmp_path)
    _, documents = parts
    blocks = [[0, 1, 2, 3], [4, 5], [6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17]]

    def made(needed, common=None):
        stream = MicroBatches(
            documents,
            blocks,
            micro_batch_size=1,
            total=len(blocks),
            seed=None,
            packing=True,
            pad_id=0,
        )
        return CachedPass("logp", common or {"base": "b"}, stream, np.array(needed), "documents")

    return made


def base_pass(module):
    return functools.partial(precompute._reference_logp, module)


def test_values_are_those_of_transformers(parts, side, tiny_base):
    """The oracle is the model's own loss with labels for each single document."""
    from transformers import AutoModelForCausalLM

    module, documents = parts
    found = side(range(5))
    found.complete(base_pass(module), ALONE)
    model = AutoModelForCausalLM.from_pretrained(tiny_base.directory, dtype=torch.float32)
    for number in range(len(documents)):
        start, end = documents.offsets[number : number + 2]
        ids = torch.from_numpy(documents.ids[start:end].astype(np.int64))[None]
        learned = torch.from_numpy(np.array(documents.supervised[start:end]))[None]
        with torch.no_grad():
            loss = model(input_ids=ids, labels=ids.where(learned, -100)).loss
        expected = -float(loss) * int(learned.sum())
        assert found.values[:, 0][number] == pytest.approx(expected, rel=1e-5)


def test_a_stop_loses_what_was_not_written(parts, side, monkeypatch):
    """After an interruption only missing values are computed, bitwise equal."""
    module, _ = parts
    whole = side(range(5), {"base": "whole"})
    whole.complete(base_pass(module), ALONE)
    monkeypatch.setattr(cached_pass, "_KEPT_EVERY", 2)
    passes = []

    def stopping(batch):
        if len(passes) == 3:
            raise KeyboardInterrupt
        passes.append(batch.index)
        return TrainingModule.of_base(module, batch)

    monkeypatch.setattr(module, "of_base", stopping)
    with pytest.raises(KeyboardInterrupt):
        side(range(5)).complete(base_pass(module), ALONE)
    assert passes == [0, 1, 2]
    monkeypatch.setattr(module, "of_base", lambda b: passes.append(b.index) or whole_pass(b))

    def whole_pass(batch):
        return TrainingModule.of_base(module, batch)

    again = side(range(5))
    run = SimpleNamespace(manifest=SimpleNamespace(notes=[]))
    again.read(run, ALONE)
    again.complete(base_pass(module), ALONE)
    assert passes[3:] == [2, 3, 4]
    assert (again.values[:, 0] == whole.values[:, 0]).all()
    assert run.manifest.notes == []


def test_runs_add_to_one_entry(parts, side):
    """Two runs write different blocks of one cache entry, and both remain."""
    module, _ = parts
    one, other = side([0, 1]), side([3])
    one.complete(base_pass(module), ALONE)
    other.complete(base_pass(module), ALONE)
    run = SimpleNamespace(manifest=SimpleNamespace(notes=[]))
    third = side([0, 1, 3])
    third.read(run, ALONE)
    assert np.isfinite(third.needed_values).all()
    assert np.isnan(third.values[:, 0]).sum() == 10


def test_other_content_is_another_entry(side):
    """A change of the base, the documents or the blocks changes the key."""
    first = side([0])
    assert side([0]).directory == side([1, 2]).directory == first.directory
    assert side([0], {"base": "c"}).directory != first.directory
    stream = first.stream
    stream.blocks = [[0, 1], [2, 3], *stream.blocks[1:]]
    assert (
        CachedPass("logp", {"base": "b"}, stream, np.array([0]), "documents").directory
        != first.directory
    )
    assert (
        CachedPass("logp", {"base": "b"}, side([0]).stream, np.array([0]), "d").directory
        != first.directory
    )


def test_a_document_has_its_own_value(parts):
    """This holds also if a micro-batch has a document of the next epoch."""
    _, documents = parts
    stream = MicroBatches(
        documents, [[0, 1], [2, 3]], micro_batch_size=3, total=1, seed=0, packing=True, pad_id=0
    )
    batch = stream.batch(0)
    known = KnownReference(torch.arange(len(documents)).float(), torch.zeros(0))
    values = known.of(batch, trains=True).tolist()
    assert sorted(values[:4]) == [0, 1, 2, 3]
    assert values[4:] in ([0, 1], [2, 3])


def test_an_objective_of_ones_own_is_refused(parts):
    """A user's class may use the base in another way."""
    module, _ = parts
    other = SimpleNamespace(objective=OverTokens(lambda *_: None))
    with pytest.raises(ConfigError, match="may compare with the base in another way"):
        known_reference(module.config, None, None, other, None, ALONE)
    assert isinstance(other.objective, Objective)


def test_only_values_of_the_adapter_leave_the_key_alone(parts, tiny_base, monkeypatch):
    """Rank, alpha and dropout do not change the key; settings of the base do."""
    module, _ = parts
    monkeypatch.setattr(cached_pass, "_code", lambda: "code")
    run = SimpleNamespace(manifest=SimpleNamespace(provenance={"packages": {"torch": "2"}}))

    def key(**groups):
        config = dataclasses.replace(module.config, **groups)
        return precompute._reference_key(config, run, tiny_base, module)

    usual = module.config
    lora = dataclasses.replace(usual.lora, r=32, alpha=64, dropout=0.5)
    assert key(lora=lora) == key()
    assert key(lora=dataclasses.replace(usual.lora, targets=["q"])) != key()
    assert key(quant=dataclasses.replace(usual.quant, double_quant=True)) != key()
    assert key(data=dataclasses.replace(usual.data, packing=False)) != key()
