"""Adapters on the experts of a mixture, compared with transformers and PEFT alone.

PEFT adapts a tensor that holds every expert through ``target_parameters``. The references here
name those tensors themselves, from the model that transformers loads.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from families import make_tiny
from safetensors.torch import load_file

from mens_exp.config.model import HfModel
from mens_exp.errors import DataError, MensError
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.quant.layers import quantized_linears

# PEFT warns about every pattern that matches experts, and follows it: ranks are checked below.
pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys did not")
# Experts stored separately as w1, w3, w2; as gate, up, down; and in one tensor.
MIXTURES = ("mixtral", "phimoe", "qwen3_moe", "qwen2_moe", "olmoe", "granitemoe")
mixtures = pytest.mark.parametrize("name", MIXTURES)
ATTENTION = ["k_proj", "o_proj", "q_proj", "v_proj"]


@pytest.fixture(scope="session")
def mixture(tmp_path_factory):
    """Save a tiny mixture of experts, whose experts are narrower than the hidden state."""
    made = {}

    def saved(name):
        if name not in made:
            sizes = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
            if name in ("mixtral", "phimoe", "olmoe", "granitemoe"):
                sizes = {"intermediate_size": 48}
            made[name] = make_tiny(name, tmp_path_factory.mktemp(name) / "model", **sizes)
        return made[name]

    return saved


@pytest.fixture(scope="session")
def mixture_config(tiny_config, mixture):
    """Compose a run on a mixture with an unquantized base in float32."""

    def composed(name, *overrides):
        usual = ("lora=experts", "backend=lora", "quant=none", "quant.compute_dtype=f32")
        config = tiny_config(*usual, "data.packing=false", "lora.r=3", *overrides)
        config.model = HfModel(id=str(mixture(name)))
        return config

    return composed


@pytest.fixture(scope="session")
def mixture_backend(mixture_config, tmp_path_factory):
    """Build the graph of a mixture with random A and B."""
    from mens_exp.model.sources import resolve
    from mens_exp.training.build import build_backend

    root = tmp_path_factory.mktemp("resolved")

    def built(name, *overrides):
        config = mixture_config(name, *overrides)
        backend = build_backend(config, resolve(config.model, root))
        generator = torch.Generator().manual_seed(0)
        for parameter in backend.trainable().values():
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        return backend

    return built


def published(directory, **options):
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", **{"dtype": torch.float32, **options}
        ).eval()


def by_peft(directory, modules=(), **settings):
    """Adapt a model with PEFT alone: given modules and all three-dimensional tensors."""
    from peft import LoraConfig, get_peft_model

    model = published(directory)
    stacks = [name for name, one in model.named_parameters() if one.dim() == 3]
    assert len(stacks) == 4  # gate_up and down in each of two layers
    wanted = {"r": 3, "lora_alpha": 16, "lora_dropout": 0.0, **settings}
    with quiet():
        return get_peft_model(
            model, LoraConfig(target_modules=list(modules), target_parameters=stacks, **wanted)
        ).eval()


def of_directory(directory, base, **options):
    from peft import PeftModel

    with quiet():
        return PeftModel.from_pretrained(published(base, **options), directory).eval()


def copied(backend, peft):
    """Copy our matrices into a PEFT model by their paths."""
    theirs = dict(peft.named_parameters())
    ours = {n: p for n, p in backend.model.named_parameters() if "lora_" in n}
    assert ours.keys() == {name for name in theirs if "lora_" in name}
    with torch.no_grad():
        for name, parameter in ours.items():
            theirs[name].copy_(parameter)
    return {name: (parameter, theirs[name]) for name, parameter in ours.items()}


def loss_of(model, documents):
    total = 0.0
    for start, end in zip(documents.offsets, documents.offsets[1:], strict=False):
        ids = torch.from_numpy(documents.ids[start:end]).long()[None]
        mean = model(input_ids=ids, labels=ids, use_cache=False).loss
        total = total + mean * (ids.shape[1] - 1) if ids.shape[1] > 1 else total
    return total


def our_loss(backend, batch):
    return CrossEntropy("test", 48)(backend(batch), batch.targets_M, backend.head).total


@mixtures
@pytest.mark.parametrize(
    ("overrides", "modules"),
    [((), ()), (("lora.targets=[attention,experts]", "lora.variant=rslora"), ATTENTION)],
    ids=["experts", "with attention, rslora"],
)
def test_loss_gradient_and_a_step_are_those_of_peft_alone(
    name, overrides, modules, mixture, mixture_backend, family_documents, padded_documents
):
    """Over two AdamW steps from the same matrices, losses, gradients and matrices agree."""
    backend = mixture_backend(name, *overrides)
    peft = by_peft(mixture(name), modules, use_rslora=bool(modules))
    pairs = copied(backend, peft)
    optimizers = [
        torch.optim.AdamW([pair[side] for pair in pairs.values()], lr=1e-2) for side in (0, 1)
    ]
    for _ in range(2):
        backend.begin(0)
        ours, theirs = our_loss(backend.train(), padded_documents), loss_of(peft, family_documents)
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
        for optimizer, loss in zip(optimizers, (ours, theirs), strict=True):
            optimizer.zero_grad()
            loss.backward()
        for path, (own, other) in pairs.items():
            assert own.grad.norm() > 0, path
            assert (own.grad - other.grad).norm() <= 1e-4 * other.grad.norm(), path
        for optimizer in optimizers:
            optimizer.step()
    for path, (own, other) in pairs.items():
        assert torch.allclose(own, other, atol=1e-4), path


@mixtures
def test_a_peft_directory_gives_the_trained_logits_in_peft_alone(
    name, mixture, mixture_backend, family_documents, padded_documents, tmp_path
):
    """One of the two tensors of a layer may have its own rank and alpha."""
    backend = mixture_backend(
        name,
        "lora.targets=[attention,experts]",
        "lora.rank_pattern={experts.down_proj:5}",
        "lora.alpha_pattern={experts.gate_up_proj:40}",
    ).eval()
    backend.write_peft(tmp_path / "peft")
    theirs = of_directory(tmp_path / "peft", mixture(name))
    ranks = {p.shape[0] // 4 for n, p in theirs.named_parameters() if "experts.lora_A" in n}
    assert ranks == {5}
    with torch.no_grad():
        ours = our_loss(backend, padded_documents)
        assert ours.item() == pytest.approx(loss_of(theirs, family_documents).item(), rel=1e-5)
        plain = loss_of(published(mixture(name)), family_documents)
    assert abs(ours.item() - plain.item()) > 0.05


def merged_by_hand(manifest, tensors, directory):
    """Add ``(B @ A) · alpha / rank`` to each named tensor, using only the schema."""
    weights = load_file(directory / "model.safetensors")
    for layer, key in manifest.base_key_map.items():
        A, B = (torch.from_numpy(tensors[f"{layer}.lora_{which}"]) for which in "ab")
        delta = (B.double() @ A.double()) * manifest.alpha / manifest.rank
        assert delta.shape == weights[key].shape, layer
        weights[key] = (weights[key].double() + delta).float()
    return weights


@mixtures
def test_the_schema_s_deltas_are_those_that_peft_merges(
    name, mixture, mixture_backend, mixture_config, tmp_path
):
    """Each tensor of the checkpoint has its own layer in the schema."""
    backend = mixture_backend(name, "lora.targets=[attention,experts]")
    manifest, tensors = backend.adapter(mixture_config(name, "lora.targets=[attention,experts]"))
    assert manifest.problems("here") == []
    backend.write_peft(tmp_path / "peft")
    theirs = of_directory(tmp_path / "peft", mixture(name)).merge_and_unload()
    theirs.save_pretrained(tmp_path / "merged")
    expected = load_file(tmp_path / "merged" / "model.safetensors")
    found = merged_by_hand(manifest, tensors, mixture(name))
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert torch.allclose(found[key], values, atol=1e-6), key


@mixtures
def test_an_adapter_goes_out_and_comes_back(name, mixture_backend, mixture_config):
    """It round-trips bit for bit into a graph with other matrices."""
    first, second = mixture_backend(name), mixture_backend(name)
    for parameter in second.trainable().values():
        parameter.data.zero_()
    second.load_adapter(first.adapter(mixture_config(name))[1])
    for path, parameter in first.trainable().items():
        assert torch.equal(parameter, second.trainable()[path]), path


@mixtures
def test_the_plan_counts_what_peft_trains(name, mixture, mixture_config, mixture_backend):
    """The oracle is PEFT's own count of trainable parameters, and the base's of expert weights."""
    from mens_exp.layout.shape import shape_of
    from mens_exp.layout.targets import adapter_parameters

    overrides = ("lora.targets=[attention,experts]",)
    config = mixture_config(name, *overrides)
    peft = by_peft(mixture(name), ATTENTION)
    counted = adapter_parameters(config.lora, shape_of(config.model))
    assert counted == peft.get_nb_trainable_parameters()[0]
    assert mixture_backend(name, *overrides).facts()["trainable_parameters"] == counted
    held = sum(one.numel() for one in published(mixture(name)).parameters() if one.dim() == 3)
    assert shape_of(config.model).expert_parameters == held


@mixtures
def test_a_directory_of_peft_s_own_is_read_and_written(
    name, mixture, mixture_config, mixture_backend, tmp_path
):
    """A directory made by PEFT, read as schema v3 and written, adapts the same tensors in PEFT."""
    from mens_exp.layout.adapter_base import base_of
    from mens_exp.layout.peft_adapter import manifest_of, read_peft, write_peft

    config = mixture_config(name)
    backend = mixture_backend(name, "lora.targets=[attention,experts]")
    peft = by_peft(mixture(name), ATTENTION)
    copied(backend, peft)
    peft.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    base = base_of(config.model, tmp_path)
    adapter = read_peft(tmp_path / "theirs", base.shape.family)
    unquantized = {"base_quant": "none", "double_quant": False}
    manifest, tensors = manifest_of(adapter, base, unquantized, "theirs")
    assert base.problems(manifest, tensors, "theirs") == []
    expected = backend.adapter(mixture_config(name, "lora.targets=[attention,experts]"))[1]
    assert tensors.keys() == expected.keys()
    assert all((tensors[key] == values).all() for key, values in expected.items())
    write_peft(tmp_path / "ours", manifest, tensors, base)
    first, second = (
        load_file(tmp_path / one / "adapter_model.safetensors") for one in ("theirs", "ours")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], values) for key, values in second.items())
    reread = of_directory(tmp_path / "ours", mixture(name))
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(reread(input_ids=ids).logits, peft(input_ids=ids).logits)


@pytest.mark.parametrize("quant", ["nf4", "int8"])
def test_experts_of_a_quantized_base_stay_as_they_are(
    quant, mixture, mixture_config, mixture_backend, family_documents, padded_documents, tmp_path
):
    """Only attention is quantized, and the record says so."""
    from transformers import BitsAndBytesConfig

    overrides = ("backend=qlora", f"quant={quant}", "quant.compute_dtype=f32")
    backend = mixture_backend("qwen3_moe", *overrides).eval()
    facts = backend.facts()
    assert facts["expert_dtype"] == "float32"
    assert facts["expert_parameters"] == 2 * 4 * 3 * 48 * 64
    assert facts["quantized_linears"] == len(quantized_linears(backend.model)) == 8
    if quant == "int8":
        return  # 8-bit layers quantize their inputs, see tests/backends/test_int8.py
    backend.write_peft(tmp_path / "peft")
    alone = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    )
    theirs = of_directory(tmp_path / "peft", mixture("qwen3_moe"), quantization_config=alone)
    for module in quantized_linears(theirs).values():
        module.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        ours = our_loss(backend, padded_documents)
        assert ours.item() == pytest.approx(loss_of(theirs, family_documents).item(), rel=1e-5)


def test_experts_that_no_pair_of_peft_holds_are_refused(mixture_backend, mixture_config, tmp_path):
    """Separate A for gate and up, one expert without an adapter, or other ranks do not fit."""
    from mens_exp.layout.adapter_base import base_of
    from mens_exp.layout.peft_adapter import read_peft, write_peft

    config, backend = mixture_config("mixtral"), mixture_backend("mixtral")
    base = base_of(config.model, tmp_path)
    manifest, tensors = backend.adapter(config)
    gate = "l0.block_sparse_moe_experts_1_w1"
    apart = tensors | {f"{gate}.lora_a": tensors[f"{gate}.lora_a"] + 1}
    with pytest.raises(DataError, match="gate and up of an expert are adapted separately"):
        write_peft(tmp_path / "apart", manifest, apart, base)
    with pytest.raises(DataError, match="adapted separately"):
        backend.load_adapter(apart)
    fewer = replace(manifest, layer_order=[one for one in manifest.layer_order if one != gate])
    with pytest.raises(DataError, match="all experts of a layer or none"):
        write_peft(tmp_path / "fewer", fewer, tensors, base)
    write_peft(tmp_path / "peft", manifest, tensors, base)
    settings = tmp_path / "peft" / "adapter_config.json"
    settings.write_text(settings.read_text("utf-8").replace('"r": 3', '"r": 6'), "utf-8")
    with pytest.raises(MensError, match="the pair is not that of the experts"):
        read_peft(tmp_path / "peft", base.shape.family)
    assert not (tmp_path / "apart").exists()
    assert not (tmp_path / "fewer").exists()
