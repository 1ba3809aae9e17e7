"""Facts about an adapter's base model that are known without its weights."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mens_exp.artifacts.adapter_v3 import AdapterManifest
from mens_exp.config.model import HfModel
from mens_exp.errors import SetupError
from mens_exp.layout import hub
from mens_exp.layout.adapter_base import base_of


@pytest.fixture
def llama_8b(tiny_config, monkeypatch, tmp_path):
    """Return Llama-3.1-8B from the shipped dimensions, with the hub unreachable."""

    def away(model_id, revision):
        raise SetupError(f"the hub cannot be reached for {model_id} at {revision}")

    monkeypatch.setattr(hub, "commit_of", away)
    return base_of(tiny_config("model=llama3_8b").model, tmp_path)


def test_an_adapter_of_llama_8b_is_168_megabytes(llama_8b):
    """Rank 16 on seven projections of 32 layers takes 168 MB in float32 and 84 MB in bf16."""
    sizes = [
        16 * (one.width + one.out)
        for one in llama_8b.modules.values()
        if one.layer is not None and one.norm is None
    ]
    assert (len(sizes), sum(sizes)) == (224, 41_943_040)
    assert round(4 * sum(sizes) / 1e6) == 168
    assert round(2 * sum(sizes) / 1e6) == 84


def test_a_model_that_is_not_here_has_its_usual_keys(llama_8b):
    """The head has its own key, and the name is the hub's."""
    assert llama_8b.embed_key == "model.embed_tokens.weight"
    assert llama_8b.key_of("l31.down") == "model.layers.31.mlp.down_proj.weight"
    assert llama_8b.key_of("lm_head") == "lm_head.weight"
    assert llama_8b.name == "meta-llama/Llama-3.1-8B-Instruct"


def test_a_model_that_is_not_made_yet_has_the_keys_that_it_will_have(
    tiny_config, tiny_base, cache, tmp_path
):
    """The keys equal those of the directory once it is written."""
    model = tiny_config().model
    made, unmade = base_of(model, cache), base_of(model, tmp_path)
    assert made.keys is not unmade.keys
    for layer in made.modules:
        assert made.key_of(layer) == unmade.key_of(layer)
    assert made.embed_key == unmade.embed_key


def test_a_tied_head_is_the_embedding_table(family_base, tmp_path):
    """gpt2's checkpoint has no head."""
    base = base_of(HfModel(id=str(family_base("gpt2").directory)), tmp_path)
    assert base.key_of("lm_head") == base.embed_key == "transformer.wte.weight"


def test_a_checkpoint_saved_without_its_head_keeps_its_short_keys(family_base, tmp_path):
    """The hub's gpt2 has keys such as `h.0…` and not `transformer.h.0…`."""
    place = shutil.copytree(family_base("gpt2").directory, tmp_path / "gpt2")
    file = place / "model.safetensors"
    short = {name.removeprefix("transformer."): one for name, one in load_file(file).items()}
    save_file(short, file, metadata={"format": "pt"})
    base = base_of(HfModel(id=str(place)), tmp_path)
    assert base.key_of("l0.qkv") == "h.0.attn.c_attn.weight"
    assert base.embed_key == "wte.weight"
    assert base.modules["l0.qkv"].path == "transformer.h.0.attn.c_attn"


def adapter(base, **changes):
    values = {
        "adapter_method": "lora",
        "quant": {"base_quant": "none", "double_quant": False},
        "base_key_map": {"l0.k": base.key_of("l0.k")},
        "layer_order": ["l0.k"],
        "vocab": base.shape.vocab_size,
        "d_model": base.shape.hidden_size,
        "rank": 2,
        "alpha": 2,
    }
    tensors = {"a": np.ones((2, 64), np.float32), "b": np.ones((32, 2), np.float32)}
    manifest = AdapterManifest(**(values | changes))
    named = {
        f"{layer}.lora_{half}": tensors[half] for layer in manifest.layer_order for half in "ab"
    }
    return manifest, named


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"vocab": 99}, ["a: vocab"]),
        ({"d_model": 96, "vocab": 99}, ["a: vocab", "a: d_model"]),
        ({"layer_order": ["l9.k"], "base_key_map": {"l9.k": "k"}}, ["a"]),
        ({"base_key_map": {"l0.k": "h.0.k.weight"}}, ["a: base_key_map.l0.k"]),
        (
            {"layer_order": ["l0.q"], "base_key_map": {"l0.q": "q"}},
            ["a: base_key_map.l0.q", "a: l0.q"],
        ),
    ],
)
def test_what_the_base_does_not_have_is_named(
    tiny_config,
    cache,
    changes,
    expected,
):
    """Sizes, layers, keys and shapes are checked; k is [32, 64] there and q is [64, 64]."""
    base = base_of(tiny_config().model, cache)
    found = base.problems(*adapter(base, **changes), "a")
    assert [problem.where for problem in found] == expected
