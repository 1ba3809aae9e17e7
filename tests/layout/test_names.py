from __future__ import annotations

import pytest

from mens_exp.errors import ModelFileError
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.shape import base_key, logical_name

LLAMA, GPT2, PHI3 = FAMILIES["llama"], FAMILIES["gpt2"], FAMILIES["phi3"]
LAYER = "model.layers.12"
PEFT = "base_model.model."


@pytest.mark.parametrize(
    ("path", "family", "name"),
    [
        (f"{LAYER}.self_attn.q_proj", "llama", "l12.q"),
        (f"{LAYER}.self_attn.k_proj", "mistral", "l12.k"),
        (f"{LAYER}.self_attn.v_proj", "qwen2", "l12.v"),
        (f"{LAYER}.self_attn.o_proj", "qwen3", "l12.o"),
        (f"{LAYER}.mlp.gate_proj", "gemma2", "l12.gate"),
        (f"{LAYER}.mlp.up_proj", "olmo2", "l12.up"),
        (f"{LAYER}.mlp.down_proj", "llama", "l12.down"),
        (f"{LAYER}.self_attn.qkv_proj", "phi3", "l12.qkv"),
        (f"{LAYER}.mlp.gate_up_proj", "phi3", "l12.gate_up"),
        ("transformer.h.3.attn.c_attn", "gpt2", "l3.qkv"),
        ("transformer.h.3.attn.c_proj", "gpt2", "l3.o"),
        ("transformer.h.3.mlp.c_fc", "gpt2", "l3.fc"),
        ("transformer.h.3.mlp.c_proj", "gpt2", "l3.proj"),
        ("lm_head", "llama", "lm_head"),
    ],
)
def test_projection_has_its_logical_name(path, family, name):
    """The name is that of the adapter schema, with or without PEFT's prefix."""
    assert logical_name(path, FAMILIES[family]) == name
    assert logical_name(PEFT + path, FAMILIES[family]) == name
    assert base_key(PEFT + path, FAMILIES[family], {f"{path}.weight"}) == f"{path}.weight"


@pytest.mark.parametrize(
    "path",
    [
        "model.layers.0.self_attn",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.x.mlp.up_proj",
        "model.layers.0.mlp.up_proj.lora_A",
        "model.layers.0.cross_attn.q_proj",
        "transformer.h.0.mlp.c_fc",
    ],
)
def test_other_module_has_none(path):
    """Similar names and names of other families have none."""
    with pytest.raises(ModelFileError, match="not a projection with a logical name"):
        logical_name(path, LLAMA)


def test_a_checkpoint_saved_without_its_head_lacks_the_first_part_of_each_name():
    """The existing key without the prefix is used."""
    assert base_key("transformer.h.3.mlp.c_fc", GPT2, {"h.3.mlp.c_fc.weight"}) == (
        "h.3.mlp.c_fc.weight"
    )


def test_a_tied_head_is_the_embedding_table():
    """If the head has its own key, that is used."""
    embedding = "model.embed_tokens.weight"
    assert base_key("lm_head", LLAMA, {embedding}) == embedding
    assert base_key("lm_head", LLAMA, {embedding, "lm_head.weight"}) == "lm_head.weight"
    assert base_key("lm_head", GPT2, {"wte.weight"}) == "wte.weight"


def test_a_module_that_the_checkpoint_lacks_is_refused():
    """There is no weight to add a delta to."""
    with pytest.raises(ModelFileError, match="no weight of this module"):
        base_key("model.layers.0.mlp.up_proj", LLAMA, {"model.layers.1.mlp.up_proj.weight"})
