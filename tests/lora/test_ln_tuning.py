"""LN tuning, compared with PEFT's on the same weights; which norms it tunes; refusals."""

from __future__ import annotations

import json
import warnings
from itertools import pairwise

import numpy as np
import pytest
import torch
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING
from safetensors.torch import load_file, save_file
from transformers_models import of_transformers

from mens_exp.artifacts.adapter_v3 import write_adapter
from mens_exp.config.model import HfModel
from mens_exp.config.validate import problems_of
from mens_exp.data.batch import packed_batch
from mens_exp.errors import DataError, Problems
from mens_exp.export.adapter import config_of_adapter, with_scale_one
from mens_exp.layout.adapter_base import base_of
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.modules import norm_modules
from mens_exp.layout.peft_adapter import manifest_of, read_peft, write_peft
from mens_exp.layout.shape import shape_of
from mens_exp.layout.starting_adapter import read as read_start
from mens_exp.layout.targets import chosen
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.checks.adapter import check_initial_adapter
from mens_exp.planning.preflight import preflight
from mens_exp.training.build import build_backend

F32 = ("quant.compute_dtype=f32",)
DENSE = ("backend=lora", "quant=none", *F32)
LENGTHS = (11, 30, 47)
# Families whose norms PEFT's default names; Qwen's are apart, see below.
KNOWN = ("llama", "mistral", "gemma2", "gemma3_text", "gpt2")


@pytest.fixture
def documents(random_documents):
    return random_documents(LENGTHS)


@pytest.fixture
def graph(tiny_config, family_base):
    """Return a function that builds the graph of a family."""

    def built(name, *overrides):
        base = family_base(name)
        config = tiny_config("lora=ln_tuning", *overrides)
        config.model = HfModel(id=str(base.directory))
        return build_backend(config, base)

    return built


def of_peft(directory, *, targets=None, **how):
    """Return PEFT's model; it warns about norms, which are no layers that it counts."""
    from peft import LNTuningConfig, get_peft_model

    model = of_transformers(directory, torch.float32, **how)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Unsupported layer type")
        config = LNTuningConfig(task_type="CAUSAL_LM", target_modules=targets)
        return get_peft_model(model, config)


def places(backend, model):
    """Yield our parameter and PEFT's for each vector of each norm."""
    for one in backend.modules_chosen:
        theirs = model.get_submodule(f"base_model.model.{one.path}")
        vector = theirs.ln_tuning_layers["default"].get_parameter(one.norm)
        yield backend.layers[one.logical].ln_tuning, vector


