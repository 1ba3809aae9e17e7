"""Rank allocation during training, compared with PEFT's AdaLoRA step by step; refusals."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.validate import problems_of
from mens_exp.data.batch import packed_batch
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.activations import Documents
from mens_exp.planning.forecast import disk
from mens_exp.planning.memory import memory
from mens_exp.training.adalora import RankAllocation

DENSE = ("lora=adalora", "backend=lora", "quant=none", "quant.compute_dtype=f32")
SIZES = ("lora.r=6", "lora.target_r=3", "lora.alpha=8")
WHEN = ("lora.allocate_after_steps=1", "lora.allocate_every_n_steps=2", "lora.settle_steps=2")
STEPS = 8
LENGTHS = (11, 30, 47)
PARTS = {"adalora_a": "lora_A", "adalora_e": "lora_E", "adalora_b": "lora_B"}


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


def of_peft(directory):
    """Return PEFT's model with the same settings."""
    from peft import AdaLoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = AdaLoraConfig(
        init_r=6,
        target_r=3,
        lora_alpha=8,
        tinit=1,
        tfinal=2,
        deltaT=2,
        total_step=STEPS,
        task_type="CAUSAL_LM",  # otherwise PEFT leaves out its penalty
        target_modules=names,
    )
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return get_peft_model(model, settings).train()


def pairs(backend, model):
    """Return our parameter and PEFT's for each layer and part."""
    layers = dict(model.named_modules())
    return [
        (ours, getattr(layers[f"base_model.model.{one.path}"], PARTS[part])["default"])
        for one in backend.modules_chosen
        for part, ours in backend.method.parameters(backend.layers[one.logical]).items()
    ]


def their_loss(model, documents):
    """Return the mean loss, with the penalty that PEFT adds to each document's loss."""
    total, count, penalty = 0.0, 0, None
    for start, end in pairwise(documents.offsets.tolist()):
        ids = torch.from_numpy(documents.ids[None, start:end]).long()
        learned = torch.from_numpy(documents.supervised[None, start:end])
        labels = ids.masked_fill(~learned, -100)
        plain = model.get_base_model()(input_ids=ids, labels=labels).loss
        penalty = model(input_ids=ids, labels=labels).loss - plain
        many = int(learned[:, 1:].sum())
        total, count = total + plain * many, count + many
    return total / count, penalty


def our_loss(backend, documents):
    batch = packed_batch(documents, [list(range(len(LENGTHS)))], index=0)
    backend.begin(0)
    found = CrossEntropy("causal", 64)(backend(batch), batch.targets_M, backend.head)
    return found.total / found.count


def test_steps_and_ranks_are_those_of_a_loop_over_peft(
    tiny_backend, tiny_config, tiny_base, documents
):
    """All steps of a run agree: before, during and after the reduction of ranks."""
    settings = (*DENSE, *SIZES, *WHEN)
    backend = tiny_backend(*settings).train()
    model = of_peft(tiny_base.directory)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for ours, theirs in pairs(backend, model):
            ours.add_(torch.randn(ours.shape, generator=generator) * 0.05)
            theirs.copy_(ours.reshape(theirs.shape))
    ranks = RankAllocation(tiny_config(*settings).lora, backend.trainable(), total_steps=STEPS)
    ours = torch.optim.SGD([*backend.trainable().values()], lr=0.05)
    theirs = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    zeros = []
    for step in range(STEPS):
        (loss, penalty), found = their_loss(model, documents), our_loss(backend, documents)
        assert found.item() == pytest.approx(loss.item(), rel=1e-5)
        ours.zero_grad()
        found.backward()
        ranks.pull()
        ours.step()
        ranks.update(step)
        (loss + penalty).backward()
        theirs.step()
        model.base_model.update_and_allocate(step)
        theirs.zero_grad()
        for one, other in pairs(backend, model):
            assert (one - other.reshape(one.shape)).abs().max() < 1e-5
        factors = [one for name, one in backend.trainable().items() if name.endswith("_e")]
        zeros.append(sum(int((one == 0).sum()) for one in factors))
        assert sum(int((one == 0).sum()) for one, _ in pairs(backend, model)) == zeros[-1]
    many = len(backend.modules_chosen)
    assert zeros[0] == 0
    assert zeros[-1] == many * 3  # initial rank 6, of which 3 remain on average
    assert len({int((one == 0).sum()) for one in factors}) > 1  # but not in each layer


