from __future__ import annotations

import dataclasses

import pytest

from mens_exp.config.lora import LoraConfig, LoraVariant
from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.errors import ConfigError, Problems
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.shape import Shape
from mens_exp.layout.targets import (
    GROUPS,
    adapter_parameters,
    chosen,
    described,
    pattern_values,
    quantized_modules,
    target_problems,
)


def shape(family="llama", layers=12, **changes):
    """Return a model of widths 12, 20, 12 and 4, so that confused dimensions show."""
    sizes = {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": layers,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 4,
        "vocab_size": 100,
        "max_position_embeddings": 64,
        "tied": False,
    }
    return Shape(family=FAMILIES[family], **sizes | changes)


def lora(*targets, **changes):
    return LoraConfig(name="test", targets=list(targets), **changes)


def names(targets, family="llama", layers=1):
    return [one.logical for one in chosen(lora(*targets), shape(family, layers))]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("attention", "l0.q l0.k l0.v l0.o"),
        ("qkv", "l0.q l0.k l0.v"),
        ("qv", "l0.q l0.v"),
        ("o_proj", "l0.o"),
        ("mlp", "l0.gate l0.up l0.down"),
        ("all_linear", "l0.q l0.k l0.v l0.o l0.gate l0.up l0.down"),
        ("lm_head", "lm_head"),
        ("q_proj", "l0.q"),
        ("self_attn.q_proj", "l0.q"),
        ("layers.0.mlp.up_proj", "l0.up"),
        ("*.q_proj", "l0.q"),
        ("*", "l0.q l0.k l0.v l0.o l0.gate l0.up l0.down lm_head"),
    ],
)
def test_target_of_a_llama_matches(target, expected):
    """Groups, last names and globs match; only lm_head and `*` include the head."""
    assert names([target]) == expected.split()


@pytest.mark.parametrize(
    ("family", "target", "expected"),
    [
        ("phi3", "attention", "l0.qkv l0.o"),
        ("phi3", "qkv", "l0.qkv"),
        ("phi3", "mlp", "l0.gate_up l0.down"),
        ("gpt2", "all_linear", "l0.qkv l0.o l0.fc l0.proj"),
        ("gpt2", "o_proj", "l0.o"),
        ("gpt2", "c_proj", "l0.o l0.proj"),
        ("gpt2", "attn.c_proj", "l0.o"),
        ("gemma2", "qv", "l0.q l0.v"),
    ],
)
def test_groups_mean_the_same_in_families_of_other_names(family, target, expected):
    """`o_proj` is the name or the group, depending on the family."""
    assert names([target], family) == expected.split()


@pytest.mark.parametrize("family", ["phi3", "gpt2"])
def test_query_and_value_alone_cannot_be_had_of_a_fused_module(family):
    """The message says why, and which modules exist."""
    with pytest.raises(ConfigError, match="query, key and value in one module") as caught:
        chosen(lora("qv"), shape(family))
    assert caught.value.where == "lora.targets"
    assert "qkv" in str(caught.value.expected)


def test_globs_choose_layers():
    """`[0-1]` and `1?` match digits of the whole layer number."""
    assert names(["model.layers.[0-1].*.q_proj"], layers=12) == ["l0.q", "l1.q"]
    assert names(["*.layers.1?.mlp.down_proj"], layers=12) == ["l10.down", "l11.down"]
    assert names(["*.layers.1.*.v_proj"], layers=12) == ["l1.v"]


def test_overlapping_targets_count_once_in_the_model_s_order():
    """The order of the targets does not matter."""
    assert names(["mlp", "up_proj", "q_proj"]) == ["l0.q", "l0.gate", "l0.up", "l0.down"]


@pytest.mark.parametrize(
    ("target", "hint"),
    [
        ("q_porj", "the nearest is q_proj"),
        ("atention", "the nearest is attention"),
        ("*.layers.12.*", "a glob over paths such as model.layers.0.self_attn.q_proj"),
        ("proj", "expected"),
        ("q", "expected"),
    ],
)
def test_target_that_matches_nothing_is_refused(target, hint):
    """A part of a name does not match; the error gives the nearest name."""
    with pytest.raises(ConfigError, match="matches no linear module") as caught:
        chosen(lora("q_proj", target), shape())
    assert (caught.value.where, caught.value.found) == ("lora.targets", target)
    assert hint in str(caught.value)


