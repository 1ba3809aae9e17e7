"""Weights read from a directory, compared with those that transformers loads."""

from __future__ import annotations

import pytest
import torch

from mens_exp.errors import ModelFileError
from mens_exp.layout.families import FAMILIES
from mens_exp.model import sources
from mens_exp.model.quiet import quiet
from mens_exp.model.stored_weights import StoredWeights

CPU = torch.device("cpu")


def test_a_projection_is_read_as_linear_has_it(tiny_base):
    """The shape is outputs by inputs, in float32."""
    from transformers import AutoModelForCausalLM

    with quiet():
        model = AutoModelForCausalLM.from_pretrained(tiny_base.directory)
    weights = StoredWeights(tiny_base.directory, FAMILIES["llama"])
    found = weights.read("model.layers.1.self_attn.k_proj", CPU)
    assert found.shape == (32, 64)
    assert found.dtype == torch.float32
    assert torch.equal(found, model.model.layers[1].self_attn.k_proj.weight)


@pytest.mark.parametrize("shards", ["1MB", "20KB"])
def test_gpt2_s_transposed_weights_are_turned(tmp_path, shards):
    """The stored ``[in, out]`` is transposed; from one file and several, saved in bf16."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    with quiet():
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=2, n_head=2, vocab_size=320))
        model.bfloat16().save_pretrained(tmp_path, max_shard_size=shards)
    sources.write_byte_level_tokenizer(tmp_path)
    weights = StoredWeights(tmp_path, FAMILIES["gpt2"])
    for path in ("attn.c_attn", "attn.c_proj"):
        module = model.get_submodule(f"transformer.h.1.{path}")
        found = weights.read(f"transformer.h.1.{path}", CPU)
        assert torch.equal(found, module.weight.float().T)
        x = torch.randn(3, 64).bfloat16()
        expected = module(x).float() - module.bias.float()
        assert torch.allclose(x.float() @ found.T, expected, atol=0.02)


def test_a_weight_that_is_not_there_is_refused(tiny_base):
    """The error names the module."""
    weights = StoredWeights(tiny_base.directory, FAMILIES["llama"])
    with pytest.raises(ModelFileError, match=r"layers\.7"):
        weights.read("model.layers.7.self_attn.k_proj", CPU)