@pytest.mark.parametrize("when", [WHEN, ("lora.allocate_every_n_steps=3",)])
def test_a_state_continues_with_the_same_steps(tiny_backend, tiny_config, documents, when):
    """With the saved averages and masks the same ranks are removed."""
    settings = (*DENSE, *SIZES, *when)

    def trained(stop):
        backend = tiny_backend(*settings).train()
        lora, parameters = tiny_config(*settings).lora, backend.trainable()
        with torch.no_grad():
            for name, one in parameters.items():
                if name.endswith("_e"):
                    one.fill_(0.1)
        ranks = RankAllocation(lora, parameters, total_steps=STEPS)
        optimizer = torch.optim.SGD([*parameters.values()], lr=0.05)
        for step in range(STEPS):
            if step == stop:
                state = ranks.state_dict()
                ranks = RankAllocation(lora, parameters, total_steps=STEPS)
                ranks.load_state_dict(state)
            optimizer.zero_grad()
            our_loss(backend, documents).backward()
            ranks.pull()
            optimizer.step()
            ranks.update(step)
        return parameters

    whole = trained(None)
    factors = [one for name, one in whole.items() if name.endswith("_e")]
    assert sum(int((one != 0).sum()) for one in factors) == 3 * len(factors)
    for stop in (3, 7):
        again = trained(stop)
        assert all(torch.equal(one, again[name]) for name, one in whole.items())


def test_a_run_ends_with_the_ranks_that_it_was_asked_for(train_in, tmp_path):
    """After four steps, numbered from 0, 4 of 12 ranks per layer remain on average."""
    run = train_in(tmp_path / "run", "lora=adalora", "lora.target_r=4", "lora.settle_steps=1")
    _, tensors = read_adapter(run.adapter)
    factors = [values for name, values in tensors.items() if name.endswith("_e")]
    assert len(factors) == 14
    assert sum(int((one != 0).sum()) for one in factors) == 14 * 4


@pytest.mark.parametrize("every", [1, 10, 100])
def test_ranks_are_pruned_however_seldom_they_are_allocated(train_in, tmp_path, every):
    """Without steps to settle in, the steps since the last allocation had revived ranks."""
    words = ("lora=adalora", "lora.r=6", "lora.target_r=4", "optim.lr=5e-3")
    when = (f"lora.allocate_every_n_steps={every}", "trainer.max_steps=24")
    run = train_in(tmp_path / "run", *words, *when)
    _, tensors = read_adapter(run.adapter)
    factors = [values for name, values in tensors.items() if name.endswith("_e")]
    assert sum(int((one != 0).sum()) for one in factors) == 14 * 4
    assert Manifest.read(run.manifest).results["ranks_left"] == 14 * 4


def test_the_plan_counts_what_is_kept_of_each_value(tiny_backend, tiny_config, documents):
    """By hand: importance and two averages per value after a step; the state has the averages."""
    config, backend = tiny_config(*DENSE, *SIZES), tiny_backend(*DENSE, *SIZES).train()
    ranks = RankAllocation(config.lora, backend.trainable(), total_steps=STEPS)
    our_loss(backend, documents).backward()
    ranks.update(0)
    kept = [getattr(ranks.allocator, name) for name in ("ipt", "exp_avg_ipt", "exp_avg_unc")]
    held = sum(4 * one.numel() for values in kept for one in values.values())
    lengths = Documents(longest=100, typical=100)
    planned = memory(config, backend.shape, lengths, kind="cpu").components
    assert planned["importance of ranks"] == held
    state = ranks.state_dict()
    averages = sum(
        4 * one.numel() for name in state if name != "left" for one in state[name].values()
    )
    plain = tiny_config("backend=lora", "quant=none", "lora.r=6")
    sizes = [disk(one, backend.shape, Path(), 10).checkpoint for one in (config, plain)]
    factors = 4 * 6 * len(backend.modules_chosen)  # and two moments each
    assert sizes[0] - sizes[1] == averages + 3 * factors


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (("lora.target_r=12",), "lora.target_r"),
        (("trainer.max_steps=4", *WHEN, "lora.settle_steps=3"), "lora.allocate_after_steps"),
        (("optim=schedule_free", "schedule=constant"), "optim"),
        (("backend=proxy",), "lora.variant"),
        (("lora.init=eva",), "lora.init"),
    ],
)
def test_what_leaves_nothing_to_allocate_is_refused(overrides, where, tiny_config):
    """The error comes before anything is loaded."""
    assert where in {one.where for one in problems_of(tiny_config("lora=adalora", *overrides))}


def test_a_run_of_too_few_steps_is_refused(train_in, tmp_path, capsys):
    """If only the rows determine the number of steps, the error comes before loading the model."""
    epoch = ("trainer.max_steps=null", "trainer.max_epochs=1", "checkpoint.every_n_steps=1")
    words = ("lora=adalora", *epoch, "lora.allocate_after_steps=3", "lora.settle_steps=3")
    run = train_in(tmp_path / "run", *words, code=2)
    said = capsys.readouterr()
    assert "lora.allocate_after_steps: no steps are left to allocate ranks in" in said.err
    assert "loading the base model" not in said.out + said.err
    assert not run.adapter.exists()