def test_targets_that_match_nothing_are_told_together():
    """Two bad targets are two problems."""
    with pytest.raises(Problems) as caught:
        chosen(lora("a_proj", "b_proj"), shape())
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_pattern_that_matches_no_adapted_module_is_refused(name):
    """A pattern must match a target, not just a module of the model."""
    assert target_problems(lora("attention", **{name: {"q_proj": 4, "qv": 8}}), shape()) == []
    (problem,) = target_problems(lora("attention", **{name: {"up_proj": 4}}), shape())
    assert (problem.where, problem.found) == (f"lora.{name}", "up_proj")
    assert "or a glob" in str(problem.expected)


def test_the_last_pattern_that_matches_counts():
    """A general pattern may be followed by an exception."""
    modules = chosen(lora("qv"), shape(layers=2))
    values = pattern_values(
        {"*": 4, "v_proj": 2, "*.layers.1.*": 8}, modules, shape().family, usual=16
    )
    assert list(values.values()) == [4, 2, 8, 8]


@pytest.mark.parametrize(
    ("targets", "changes", "count"),
    [
        (["q_proj"], {"r": 1}, 2 * 24),
        (["q_proj", "k_proj"], {"r": 2}, 2 * 2 * (24 + 16)),
        (["down_proj"], {"r": 4}, 2 * 4 * 32),
        (["lm_head"], {"r": 3}, 3 * 112),
        (["q_proj"], {"r": 1, "rank_pattern": {"*.1.*": 5}}, 24 + 5 * 24),
        (["q_proj"], {"r": 1, "variant": LoraVariant.dora}, 2 * (24 + 12)),
        (["x"], {"r": 8}, 0),
    ],
)
def test_adapter_parameters_are_r_times_in_plus_out(targets, changes, count):
    """Each module of two layers counts by its rank; DoRA adds a magnitude per output."""
    assert adapter_parameters(lora(*targets, **changes), shape(layers=2)) == count


def test_llama_8b_has_the_adapter_that_its_users_know():
    """Llama-3.1-8B at r 16 on seven projections has 41,943,040 parameters."""
    llama = shape(
        layers=32,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=128256,
    )
    assert adapter_parameters(lora("all_linear", r=16), llama) == 41_943_040


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (["qv"], "q, v in 12 of 12 layers: 24 modules"),
        (["qv", "*.layers.3.mlp.up_proj"], "q, v in 12 of 12 layers; up in 1 of 12 layers: 25"),
        (["lm_head"], "lm_head: 1 module"),
        (["o_proj", "lm_head"], "o in 12 of 12 layers; lm_head: 13 modules"),
    ],
)
def test_what_matched_is_said_in_a_line(targets, expected):
    """Kinds in the same layers are grouped."""
    assert described(chosen(lora(*targets), shape()), 12).startswith(expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_a_model_are_one_to_one(family):
    """Paths and logical names are unique; groups contain only known names."""
    modules = linear_modules(shape(family, 2))
    assert len({one.path for one in modules}) == len({one.logical for one in modules})
    assert len(modules) == 2 * len(FAMILIES[family].projections) + 1
    kinds = {one.kind for one in modules}
    assert all(set(members) <= kinds for members in FAMILIES[family].groups.values())
    assert FAMILIES[family].groups.keys() <= set(GROUPS)


@pytest.mark.parametrize("setting", ["type_pattern", "block_size_pattern", "double_quant_pattern"])
def test_a_pattern_for_skipped_modules_alone_is_refused(setting):
    """A pattern that also matches a quantized module applies to that one."""
    value = {"type_pattern": QuantType.fp4, "block_size_pattern": 64, "double_quant_pattern": False}
    many = shape(layers=2)
    skip, pattern = ["*.layers.0.self_attn.o_proj"], "*.layers.0.*.o_proj"
    quant = QuantConfig(quant_type=QuantType.nf4, skip=skip, **{setting: {pattern: value[setting]}})
    with pytest.raises(ConfigError, match=r"only modules that quant\.skip leaves") as found:
        quantized_modules(quant, many)
    assert found.value.where == f"quant.{setting}"
    both = dataclasses.replace(quant, **{setting: {"o_proj": value[setting]}})
    stored = quantized_modules(both, many)
    assert len(stored) == 13
    name = setting.removesuffix("_pattern").replace("type", "quant_type")
    (kept,) = (one for path, one in stored.items() if "o_proj" in path)
    assert getattr(kept, name) == value[setting]
