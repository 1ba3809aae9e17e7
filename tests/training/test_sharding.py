"""A sharded base computes the same as a whole one, and each process holds only its shard."""

from __future__ import annotations

import sys
from pathlib import Path

import fork_server
import pytest
import torch

from mens_exp.data.batch import packed_batch
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.machine import ALONE
from mens_exp.quant.bnb import quantizing_on
from mens_exp.quant.layers import quantized_linears
from mens_exp.training.distributed import is_sharded, open_store

USUAL = ("model=tiny_llama", "logger=none", "suite=none", "lora.dropout=0.1")
FSDP = ("trainer=fsdp", "trainer.accelerator=cpu")
QLORA = ("quant.compute_dtype=f32", "quant.storage_dtype=f32")
LORA = ("backend=lora", "quant=none", "quant.compute_dtype=f32")
SCRIPT = Path(__file__).with_name("sharded_process.py")


@pytest.fixture
def in_two(
    cache,
    tmp_path,
    tiny_backend,
    random_documents,
):
    """Compute one batch whole, and in two processes with a sharded base."""

    def made(*overrides):
        whole = tiny_backend(*USUAL, *overrides, live=True)
        batch = packed_batch(random_documents([40, 30, 20]), [[0, 1, 2]], 0, multiple=1, pad_id=0)
        file = tmp_path / "given"
        adapter = {name: p.detach() for name, p in whole.trainable().items()}
        given = {"overrides": [*USUAL, *FSDP, *overrides], "batch": batch, "adapter": adapter}
        torch.save(given, file)
        store = open_store(2)
        line = [sys.executable, str(SCRIPT), str(store.port)]
        both = [fork_server.Popen([*line, str(number), str(file)]) for number in range(2)]
        assert [one.wait(timeout=300) for one in both] == [0, 0]
        whole.begin(0)
        hidden_MD = whole(batch)
        objective = CrossEntropy(name="ce", chunk_tokens=16)
        objective(hidden_MD, batch.targets_M, whole.head).total.backward()
        found = [torch.load(f"{file}.{number}", weights_only=False) for number in range(2)]
        return (whole, batch, hidden_MD.detach()), found

    return made


@pytest.mark.parametrize(
    "overrides",
    [
        QLORA,
        (*QLORA, "model.gradient_checkpointing=on"),
        (*QLORA, "lora.variant=dora"),
        LORA,
        (*QLORA, "lora=ln_tuning"),
    ],
    ids=["qlora", "recomputed", "dora", "lora", "tuned norms"],
)
def test_parts_compute_what_the_whole_does(in_two, overrides):
    """Hidden states with dropout, gradients, base loss, answers, facts and adapter agree."""
    (whole, batch, hidden_MD), found = in_two(*overrides)
    gradients = {n: p.grad for n, p in whole.trainable().items() if p.grad is not None}
    with torch.no_grad(), whole.base_only():
        base_MD = whole(batch)
    answer = whole.generate([[5, 6, 7]], max_new_tokens=4, end_ids=set())
    tensors = whole.adapter(whole_config(overrides))[1]
    for one in found:
        holds_its_part(whole, one)
        torch.testing.assert_close(one["hidden"], hidden_MD, rtol=0, atol=0)
        torch.testing.assert_close(one["base"], base_MD, rtol=0, atol=0)
        assert not torch.equal(one["hidden"], one["base"])
        assert one["answer"] == answer
        assert one["gradients"].keys() == gradients.keys() != set()
        for name, gradient in gradients.items():  # the weights are 1 and 3
            assert (one["gradients"][name] - 2 * gradient).norm() < 1e-5 * gradient.norm()
        assert one["facts"] == whole.facts()
        assert one["adapter"].keys() == tensors.keys()
        assert all((one["adapter"][name] == values).all() for name, values in tensors.items())


def whole_config(overrides):
    from mens_exp.config.compose import compose, typed

    return typed(compose([[*USUAL, "trainer=cpu", *overrides]])[0].values)


def holds_its_part(whole, one):
    """Assert that half of each weight is held at rest, and a whole layer while it computes."""
    layers = whole.causal_lm.model.layers
    all_of_it = {n: p.nbytes for n, p in layers.named_parameters() if not p.requires_grad}
    bytes_of = [sum(all_of_it[n] for n in all_of_it if n.startswith(f"{k}.")) for k in range(2)]
    assert one["at_rest"].keys() == all_of_it.keys()
    for name, held in one["at_rest"].items():
        assert held == all_of_it[name] // 2
    assert one["after"] == one["at_rest"]
    first, second = one["inside"][0]
    assert (first, second) == (bytes_of[0] // 2, bytes_of[1])


def test_only_several_processes_hold_parts(tiny_config):
    """A single process that evaluates the run later holds the whole base."""
    assert not is_sharded(tiny_config(*FSDP, *QLORA), ALONE)


def test_quantized_elsewhere_a_base_has_the_same_codes(tiny_backend, monkeypatch):
    """Each layer is converted by our hook, here with the same device, which is then removed."""
    from transformers.integrations.bitsandbytes import Bnb4bitQuantize

    asked = []
    usual, convert = quantized_linears(tiny_backend()), Bnb4bitQuantize.convert

    def counted(self, input_dict, **options):
        asked.append(list(input_dict))
        return convert(self, input_dict, **options)

    monkeypatch.setattr(Bnb4bitQuantize, "convert", counted)
    with quantizing_on(torch.device("cpu")):
        assert Bnb4bitQuantize.convert is not counted
        moved = [m.weight for m in quantized_linears(tiny_backend("seed=43")).values()]
    assert Bnb4bitQuantize.convert is counted
    assert len(asked) == len(usual)
    for ours, theirs in zip(usual.values(), moved, strict=True):
        assert torch.equal(ours.weight.data, theirs.data)
        assert torch.equal(ours.weight.quant_state.absmax, theirs.quant_state.absmax)