def filled(backend, model=None):
    """Move our norms from their initial values, and copy them into PEFT's."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in backend.trainable().values():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
        for ours, theirs in places(backend, model) if model else ():
            theirs.copy_(ours)
    return backend


def our_loss(backend, documents):
    batch = packed_batch(documents, [list(range(len(LENGTHS)))], index=0)
    backend.begin(0)
    found = CrossEntropy("causal", 64)(backend(batch), batch.targets_M, backend.head)
    return found.total / found.count


def mean_loss(model, documents):
    """Return the mean loss per token from `forward(labels=…)` on single documents."""
    total, count = 0.0, 0
    for start, end in pairwise(documents.offsets.tolist()):
        ids = torch.from_numpy(documents.ids[None, start:end]).long()
        learned = torch.from_numpy(documents.supervised[None, start:end])
        many = int(learned[:, 1:].sum())
        loss = model(input_ids=ids, labels=ids.masked_fill(~learned, -100)).loss
        total, count = total + loss * many, count + many
    return total / count


@pytest.mark.parametrize("name", KNOWN)
def test_losses_gradients_and_steps_are_those_of_a_loop_over_peft(
    name, graph, family_base, documents
):
    """With PEFT's own default targets: the same norms, and three AdamW steps in float32."""
    backend = graph(name, *DENSE).train()
    model = of_peft(family_base(name).directory).eval()  # GPT-2 drops some of its states
    filled(backend, model)
    pairs = list(places(backend, model))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert {id(theirs) for _, theirs in pairs} == {id(p) for p in trained}
    ours = torch.optim.AdamW([*backend.trainable().values()], lr=1e-2)
    theirs = torch.optim.AdamW(trained, lr=1e-2)
    for _ in range(3):
        losses = our_loss(backend, documents), mean_loss(model, documents)
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
        for optimizer, loss in zip((ours, theirs), losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
        for one, other in pairs:
            assert (one.grad - other.grad).abs().max() < 1e-5
        for optimizer in (ours, theirs):
            optimizer.step()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_on_four_bits_the_loss_is_that_of_peft(name, graph, family_base, documents):
    backend = graph(name, *F32).train()
    model = of_peft(family_base(name).directory, quant="nf4")
    filled(backend, model)
    found = our_loss(backend, documents).item()
    assert found == pytest.approx(mean_loss(model, documents).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "olmo2", "phi3", "qwen3"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_the_start_and_the_model_without_adapter_are_the_base_bit_for_bit(
    name, dtype, graph, documents, family_base
):
    """The oracle is a run's graph with other adapters, whose norms are transformers' own."""
    backend = graph(name, f"quant.compute_dtype={dtype}")
    plain = graph(name, f"quant.compute_dtype={dtype}", "lora=all_linear")
    with torch.no_grad(), plain.base_only():
        expected = our_loss(plain.eval(), documents)
    with torch.no_grad():
        assert torch.equal(our_loss(backend.eval(), documents), expected)
        filled(backend)
        assert not torch.equal(our_loss(backend, documents), expected)
        with backend.base_only():
            assert torch.equal(our_loss(backend, documents), expected)


# which norms


@pytest.mark.parametrize("name", FAMILIES)
def test_the_norms_of_a_family_are_those_of_transformers(name, family_base):
    """The oracle is each vector in transformers' model that belongs to a norm, with its size."""
    base = family_base(name)
    model = of_transformers(base.directory, torch.float32)
    expected = {
        f"{path}.{vector}": len(values)
        for path, module in model.named_modules()
        if type(module).__name__.endswith("Norm")
        for vector, values in module.named_parameters(recurse=False)
    }
    found = norm_modules(shape_of(HfModel(id=str(base.directory))))
    assert {one.parameter: one.out for one in found} == expected
    assert len({one.logical for one in found}) == len(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_group_has_the_norms_that_peft_tunes_unless_told(name, tiny_config, family_base):
    """For Qwen, PEFT names the norm after attention alone, and no norm of OLMo 2 and Phi 3."""
    config = tiny_config("lora=ln_tuning")
    found = chosen(config.lora, shape_of(HfModel(id=str(family_base(name).directory))))
    names = {one.path.rpartition(".")[2] for one in found}
    theirs = set(TRANSFORMERS_MODELS_TO_LNTUNING_TARGET_MODULES_MAPPING.get(name, ()))
    if name in KNOWN:
        assert names == theirs
    elif name.startswith("qwen"):
        assert theirs == {"post_attention_layernorm"}
        assert names == {"input_layernorm", "post_attention_layernorm", "norm"}
    else:
        assert theirs == set()
        assert "norm" in names
        assert not names & {"q_norm", "k_norm"}


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("norm", "norm"),
        ("q_norm", "l0.q_norm l1.q_norm"),
        ("*.layers.1.*norm", "l1.input_layernorm l1.post_attention_layernorm l1.q_norm l1.k_norm"),
    ],
)
def test_targets_are_names_and_globs_too(target, expected, tiny_config, family_base):
    config = tiny_config("lora=ln_tuning", f"lora.targets=['{target}']")
    found = chosen(config.lora, shape_of(HfModel(id=str(family_base("qwen3").directory))))
    assert [one.logical for one in found] == expected.split()


def saved(directory, config):
    """Save a random model of a family without a table here, with a tokenizer's file."""
    from transformers import AutoModelForCausalLM

    with quiet():
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    (directory / "tokenizer.json").write_text("{}", "utf-8")
    return HfModel(id=str(directory))


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
}


def test_norms_of_an_unknown_family_are_read_off_the_headers(tmp_path, tiny_config):
    """GPT-NeoX has two norms with a bias in each layer, and one after them; PEFT has no default."""
    from transformers import GPTNeoXConfig

    config = tiny_config("lora=ln_tuning")
    config.model = saved(tmp_path, GPTNeoXConfig(**SMALL))
    found = chosen(config.lora, shape_of(config.model))
    assert {one.parameter for one in found} == {
        *(
            f"gpt_neox.layers.{layer}.{name}.{vector}"
            for layer in (0, 1)
            for name in ("input_layernorm", "post_attention_layernorm")
            for vector in ("weight", "bias")
        ),
        "gpt_neox.final_layer_norm.weight",
        "gpt_neox.final_layer_norm.bias",
    }
    backend = build_backend(config, resolve(config.model, tmp_path))
    assert backend.trainable().keys() == {f"{one.logical}.ln_tuning" for one in found}


