"""Third-party PEFT directories: what is read and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from attacks import attack
from safetensors.numpy import save_file

from mens_exp.artifacts import untrusted_input
from mens_exp.artifacts.adapter_v3 import deltas
from mens_exp.errors import DataError, Problems
from mens_exp.layout.adapter_base import base_of
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.peft_adapter import manifest_of, read_peft, write_peft

LLAMA = FAMILIES["llama"]
QUANT = {"base_quant": "none", "double_quant": False}
Q, V = (f"base_model.model.model.layers.0.self_attn.{one}_proj" for one in "qv")


@pytest.fixture
def base(tiny_config, cache):
    """Return tiny_llama: width 64, four heads of 16, two key-value heads."""
    return base_of(tiny_config().model, cache)


def matrices(path, r, out):
    generator = np.random.default_rng(len(path) + r)
    return {
        f"{path}.lora_A.weight": generator.normal(size=(r, 64)).astype(np.float32),
        f"{path}.lora_B.weight": generator.normal(size=(out, r)).astype(np.float32),
    }


def peft_in(directory, tensors=None, **config):
    """Write a PEFT directory, by default with q of rank 2."""
    directory.mkdir(parents=True, exist_ok=True)
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    save_file(tensors or matrices(Q, 2, 64), directory / "adapter_model.safetensors")
    return directory


def scales(directory, base):
    adapter = read_peft(directory, base.shape.family)
    manifest, tensors = manifest_of(adapter, base, QUANT, str(directory))
    found = {}
    for layer, (A_RI, B_OR, scale) in deltas(manifest, tensors).items():
        path = f"base_model.model.{adapter.paths[layer]}"
        raw = adapter.tensors[f"{layer}.lora_b"] @ adapter.tensors[f"{layer}.lora_a"]
        assert path in (Q, V)
        delta = scale * (B_OR @ A_RI)
        np.testing.assert_allclose(delta / raw, (delta / raw)[0, 0], rtol=1e-3)
        found[layer] = float((delta / raw)[0, 0])
    return found


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"l0.q": 3.0, "l0.v": 3.0}),
        ({"use_rslora": True}, {"l0.q": 6 / 2**0.5, "l0.v": 6 / 2**0.5}),
        ({"alpha_pattern": {"v_proj": 2}}, {"l0.q": 3.0, "l0.v": 1.0}),
        ({"alpha_pattern": {"layers.0.*_proj": 2, "v_proj": 8}}, {"l0.q": 1.0, "l0.v": 1.0}),
        ({"lora_alpha": 0.5}, {"l0.q": 0.25, "l0.v": 0.25}),
        ({"alpha_pattern": {"q_proj": 1.5}}, {"l0.q": 0.75, "l0.v": 3.0}),
        ({"r": 8, "rank_pattern": {"^model.*": 2}}, {"l0.q": 3.0, "l0.v": 3.0}),
    ],
    ids=["plain", "rslora", "one alpha", "first pattern", "half", "fraction", "regex"],
)
def test_each_layers_scale_is_pefts(base, tmp_path, config, expected):
    """By hand: alpha over r or its root; the first matching pattern applies."""
    directory = peft_in(tmp_path / "a", matrices(Q, 2, 64) | matrices(V, 2, 32), **config)
    assert scales(directory, base) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj"], "layers_to_transform": [0], "lora_dropout": 0.1},
        {"target_modules": "(?:.*?(?:model).*?(?:q_proj).*?)", "fan_in_fan_out": False},
        {"auto_mapping": {"unsloth_fixed": True}, "peft_version": "0.18", "task_type": "CAUSAL_LM"},
        {"init_lora_weights": "gaussian", "megatron_core": "megatron.core", "modules_to_save": []},
        {"loftq_config": {"loftq_bits": 4}, "runtime_config": {"x": 1}, "qalora_group_size": 16},
    ],
)
def test_settings_that_say_how_it_was_made_are_read_over(base, tmp_path, config):
    """TRL, Unsloth and PEFT write such settings; the tensors determine the modules."""
    assert scales(peft_in(tmp_path / "a", **config), base) == pytest.approx({"l0.q": 3.0})


@pytest.mark.parametrize("form", ["base_model.model.", ""])
@pytest.mark.parametrize("end", ["", ".default"])
def test_names_with_and_without_prefix_and_adapter_are_read(base, tmp_path, form, end):
    """Some frameworks save names without them."""
    tensors = {
        name.replace("base_model.model.", form, 1).replace(".weight", f"{end}.weight"): values
        for name, values in matrices(Q, 2, 64).items()
    }
    adapter = read_peft(peft_in(tmp_path / "a", tensors), base.shape.family)
    assert adapter.paths == {"l0.q": "model.layers.0.self_attn.q_proj"}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, r"peft_type: not a LoRA adapter.*found IA3"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: .*more than LoRA.*lm_head"),
        ({"bias": "all"}, r"bias: .*more than LoRA"),
        ({"lora_bias": True}, r"lora_bias: .*more than LoRA"),
        ({"trainable_token_indices": [1]}, r"trainable_token_indices: .*more than LoRA"),
        ({"layer_replication": [[0, 2]]}, r"layer_replication: .*more than LoRA"),
        ({"a_setting_of_tomorrow": True}, r"a_setting_of_tomorrow: .*more than LoRA"),
        ({"init_lora_weights": "pissa"}, r"init_lora_weights: its initialization changed.*pissa"),
        ({"init_lora_weights": "loftq"}, r"its initialization changed.*conversion"),
        ({"r": 2.5}, r"r: wrong value.*an integer"),
        ({"r": 0}, r"r: wrong value.*more than 0"),
        ({"lora_alpha": "6"}, r"lora_alpha: wrong value"),
        ({"rank_pattern": {"q_proj": 0}}, r"rank_pattern\.q_proj: wrong value"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern\.\(: no regular expression"),
    ],
)
def test_what_is_more_or_less_than_lora_is_refused(tmp_path, config, message):
    """Each setting is named."""
    with pytest.raises((DataError, Problems), match=message):
        read_peft(peft_in(tmp_path / "a", **config), LLAMA)


@pytest.mark.parametrize("name", ["rank_pattern", "alpha_pattern"])
def test_a_pattern_that_never_ends_is_refused(base, tmp_path, monkeypatch, name):
    """A regular expression with catastrophic backtracking must not hang the reader."""
    monkeypatch.setattr(untrusted_input, "_MOST_S", 0.3)
    directory = peft_in(tmp_path, **{name: {r"([\w.]+)+!": 2}})

    def read():
        untrusted_input._WORKER.end()  # started by earlier tests with a higher limit
        return scales(directory, base)

    end = attack(read)
    assert end.how == "refused", end
    assert "adapter_config.json: the regular expression takes too long" in end.message


def test_modules_that_peft_chose_by_a_pattern_are_those_of_its_tensors(base, tmp_path):
    """The patterns that selected them are not evaluated."""
    config = {"target_modules": "(a+)+$", "exclude_modules": "(b|b)*$", "layers_pattern": "(("}
    assert scales(peft_in(tmp_path, **config), base) == {"l0.q": 3.0}


def test_several_wrong_settings_are_reported_together(tmp_path):
    """They are in one list."""
    directory = peft_in(tmp_path / "a", bias="all", modules_to_save=["lm_head"])
    with pytest.raises(Problems) as caught:
        read_peft(directory, LLAMA)
    assert len(caught.value.problems) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("base_model.model.model.embed_tokens.lora_embedding_A", "embedding table"),
        ("base_model.model.lm_head.weight", "not a matrix of a LoRA adapter"),
        ("base_model.model.lm_head.base_layer.weight", "save_embedding_layers=False"),
        (f"{Q}.lora_B.bias", "not a matrix of a LoRA adapter"),
        (
            "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight",
            "not a projection with a logical name.*modules of a llama model",
        ),
    ],
)
def test_a_tensor_that_belongs_to_no_projection_is_refused(tmp_path, name, message):
    """The error names the tensor."""
    tensors = matrices(Q, 2, 64) | {name: np.ones((2, 2), np.float32)}
    with pytest.raises(DataError, match=message) as caught:
        read_peft(peft_in(tmp_path / "a", tensors), LLAMA)
    assert name in str(caught.value)


def test_many_wrong_tensors_are_counted(tmp_path):
    """Of an adapter for another model, eight wrong tensors are shown."""
    tensors = {}
    for layer in range(10):
        tensors |= matrices(f"base_model.model.transformer.h.{layer}.attn.c_attn", 2, 64)
    with pytest.raises(Problems) as caught:
        read_peft(peft_in(tmp_path / "a", tensors), LLAMA)
    assert len(caught.value.problems) == 9
    assert "and 12 more problems of this kind" in str(caught.value)


def test_a_pickle_is_not_read(tmp_path):
    """A pickle could run code; the error says how to convert it."""
    directory = peft_in(tmp_path / "a")
    (directory / "adapter_model.safetensors").rename(directory / "adapter_model.bin")
    with pytest.raises(DataError, match=r"pickle.*safe_serialization=True"):
        read_peft(directory, LLAMA)


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (matrices(Q, 3, 64), {}, r"l0\.q\.lora_a: wrong shape.*\[3, 64\].*\[2, in\]"),
        ({f"{Q}.lora_A.weight": np.ones((2, 64), np.float32)}, {}, "missing.*l0.q.lora_b"),
        (matrices(Q, 2, 64), {"use_dora": True}, "missing.*l0.q.lora_magnitude"),
        (
            matrices(Q, 2, 64) | {f"{Q}.lora_magnitude_vector": np.ones(64, np.float32)},
            {},
            "a tensor does not belong to any layer.*lora_magnitude",
        ),
        (matrices(Q, 2, 64), {"rank_pattern": {"q_proj": 1}}, r"expected \[1, in\]"),
    ],
    ids=["rank", "half", "no lengths", "lengths", "pattern"],
)
def test_tensors_that_the_settings_do_not_mean_are_refused(
    base,
    tmp_path,
    tensors,
    config,
    message,
):
    """Ranks, missing halves and magnitudes are checked."""
    adapter = read_peft(peft_in(tmp_path / "a", tensors, **config), base.shape.family)
    with pytest.raises((DataError, Problems), match=message):
        manifest_of(adapter, base, QUANT, "a")


@pytest.mark.parametrize(
    ("config", "patterns"),
    [
        ({}, {}),
        ({"rank_pattern": {"v_proj": 2}, "r": 4}, {"rank_pattern"}),
        ({"alpha_pattern": {"v_proj": 2}}, {"alpha_pattern"}),
        ({"use_rslora": True}, set()),
        ({"lora_alpha": 0.5}, set()),
    ],
)
def test_written_again_the_settings_mean_the_same(base, tmp_path, config, patterns):
    """The scale of each layer stays, and patterns are full paths only where needed."""
    r = 4 if "rank_pattern" in config else 2
    tensors = matrices(Q, r, 64) | matrices(V, 2, 32)
    before = peft_in(tmp_path / "a", tensors, **config)
    adapter = read_peft(before, base.shape.family)
    write_peft(tmp_path / "b", *manifest_of(adapter, base, QUANT, "a"), base)
    again = read_peft(tmp_path / "b", base.shape.family)
    for layer, path in adapter.paths.items():
        for half in ("lora_a", "lora_b"):
            name = f"{layer}.{half}"
            factor = 1.0
            if half == "lora_b":
                factor = adapter.settings.scale_of(path) / again.settings.scale_of(path)
            np.testing.assert_allclose(
                again.tensors[name], factor * adapter.tensors[name], rtol=1e-6
            )
    written = json.loads((tmp_path / "b" / "adapter_config.json").read_text("utf-8"))
    assert {name for name in ("rank_pattern", "alpha_pattern") if written[name]} == set(patterns)


def test_the_directory_is_the_same_bytes_each_time(base, tmp_path):
    """Keys are sorted in both files."""
    adapter = read_peft(peft_in(tmp_path / "a"), base.shape.family)
    for name in ("b", "c"):
        write_peft(tmp_path / name, *manifest_of(adapter, base, QUANT, "a"), base)
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "b" / file).read_bytes() == (tmp_path / "c" / file).read_bytes()


def test_modules_are_named_as_briefly_as_they_can_be(base, tmp_path):
    """Last names are used if they match no other module, and paths otherwise."""
    every = {}
    for layer in range(base.shape.num_hidden_layers):
        every |= matrices(Q.replace(".0.", f".{layer}."), 2, 64)
    for tensors, expected in (
        (every, ["q_proj"]),
        (matrices(Q, 2, 64), ["model.layers.0.self_attn.q_proj"]),
    ):
        adapter = read_peft(peft_in(tmp_path / "a", tensors), base.shape.family)
        write_peft(tmp_path / "b", *manifest_of(adapter, base, QUANT, "a"), base)
        written = json.loads((tmp_path / "b" / "adapter_config.json").read_text("utf-8"))
        assert written["target_modules"] == expected
