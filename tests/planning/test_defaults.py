from __future__ import annotations

import pytest

from mens_exp.config.compose import compose, typed
from mens_exp.planning.learned_settings import non_default_settings


def changed(*overrides):
    return non_default_settings(typed(compose([overrides])[0].values), overrides)


# Rows of PEERS, table 2.2, in which the tools differ from mens_exp, and learning rates of the
# releases that the presets name: value there, value here.
PEERS = {
    "trl_like": {
        "data.seq_len": (1024, 512),
        "lora.alpha": (32, 16),
        "lora.targets": (["qv"], ["all_linear"]),
        "optim.lr": (2e-5, 2e-3),
        "quant.compute_dtype": ("f32", "bf16"),
        "quant.double_quant": (False, True),
    },
    "unsloth_like": {
        "data.seq_len": (2048, 512),
        "lora.dropout": (0.0, 0.05),
        "optim.lr": (5e-5, 2e-3),
        "seed": (3407, 42),
    },
    "axolotl_like": {"lora.dropout": (0.0, 0.05)},
    "litgpt_like": {
        "lora.r": (8, 16),
        "lora.targets": (["qv"], ["all_linear"]),
        "optim.lr": (1e-3, 2e-3),
        "quant.double_quant": (False, True),
        "seed": (1337, 42),
    },
}


@pytest.mark.parametrize("preset", PEERS)
def test_preset_of_a_peer_differs_where_the_table_does(preset):
    """There are no other differences."""
    expected = {
        path: {"found": theirs, "default": ours} for path, (theirs, ours) in PEERS[preset].items()
    }
    assert changed(f"preset={preset}") == expected


def test_axolotl_s_codes_lie_in_bf16():
    """The storage dtype of quantized codes does not affect training, so it is no difference."""
    config = typed(compose([["preset=axolotl_like"]])[0].values)
    assert config.quant.storage_dtype.value == "bf16"


def test_override_over_a_preset_is_what_counts():
    """An override back to the default value is no difference; a new value is one."""
    found = changed("preset=litgpt_like", "seed=42", "optim.lr=1e-5")
    assert found.keys() == {"lora.r", "lora.targets", "quant.double_quant", "optim.lr"}


def test_setting_that_our_defaults_lack_has_no_default_beside_it():
    """The path of the rows is an example."""
    assert changed("data=jsonl", "data.path=r.jsonl")["data.path"] == {"found": "r.jsonl"}


@pytest.mark.parametrize(
    "overrides", [(), ("task=plan",), ("task=plan", "hydra.run.dir=x"), ("seed=42",)]
)
def test_command_that_says_nothing_differs_in_nothing(tiny_config, overrides):
    """The first three commands do not even compose the defaults."""
    assert changed(*overrides) == {}
    if overrides != ("seed=42",):
        assert non_default_settings(tiny_config("lora.r=3"), overrides) == {}


def test_command_that_is_not_known_is_compared_in_full(
    tiny_config,
):
    """For a resumed run with other settings, the original command does not count."""
    assert non_default_settings(tiny_config("lora.r=3"), None)["lora.r"] == {
        "default": 16,
        "found": 3,
    }
