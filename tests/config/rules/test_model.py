from __future__ import annotations

import pytest

from mens_exp.config.model import ModelFamily, RandomModel
from mens_exp.config.validate import problems_of

SOUND = {
    "llama": {},
    "llama with wide heads": {"head_dim": 48},
    "gpt2": {"family": ModelFamily.gpt2, "num_key_value_heads": 4},
    "mistral with a window": {"family": ModelFamily.mistral, "sliding_window": 1},
    "qwen3 with a window": {"family": ModelFamily.qwen3, "sliding_window": 9, "head_dim": 128},
    "eight billion": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
}
UNSOUND = {
    "width": ({"hidden_size": 96}, ["model.hidden_size"]),
    "both widths": (
        {"hidden_size": 160, "intermediate_size": 100},
        ["model.hidden_size", "model.intermediate_size"],
    ),
    "heads' width together": ({"head_dim": 24}, ["model.head_dim"]),
    "odd heads": ({"head_dim": 33, "num_attention_heads": 64}, ["model.head_dim"]),
    "uneven heads": (
        {"num_attention_heads": 3, "num_key_value_heads": 3},
        ["model.num_attention_heads"],
    ),
    "uneven groups": ({"num_key_value_heads": 3}, ["model.num_key_value_heads"]),
    "gpt2 has no groups": ({"family": ModelFamily.gpt2}, ["model.num_key_value_heads"]),
    "gpt2 has no head_dim": (
        {"family": ModelFamily.gpt2, "num_key_value_heads": 4, "head_dim": 16},
        ["model.head_dim"],
    ),
    "llama has no window": ({"sliding_window": 8}, ["model.sliding_window"]),
    "olmo2 has no window": (
        {"family": ModelFamily.olmo2, "sliding_window": 8},
        ["model.sliding_window"],
    ),
}


def wrong(tiny_config, values):
    config = tiny_config()
    config.model = RandomModel(name="random", **values)
    return [problem.where for problem in problems_of(config)]


@pytest.mark.parametrize("name", SOUND)
def test_sound_dimensions_are_accepted(tiny_config, name):
    """The shapes range from two small layers to an 8B model."""
    assert wrong(tiny_config, SOUND[name]) == []


@pytest.mark.parametrize("name", UNSOUND)
def test_unsound_dimensions_are_refused(tiny_config, name):
    """Settings that the family lacks, and sizes that 4-bit blocks do not divide, are named."""
    values, where = UNSOUND[name]
    assert wrong(tiny_config, values) == where
