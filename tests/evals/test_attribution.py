from __future__ import annotations

import dataclasses

import pytest
import torch

from mens_exp.backends.forward import hidden_states
from mens_exp.backends.frozen_base import load_base
from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.data.batch import packed_batch
from mens_exp.evals.attribution import (
    Replay,
    Subject,
    attribute_modules,
    attribute_whole,
    mixture_of,
    parity_with,
    replaced,
)
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import shape_of
from mens_exp.model.sources import resolve
from mens_exp.quant.round_trip import stored_as, variant_of, variants_of

PLANTED = "model.layers.1.mlp.up_proj"


@pytest.fixture
def config(family_config):
    return family_config("llama")


@pytest.fixture
def subject(config, tmp_path, random_documents):
    """Return a small Llama in float32 with two packed batches."""
    documents = random_documents([30, 25, 40])
    shape = shape_of(config.model)
    plain = dataclasses.replace(config, quant=QuantConfig(quant_type=QuantType.none))
    base = resolve(config.model, tmp_path)
    model = load_base(plain, base, torch.device("cpu"), dtype=torch.float32).eval()
    batches = [packed_batch(documents, blocks, i) for i, blocks in enumerate([[[0, 1]], [[2]]])]
    return Subject(
        replay=Replay(model, shape.family.layers, batches, chunk_tokens=64),
        modules=[one for one in linear_modules(shape) if one.layer is not None],
        variants=variants_of(config.quant),
        transposed=False,
    )


def plant(subject):
    """Make a module hard to quantize: scale one column by 1,000 and its input by 1/1,000."""
    layer = subject.replay.causal_lm.model.layers[1]
    with torch.no_grad():
        layer.mlp.up_proj.weight[:, 0] *= 1000
        layer.post_attention_layernorm.weight[0] /= 1000
    batches, layers = subject.replay.batches, "model.layers"
    subject.replay.__init__(  # the reference is the planted model
        subject.replay.causal_lm, layers, batches, chunk_tokens=64
    )


def test_module_that_is_hard_to_quantize_ranks_first(subject):
    """Most values in its blocks quantize to zero, and no other module has a KL near its own."""
    plant(subject)
    records = {one["path"]: one for one in attribute_modules(subject)}
    planted = records.pop(PLANTED)
    assert planted["rank"] == 1
    assert planted["share"] > 0.5
    errors = [one["variants"]["nf4_double"]["activation_error"] or 0 for one in records.values()]
    others = [one["kl"] for one in records.values()]
    assert planted["kl"] > 3 * max(others)
    assert max(errors) < 0.05


def test_loss_change_is_that_of_a_plain_forward_with_one_module_replaced(subject, config):
    """The oracle is torch's loss over all logits, with and without each module replaced."""
    model, batches = subject.replay.causal_lm, subject.replay.batches

    def loss():
        with torch.inference_mode():
            scores = torch.cat([model.lm_head(hidden_states(model, batch)) for batch in batches])
        targets = torch.cat([batch.targets_M for batch in batches])
        return float(torch.nn.functional.cross_entropy(scores.double(), targets))

    before = loss()
    for record in attribute_modules(subject):
        module = model.get_submodule(record["path"])
        stored_OI = stored_as(module.weight.data, config.quant).values
        with replaced(module, stored_OI, transposed=False):
            change = loss() - before
        assert record["loss_change"] == pytest.approx(change, abs=1e-6), record["path"]


def test_shares_sum_to_one_and_ranks_follow_kl(subject):
    """There is one record per module in model order, and progress is reported after each."""
    told = []
    records = attribute_modules(subject, told.append)
    assert [one["path"] for one in records] == [one.path for one in subject.modules]
    assert told == list(range(1, len(records) + 1))
    assert sum(one["share"] for one in records) == pytest.approx(1)
    ranked = sorted(records, key=lambda one: one["rank"])
    assert [one["rank"] for one in ranked] == list(range(1, len(records) + 1))
    assert [one["kl"] for one in ranked] == sorted((one["kl"] for one in records), reverse=True)


def test_double_quantization_has_its_own_part(subject):
    """Double quantization changes the SQNR and takes under 4.5 bits; fp4 has a higher KL."""
    for one in attribute_modules(subject):
        double, plain = one["variants"]["nf4_double"], one["variants"]["nf4"]
        assert double["sqnr_db"] != plain["sqnr_db"]
        assert double["bits_per_parameter"] < plain["bits_per_parameter"] == 4.5
    whole = attribute_whole(subject)
    assert whole.keys() == {"nf4_double", "nf4", "fp4_double"}
    assert whole["nf4"]["bits_per_parameter"] == 4.5
    assert whole["nf4_double"]["kl"] != whole["nf4"]["kl"]
    assert whole["fp4_double"]["kl"] > whole["nf4_double"]["kl"]


def test_all_modules_at_once_are_the_model_that_training_loads(subject, config, tmp_path):
    """Replaced weights and bitsandbytes layers give the same KL in float32 up to rounding."""
    loaded = load_base(config, resolve(config.model, tmp_path), torch.device("cpu"))
    parity = parity_with(loaded, subject.replay, (0, 20))
    whole = attribute_whole(subject)["nf4_double"]
    assert parity["mean_kl"] == pytest.approx(whole["kl"], rel=1e-3)
    assert parity["nll_difference"] == pytest.approx(whole["loss_change"], abs=1e-5)
    assert 0 < parity["mean_kl"] <= parity["p99_kl"] <= parity["max_kl"]
    assert [one["first"] for one in parity["by_position"]] == [0, 20]
    assert sum(one["tokens"] for one in parity["by_position"]) == parity["tokens"]


def test_a_mixture_is_the_model_that_training_loads(subject, config, tmp_path):
    """Loading its type_pattern gives the same KL; each module's KL is that of its quantizer."""
    others = [variant_of(config.quant.of(one)) for one in (QuantType.nf2, QuantType.nf8)]
    (configured, *rest) = subject.variants
    mixed = ("nf4_double", "nf2", "nf8")
    wider = dataclasses.replace(subject, variants=[configured, *rest, *others], mixed=mixed)
    records = attribute_modules(wider)
    (nf2, _) = others
    alone = attribute_modules(dataclasses.replace(subject, variants=[nf2]))
    assert [one["variants"]["nf2"]["kl"] for one in records] == [one["kl"] for one in alone]
    assert [one["variants"]["nf4_double"]["kl"] for one in records] == [
        one["kl"] for one in records
    ]
    assert "kl" not in records[0]["variants"]["fp4_double"]

    mixture = mixture_of(wider, records, budget_bits=4)
    assert set(mixture["variants"].values()) == {"nf2", "nf4_double"}
    assert mixture["whole"]["bits_per_parameter"] <= 4
    (override,) = mixture["overrides"]
    listed = override.removeprefix("quant.type_pattern={").removesuffix("}").split(",")
    pattern = {name: QuantType(one) for name, one in (text.split(":") for text in listed)}
    quant = dataclasses.replace(config.quant, type_pattern=pattern)
    told = dataclasses.replace(config, quant=quant)
    loaded = load_base(told, resolve(config.model, tmp_path), torch.device("cpu"))
    parity = parity_with(loaded, subject.replay, (0,))
    assert parity["mean_kl"] == pytest.approx(mixture["whole"]["kl"], rel=1e-3)


def test_model_is_unquantized_afterwards(subject):
    """All weights are restored: the reference output is bitwise equal again."""
    attribute_modules(subject)
    attribute_whole(subject)
    again = list(subject.replay.hidden_from(0))
    assert all(map(torch.equal, again, subject.replay.reference_MD))