def test_a_model_whose_norms_have_no_weights_is_refused(tmp_path, tiny_config):
    """OLMo normalizes without a weight."""
    from transformers import OlmoConfig

    config = tiny_config("lora=ln_tuning")
    config.model = saved(tmp_path, OlmoConfig(**SMALL))
    (problem,) = [one for one in preflight(config) if one.where == "lora.variant"]
    assert "no norm with trained weights, which ln_tuning needs" in str(problem)
    assert "olmo" in str(problem)


@pytest.mark.parametrize(
    ("overrides", "where", "said"),
    [
        (("lora.targets=[q_proj]",), "lora.targets", "a name among input_layernorm"),
        (("lora.targets=[all_linear]",), "lora.targets", "adapts norms alone"),
        (("lora.targets=[norms,lm_head]",), "lora.targets", "found lm_head"),
        (("lora.variant=lora",), "lora.targets", "choose lora=ln_tuning"),
        (("lora=all_linear", "lora.variant=ln_tuning"), "lora.targets", "[norms]"),
        (("lora=mlp", "quant.skip=[norms]"), "quant.skip", "never quantized"),
        (("lora.init=pissa",), "lora.init", "does not support this initialization"),
        (("lora.init=eva",), "lora.init", "does not support this initialization"),
        (("optim=muon",), "optim", "vectors alone"),
        (("backend=burn",), "lora.variant", "no adapters of this method"),
        (
            ("lora=peft", "lora.config={peft_type:LN_TUNING}"),
            "lora.config.peft_type",
            "lora=ln_tuning",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_anything_is_loaded(
    overrides, where, said, tiny_config
):
    config = tiny_config("lora=ln_tuning", *overrides)
    problems = [*problems_of(config), *preflight(config)]
    found = [one for one in problems if one.where == where]
    assert found
    assert said in str(found[0])


# records and files


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_an_adapter_without_its_run_is_the_same_model(name, graph, tiny_config, documents):
    """Its record names the vectors, their keys in the base, and values that a copy takes over."""
    backend = filled(graph(name, *DENSE))
    config = tiny_config("lora=ln_tuning", *DENSE)
    config.model = HfModel(id=str(backend.base.directory))
    manifest, tensors = backend.adapter(config)
    assert manifest.problems("file") == []
    for layer, key in manifest.base_key_map.items():
        stored = load_file(backend.base.directory / "model.safetensors")[key]
        assert tensors[f"{layer}.ln_tuning"].shape == tuple(stored.shape)
        assert np.abs(tensors[f"{layer}.ln_tuning"] - stored.numpy()).max() > 1e-3
    again = config_of_adapter(config, manifest, backend.base, backend.shape, None)
    again.model = config.model
    fresh = build_backend(again, backend.base)
    fresh.load_adapter(with_scale_one(manifest, tensors))
    with torch.no_grad():
        losses = [our_loss(one.eval(), documents).item() for one in (backend, fresh)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3"])
def test_peft_loads_what_a_run_and_an_export_write(name, graph, tiny_config, tmp_path):
    """The logits of PEFT's model equal ours; both directories hold the same."""
    from peft import PeftModel

    targets = ["lora.targets=[norms,q_norm]"] if name == "qwen3" else []
    backend = filled(graph(name, *DENSE, *targets)).eval()
    config = tiny_config("lora=ln_tuning", *DENSE, *targets)
    config.model = HfModel(id=str(backend.base.directory))
    manifest, tensors = backend.adapter(config)
    base = base_of(config.model, tmp_path)
    backend.write_peft(tmp_path / "own")
    write_peft(tmp_path / "exported", manifest, tensors, base)
    ids = torch.arange(3, 27)[None]
    for written in (tmp_path / "own", tmp_path / "exported"):
        model = of_transformers(backend.base.directory, torch.float32)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Unsupported layer type")
            theirs = PeftModel.from_pretrained(model, written).eval()
        with torch.no_grad():
            expected = theirs(input_ids=ids).logits
            found = backend.model(input_ids=ids).logits
            with theirs.disable_adapter():
                assert (theirs(input_ids=ids).logits - expected).abs().max() > 0.01
        assert (found - expected).abs().max() < 1e-5
        after, again = manifest_of(
            read_peft(written, base.shape.family), base, manifest.quant, "written"
        )
        assert after.variant == manifest.variant
        assert after.base_key_map == manifest.base_key_map
        assert again.keys() == tensors.keys()
        assert all(np.array_equal(again[key], values) for key, values in tensors.items())
    configs = [(tmp_path / one / "adapter_config.json").read_text() for one in ("own", "exported")]
    names = [sorted(json.loads(text)["target_modules"]) for text in configs]
    assert names[0] == names[1]


def test_what_peft_itself_writes_is_read(family_base, tmp_path):
    """Its directory of GPT-2's norms is read under our names, weights and biases apart."""
    base = family_base("gpt2")
    model = of_peft(base.directory, targets=["ln_2", "transformer.ln_f"])
    model.save_pretrained(tmp_path / "theirs")
    found = read_peft(tmp_path / "theirs", FAMILIES["gpt2"])
    expected = dict(model.base_model.model.named_parameters())
    assert found.paths == {
        "l0.ln_2": "transformer.h.0.ln_2",
        "l0.ln_2_bias": "transformer.h.0.ln_2",
        "l1.ln_2": "transformer.h.1.ln_2",
        "l1.ln_2_bias": "transformer.h.1.ln_2",
        "ln_f": "transformer.ln_f",
        "ln_f_bias": "transformer.ln_f",
    }
    for logical, path in found.paths.items():
        vector = "bias" if logical.endswith("_bias") else "weight"
        theirs = expected[f"{path}.ln_tuning_layers.default.{vector}"]
        assert np.array_equal(found.tensors[f"{logical}.ln_tuning"], theirs.detach().numpy())


@pytest.mark.parametrize(
    ("config", "name", "said"),
    [
        ({"modules_to_save": ["lm_head"]}, None, "more than the vectors of norms"),
        ({}, "model.layers.0.self_attn.q_proj.ln_tuning_layers.weight", "not a norm"),
        ({}, "model.norm.ln_tuning_layers.bias", "not a norm with a bias"),
        ({}, "model.norm.lora_A.weight", "not a vector of a tuned norm"),
    ],
)
def test_a_peft_directory_with_anything_else_is_refused(config, name, said, tmp_path):
    values = {"peft_type": "LN_TUNING", "target_modules": ["norm"], **config}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values), "utf-8")
    tensors = {f"base_model.model.{name or 'model.norm.ln_tuning_layers.weight'}": torch.ones(64)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises((DataError, Problems), match=said):
        read_peft(tmp_path, FAMILIES["llama"])


def test_a_run_may_start_from_tuned_norms_in_either_form(graph, tiny_config, tmp_path):
    """The starting adapter is the same from schema v3 and from PEFT; other norms are refused."""
    backend = filled(graph("gpt2", *DENSE))
    config = tiny_config("lora=ln_tuning", *DENSE)
    config.model = HfModel(id=str(backend.base.directory))
    write_adapter(tmp_path / "v3", *backend.adapter(config))
    backend.write_peft(tmp_path / "peft")
    family = FAMILIES["gpt2"]
    ours, theirs = (read_start(tmp_path / form, family) for form in ("v3", "peft"))
    assert ours.variant == theirs.variant
    assert ours.tensors.keys() == theirs.tensors.keys() == backend.trainable().keys()
    assert all(np.array_equal(theirs.tensors[key], one) for key, one in ours.tensors.items())
    for form in ("v3", "peft"):
        config.lora.init_from = str(tmp_path / form)
        config.lora.targets = ["norms"]
        assert list(check_initial_adapter(config)) == []
        config.lora.targets = ["ln_f"]
        (problem,) = check_initial_adapter(config)
        assert "layers that this run does not train" in str(problem)
        assert "l0.ln_1_bias" in str(problem)


def test_a_model_that_reads_a_norm_s_weight_gets_the_one_in_use(graph):
    """Mamba takes the dtype of a norm from its weight; other attributes are the norm's own."""
    backend = filled(graph("gpt2", *F32))
    norm = backend.causal_lm.transformer.ln_f
    assert torch.equal(norm.weight, backend.layers["ln_f"].ln_tuning)
    assert torch.equal(norm.bias, backend.layers["ln_f_bias"].ln_tuning)
    with backend.base_only():
        assert torch.equal(norm.weight, norm.base_layer.weight)
        assert not torch.equal(norm.weight, backend.layers["ln_f"].ln_tuning)
    assert norm.eps == norm.base_layer.eps
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        norm.other  # noqa: B018


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_trained_values_are_those_of_the_base_s_format_in_every_pass(name, graph, documents):
    """In bf16 the loss is that of a model whose norms are set to the rounded values, to the bit."""
    backend = filled(graph(name)).eval()
    with torch.no_grad():
        found = our_loss(backend, documents)
        values = {n: p.clone() for n, p in backend.trainable().items()}
        for one in backend.modules_chosen:
            base = backend.causal_lm.get_submodule(one.path).base_layer.get_parameter(one.norm)
            assert base.dtype is torch.bfloat16
            base.copy_(values[f"{one.logical}.ln_tuning"])
        with backend.base_only():
            assert torch.equal(our_loss(backend, documents), found)
