"""QLoRA, compared with transformers' loader and PEFT's reader."""

from __future__ import annotations

import json
from importlib import metadata

import pytest
import torch

from mens_exp.backends import frozen_base
from mens_exp.data.batch import packed_batch
from mens_exp.errors import ConfigError, Problems, SetupError
from mens_exp.model.kernels import has_bf16
from mens_exp.model.quiet import quiet
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.kernels import Part
from mens_exp.quant.bnb import quantization_config
from mens_exp.quant.layers import keep_trainable

F32 = "quant.compute_dtype=f32"
LAYER = {"q": 64, "k": 32, "v": 32, "o": 64, "gate": 128, "up": 128, "down": 64}  # out_features


def plain_base(config, base):
    """Load the base with the libraries alone and eager attention."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            base.directory,
            dtype=torch.float32,
            quantization_config=quantization_config(config.quant),
            attn_implementation="eager",
        )
    keep_trainable(model)  # repacked weights compute in bf16
    return model.eval()


def ours_on(backend, ids, documents_of):
    """Return the logits at every token of one document except the last."""
    encoded = documents_of([ids], [[0] + [1] * (len(ids) - 1)])
    backend.eval()
    with torch.no_grad():
        return backend.head(backend(packed_batch(encoded, [[0]], index=0)))


@pytest.mark.parametrize(
    "overrides", [[], ["quant=fp4"], ["quant=int8"], ["quant.double_quant=false"]]
)
def test_a_fresh_graph_is_the_quantized_base(
    tiny_backend,
    tiny_base,
    tiny_config,
    documents_of,
    overrides,
):
    """In float32, logits at step 0 equal those of transformers' own 4-bit model."""
    ids = list(range(3, 40))
    theirs = plain_base(tiny_config(F32, *overrides), tiny_base)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    found = ours_on(tiny_backend(F32, *overrides), ids, documents_of)
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("overrides", [[], ["lora=qv", "lora.r=4", "lora.alpha=32"]])
def test_peft_reads_the_adapter_back_on_its_own_base(
    tiny_backend,
    tiny_base,
    tiny_config,
    documents_of,
    tmp_path,
    overrides,
):
    """PeftModel.from_pretrained on the 4-bit base gives the trained graph's logits in float32."""
    from peft import PeftModel

    backend = tiny_backend(F32, *overrides, live=True)
    backend.write_peft(tmp_path / "peft")
    ids = list(range(3, 40))
    base = plain_base(tiny_config(F32, *overrides), tiny_base)
    with torch.no_grad():
        untuned = base(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        theirs = PeftModel.from_pretrained(base, tmp_path / "peft").eval()
        expected = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
    assert (untuned - expected).abs().max() > 0.1
    assert (ours_on(backend, ids, documents_of) - expected).abs().max() <= 1e-5


def test_the_peft_directory_holds_the_adapter_and_nothing_else(tiny_backend, tmp_path):
    """It has configuration and matrices; an existing directory is replaced as a whole."""
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "old").touch()
    tiny_backend("lora.r=4", "lora.alpha=8").write_peft(tmp_path / "peft")
    names = sorted(file.name for file in (tmp_path / "peft").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text("utf-8"))
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8, 0.05)
    assert config["inference_mode"] is True


