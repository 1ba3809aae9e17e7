"""The tensors that a merge changes, and adapters that do not belong to the base."""

from __future__ import annotations

import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from mens_exp.layout.adapter_base import (
    AdaptedLayer,
    dtype_of,
    is_transposed,
    layer_problems,
    places,
    stored_key,
    untied,
)

LLAMA = {
    "model.embed_tokens.weight": (4, 3),
    "model.layers.0.self_attn.q_proj.weight": (6, 3),
    "model.layers.1.self_attn.q_proj.weight": (6, 3),
}
GPT2 = {"wte.weight": (4, 3), "h.0.attn.c_attn.weight": (3, 9), "h.0.attn.bias": (1,)}


def shard_of(directory, shapes, dtype=np.float32):
    path = directory / "a.safetensors"
    save_file({name: np.ones(shape, dtype) for name, shape in shapes.items()}, path)
    return path


def layer(logical, key, shape=(6, 3)):
    return AdaptedLayer(logical=logical, key=key, shape=shape)


Q0 = layer("l0.q", "model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (
            [Q0, layer("l1.qkv", "transformer.h.1.attn.c_attn.weight")],
            r"of several model families.*gpt2.*llama",
        ),
        (
            [layer("l0.qkv", "h.0.attn.c_attn.weight", (9, 3))],
            "adapter and base are of different model families.*adapter of gpt2, a base of llama",
        ),
        (
            [layer("l2.q", "model.layers.2.self_attn.q_proj.weight")],
            r"l2\.q: the base has no such tensor.*layers\.2.*all its shards",
        ),
        (
            [layer("l0.q", "model.layers.0.self_attn.q_proj.weight", (3, 6))],
            r"does not fit.*found \[6, 3\].*expected \[3, 6\]",
        ),
        (
            [layer("l0.q", "model.layers.1.self_attn.q_proj.weight")],
            r"different decoder layers.*layers\.1.*expected a key of layer 0",
        ),
        (
            [
                layer("mid0", "model.layers.1.self_attn.q_proj.weight"),
                layer("mid1", "model.layers.0.self_attn.q_proj.weight"),
            ],
            r"not in the base's order.*mid1 is model\.layers\.0.*after 1",
        ),
    ],
)
def test_an_adapter_of_something_else_is_refused(layers, reason, tmp_path):
    """Each error gives the value found and a remedy."""
    (problem,) = layer_problems(layers, [shard_of(tmp_path, LLAMA)], "adapter")
    assert re.search(reason, str(problem)), str(problem)


def test_a_quantized_tensor_cannot_be_merged_into(tmp_path):
    """4-bit codes are packed in bytes."""
    shard = shard_of(tmp_path, LLAMA, np.uint8)
    (problem,) = layer_problems([Q0], [shard], "adapter")
    assert "found U8" in str(problem)
    assert "unquantized" in str(problem)


def test_an_adapter_of_the_base_has_no_problems(tmp_path):
    """The checkpoint may lack its prefix or be transposed."""
    layers = [Q0, layer("lm_head", "model.embed_tokens.weight", (4, 3))]
    assert layer_problems(layers, [shard_of(tmp_path, LLAMA)], "adapter") == []
    gpt2 = [layer("l0.qkv", "transformer.h.0.attn.c_attn.weight", (9, 3))]
    assert layer_problems(gpt2, [shard_of(tmp_path, GPT2)], "adapter") == []


@pytest.mark.parametrize(
    ("key", "found"),
    [("a.b", None), ("model.x", "model.x"), ("transformer.h", "h"), ("y", "model.y")],
)
def test_names_may_differ_in_their_first_part(key, found):
    """Either the adapter or the base may have been saved without its head."""
    assert stored_key(key, {"model.x", "h", "model.y"}) == found


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("h.11.mlp.c_proj.weight", True),
        ("transformer.h.0.attn.c_attn.weight", True),
        ("transformer.h.0.attn.c_attn.bias", False),
        ("transformer.wte.weight", False),
        ("transformer.h.0.self_attention.dense.weight", False),
        ("model.layers.0.self_attn.o_proj.weight", False),
    ],
)
def test_only_gpt2_s_projections_are_transposed(key, expected):
    """Falcon's and BLOOM's keys start like GPT-2's but are of Linear layers."""
    assert is_transposed(key) is expected


def by_name(found):
    return {one.name: one for listed in found.values() for one in listed}


def test_a_subset_holds_the_merged_tensors_alone(tmp_path):
    """A head that was tied to the embedding has its own name."""
    head = layer("lm_head", "model.embed_tokens.weight", (4, 3))
    assert untied(head)
    found = by_name(places([Q0, head], [shard_of(tmp_path, LLAMA)], only_merged=True))
    assert {name: one.logical for name, one in found.items()} == {
        Q0.key: "l0.q",
        "lm_head.weight": "lm_head",
    }
    assert found["lm_head.weight"].key == head.key


def test_a_new_head_stands_beside_every_tensor_of_the_base(tmp_path):
    """The embedding table keeps its name, and nothing is merged into it."""
    head = layer("lm_head", "transformer.wte.weight", (4, 3))
    found = by_name(places([head], [shard_of(tmp_path, GPT2)], only_merged=False))
    assert found.keys() == {"lm_head.weight", *GPT2}
    assert found["wte.weight"].logical is None
    assert found["lm_head.weight"].key == "wte.weight"


def test_a_head_that_stays_tied_is_merged_into_the_table(tmp_path):
    """The tensor has the table's name, and no other is written."""
    head = layer("lm_head", "transformer.wte.weight", (4, 3))
    shards = [shard_of(tmp_path, GPT2)]
    found = by_name(places([head], shards, only_merged=False, unties=False))
    assert found.keys() == GPT2.keys()
    assert {name: one.logical for name, one in found.items() if one.logical} == {
        "wte.weight": "lm_head"
    }


def test_a_base_keeps_its_precision(tmp_path):
    """bf16 is kept if all tensors have it; everything else becomes float32 without loss."""
    shard = shard_of(tmp_path, GPT2, np.float16)
    assert dtype_of(one.info for one in places([], [shard], only_merged=False)[shard]) == "F32"
