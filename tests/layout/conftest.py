from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mens_exp.model import sources

# Two query heads and one key-value head of width 32.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
SHAPES = {
    "self_attn.q_proj": (64, 64),
    "self_attn.k_proj": (32, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (128, 64),
    "mlp.up_proj": (128, 64),
    "mlp.down_proj": (64, 128),
}


@pytest.fixture
def base(tmp_path):
    """Write a model directory of two layers with zero weights, one shard per layer."""
    path = tmp_path / "base"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG), "utf-8")
    sources.write_byte_level_tokenizer(path)
    weight_map = {}
    for layer in range(2):
        tensors = {
            f"model.layers.{layer}.{name}.weight": np.zeros(shape, np.float16)
            for name, shape in SHAPES.items()
        }
        save_file(tensors, path / f"shard-{layer}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"shard-{layer}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    return path