def test_the_manifest_describes_the_adapter(
    tiny_backend,
    tiny_base,
    tiny_config,
):
    """Logical names map to the checkpoint's keys; shapes and base are recorded."""
    overrides = ["lora=qv", "lora.r=4", "lora.alpha=8", "quant=fp4", "quant.double_quant=false"]
    manifest, tensors = tiny_backend(*overrides).adapter(tiny_config(*overrides))
    assert manifest.layer_order == ["l0.q", "l0.v", "l1.q", "l1.v"]
    assert manifest.base_key_map["l1.v"] == "model.layers.1.self_attn.v_proj.weight"
    assert (manifest.rank, manifest.alpha, manifest.vocab, manifest.d_model) == (4, 8, 320, 64)
    assert manifest.quant == {"base_quant": "fp4", "double_quant": False}
    assert manifest.base_model == "tiny_llama"
    assert manifest.mens_exp is not None
    library = manifest.mens_exp["quantizer"].pop("library")
    assert library == f"bitsandbytes {metadata.version('bitsandbytes')}"
    assert manifest.mens_exp == {
        "base_weights_sha256": tiny_base.weights_sha256,
        "embed_key": "model.embed_tokens.weight",
        "quantizer": {
            "quant_type": "fp4",
            "block_size": 64,
            "double_quant": False,
            "compute_dtype": "bf16",
            "rounded_to": "bf16",
            "skip": [],
        },
        "variant": "lora",
        "init": {
            "name": "default",
            "doubled_rank": False,
            "exactness": "the trained model is this adapter on the plainly quantized base",
        },
    }
    assert {name: values.shape for name, values in tensors.items()} == {
        f"l{layer}.{leaf}.lora_{which}": shape
        for layer in (0, 1)
        for leaf in "qv"
        for which, shape in (("a", (4, 64)), ("b", (LAYER[leaf], 4)))
    }


def test_facts_are_what_was_built(tiny_backend):
    """By hand: 94,528 weights, and 16 · (inputs + outputs) for each of 14 projections."""
    assert tiny_backend().facts() == {
        "trainable_parameters": 32_768,
        "trainable_matrices": 28,
        "total_parameters": 94_528 + 32_768,
        "n_layers": 2,
        "n_heads": 4,
        "d_model": 64,
        "vocab_size": 320,
        "quantized_linears": 14,
        "quant": "nf4",
        "block_size": 64,
        "double_quant": True,
        "storage_dtype": "uint8",
        "compute_dtype": "bfloat16",
        "gradient_checkpointing": False,
        "attention": "mens_documents",
        "lora_modules": "q, k, v, o, gate, up, down in 2 of 2 layers: 14 modules",
        "lora_variant": "lora",
        "lora_init": "default",
        "kernels": dict.fromkeys(map(str, Part), "torch: the device is not a CUDA GPU"),
        "numerics": {
            "adapters": "projections of an input together 1",
            "attention": "blocks of queries 2",
            "dropout": "SFC64, 15 bits",
            "products": "own" if has_bf16("cpu") else "rounded from f32",
        },
    }


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["quant=fp4"], {"quant": "fp4"}),
        (["quant.double_quant=false"], {"double_quant": False}),
        ([F32], {"compute_dtype": "float32"}),
        (["lora=qv"], {"trainable_matrices": 8, "trainable_parameters": 2 * 16 * (128 + 96)}),
        (["lora.r=1"], {"trainable_parameters": 2048}),
    ],
)
def test_each_setting_shows_in_the_facts(tiny_backend, overrides, expected):
    """Each override is visible in the facts read from the graph."""
    facts = tiny_backend(*overrides).facts()
    assert {key: facts[key] for key in expected} == expected


def test_alpha_over_r_scales_the_update(tiny_backend, documents_of):
    """Doubling alpha equals doubling B: the logits agree in float32."""
    doubled = tiny_backend(F32, "lora.alpha=32", live=True)
    plain = tiny_backend(F32, "lora.alpha=16", live=True)
    ids = list(range(3, 20))
    before = ours_on(plain, ids, documents_of)
    with torch.no_grad():
        for name, parameter in plain.trainable().items():
            if name.endswith("lora_b"):
                parameter.mul_(2)
    found, expected = (ours_on(backend, ids, documents_of) for backend in (doubled, plain))
    assert (before - expected).abs().max() > 1e-3
    assert (found - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("targets", ["[nope_proj]", "[q_proj,q_porj]", "['*.layers.2.*']"])
def test_targets_that_match_nothing_are_refused(tiny_backend, targets):
    """Another matching target does not help; the error gives the nearest name."""
    with pytest.raises(ConfigError, match=r"lora\.targets: matches no linear.*expected"):
        tiny_backend(f"lora.targets={targets}")


def test_all_targets_that_match_nothing_are_reported_together(
    tiny_backend,
):
    """Two misspelled names are two problems in one message."""
    with pytest.raises(Problems, match=r"found up_porj(.|\n)*found q_porj"):
        tiny_backend("lora.targets=[up_porj,q_porj]")


def test_a_model_without_four_bit_layers_is_refused(tiny_backend, monkeypatch):
    """A loader that does not quantize must not pass as QLoRA."""
    monkeypatch.setattr(frozen_base, "quantization_config", lambda config, skip, weights: None)
    with pytest.raises(SetupError, match="no linear layer was quantized"):
        tiny_backend()


@pytest.mark.parametrize("compute", ["bf16", "f32"])
def test_the_head_and_the_norms_stay_in_the_compute_format(tiny_backend, compute):
    """Casting them to float32 would cost 2 GB on an 8B model."""
    backend = tiny_backend(f"quant.compute_dtype={compute}")
    expected = {"bf16": torch.bfloat16, "f32": torch.float32}[compute]
    ours = {id(p) for p in backend.trainable().values()}
    base = {p.dtype for p in backend.parameters() if id(p) not in ours}
    assert base == {torch.uint8, expected}


@pytest.mark.filterwarnings("ignore:bitsandbytes..gemv_4bit. an autograd kernel was not registered")
def test_a_repacking_kernel_left_on_would_change_the_gradients(
    tiny_backend,
    random_documents,
    monkeypatch,
):
    """Control for DESIGN.md: without the guard, a validation changes later gradients."""
    import bitsandbytes

    repacks = getattr(bitsandbytes.functional, "has_avx512bf16", lambda: False)()
    if not repacks or not has_bf16("cpu"):  # limited to AVX2, evaluation does not use that kernel
        pytest.skip("needs a CPU with avx512_bf16 and a bitsandbytes that repacks weights for it")
    monkeypatch.setattr(frozen_base, "keep_trainable", lambda model: None)
    backend = tiny_backend(live=True)
    batch = packed_batch(random_documents([20]), [[0]], index=0)

    def gradient():
        backend.train().zero_grad()
        backend.begin(0)
        CrossEntropy("causal", 4)(backend(batch), batch.targets_M, backend.head).total.backward()
        found = backend.trainable()["l0.down.lora_b"].grad
        assert found is not None
        return found.clone()

    before = gradient()
    backend.eval()
    with torch.inference_mode():
        backend(batch)
    assert (gradient() - before).norm() > 0.05 * before.norm()


@pytest.mark.parametrize("compute", ["bf16", "f32"])
@pytest.mark.parametrize(("targets", "expected"), [("all_linear", 8), ("qv", 2), ("mlp", 4)])
def test_one_mask_is_drawn_for_each_layer_input(
    tiny_backend,
    random_documents,
    monkeypatch,
    compute,
    targets,
    expected,
):
    """Projections with one input share it: q/k/v, o, gate/up and down in two layers make eight."""
    from mens_exp.lora import keyed

    draw, keys = keyed.Mask.draw, []

    def counted(mask, like):
        keys.append(mask.key)
        return draw(mask, like)

    monkeypatch.setattr(keyed.Mask, "draw", counted)
    backend = tiny_backend(f"lora={targets}", f"quant.compute_dtype={compute}").train()
    backend(packed_batch(random_documents([9]), [[0]], index=0))
    assert len(keys) == len(set(keys)) == expected


def test_the_longest_sequence_is_the_checkpoint_s(
    tiny_backend,
):
    """It is 2,048 in tiny_llama's configuration."""
    assert tiny_backend().max_positions == 2048
