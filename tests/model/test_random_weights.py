from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from mens_exp.config.model import HfModel, ModelFamily, RandomModel, WeightsDtype
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.shape import check_weights, shape_of
from mens_exp.model import sources
from mens_exp.model.quiet import quiet
from mens_exp.model.sources import write_random

FAMILIES = {
    family: RandomModel(
        name=family.value,
        family=family,
        num_key_value_heads=4 if family is ModelFamily.gpt2 else 2,
        max_position_embeddings=64,
    )
    for family in ModelFamily
}


def tensors_of(directory):
    found = {}
    for shard in read_directory(directory).shards:
        found |= load_file(shard)
    return found


@pytest.fixture
def written(tmp_path):
    def write(model, name="base"):
        directory = tmp_path / name
        directory.mkdir()
        write_random(model, directory)
        return directory

    return write


@pytest.mark.parametrize("family", ModelFamily, ids=lambda family: family.value)
def test_a_family_is_written_as_transformers_reads_it(family, written):
    """Loading in transformers uses every weight, initializes none, and has the configured shape."""
    from transformers import AutoModelForCausalLM

    model = FAMILIES[family]
    directory = written(model)
    with quiet():
        loaded, report = AutoModelForCausalLM.from_pretrained(
            directory, dtype="auto", output_loading_info=True
        )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys"))
    assert (
        type(loaded).__name__
        == json.loads((directory / "config.json").read_text("utf-8"))["architectures"][0]
    )
    state = loaded.state_dict()
    for name, tensor in tensors_of(directory).items():
        assert torch.equal(state[name], tensor), name
    check_weights(read_directory(directory))
    assert shape_of(HfModel(id=str(directory))) == shape_of(model)


def test_biases_and_norms_are_drawn_too(written):
    """Values vary around zero and one, so that leaving one out is noticed."""
    tensors = tensors_of(written(FAMILIES[ModelFamily.qwen2]))
    bias = tensors["model.layers.0.self_attn.q_proj.bias"]
    norm = tensors["model.layers.1.input_layernorm.weight"]
    assert 0.01 < float(bias.std()) < 0.03
    assert 0.01 < float(norm.std()) < 0.03
    assert abs(float(norm.mean()) - 1) < 0.01


def test_gemma_s_norms_are_drawn_around_zero(written):
    """Gemma's norm adds one itself."""
    norm = tensors_of(written(FAMILIES[ModelFamily.gemma2]))["model.norm.weight"]
    assert abs(float(norm.mean())) < 0.02


def test_weights_are_normal_with_the_family_s_spread(written):
    """320·64 draws have mean 0 and standard deviation 0.02, and two projections differ."""
    tensors = tensors_of(written(FAMILIES[ModelFamily.llama]))
    table = tensors["model.embed_tokens.weight"]
    assert abs(float(table.mean())) < 5 * 0.02 / table.numel() ** 0.5
    assert float(table.std()) == pytest.approx(0.02, rel=0.03)
    q, o = (tensors[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qo")
    assert not torch.equal(q, o)


def test_a_tensor_is_its_own_whatever_stands_beside_it(written):
    """With one more layer or another vocabulary, tensors of equal name and shape are equal."""
    model = FAMILIES[ModelFamily.llama]
    small = tensors_of(written(model))
    large = tensors_of(written(replace(model, num_hidden_layers=3, vocab_size=640), "large"))
    same = {name for name in small if small[name].shape == large[name].shape}
    assert len(same) == len(small) - 1
    assert all(torch.equal(small[name], large[name]) for name in same)


def test_sharding_changes_no_weight(written, monkeypatch):
    """Many shards with an index equal a single file, and transformers reads both."""
    from transformers import AutoModelForCausalLM

    model = FAMILIES[ModelFamily.llama]
    whole = written(model)
    monkeypatch.setattr(sources, "_SHARD_BYTES", 100_000)
    monkeypatch.setattr(sources, "_PIECE", 1000)
    sharded = written(model, "sharded")
    assert len(read_directory(sharded).shards) > 2
    assert max(file.stat().st_size for file in read_directory(sharded).shards) < 110_000
    one, many = tensors_of(whole), tensors_of(sharded)
    assert one.keys() == many.keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    with quiet():
        loaded = AutoModelForCausalLM.from_pretrained(sharded)
    assert torch.equal(loaded.model.norm.weight, one["model.norm.weight"])


def test_bf16_weights_are_the_f32_ones_rounded(written):
    """Each weight is the float32 one rounded, and config.json names bf16."""
    model = FAMILIES[ModelFamily.llama]
    full = tensors_of(written(model))
    directory = written(replace(model, dtype=WeightsDtype.bf16), "half")
    half = tensors_of(directory)
    assert all(torch.equal(half[name], full[name].to(torch.bfloat16)) for name in full)
    assert json.loads((directory / "config.json").read_text("utf-8"))["dtype"] == "bfloat16"


def test_an_untied_head_is_drawn(written):
    """The head is a separate matrix."""
    tensors = tensors_of(written(replace(FAMILIES[ModelFamily.llama], tie_word_embeddings=False)))
    assert not torch.equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"])


def test_a_model_is_never_held_whole(tmp_path):
    """Writing 500 MB in shards of 50 MB raises peak memory by far less than the model's size.

    Eight billion parameters go the same way: one shard and one tensor at a time.
    """
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from mens_exp.config.model import RandomModel, WeightsDtype\n"
        "from mens_exp.model import sources as rw\n"
        "def write(name, **sizes):\n"
        "    place = Path(sys.argv[1]) / name\n"
        "    place.mkdir()\n"
        "    rw.write_random(RandomModel(name=name, dtype=WeightsDtype.bf16, **sizes), place)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024\n"
        "rw._SHARD_BYTES = 50_000_000\n"
        "before = write('tiny')\n"
        "after = write('large', hidden_size=1024, intermediate_size=4096, num_hidden_layers=16,"
        " num_attention_heads=16, num_key_value_heads=16)\n"
        "print(after - before)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    assert size > 500_000_000
    assert int(done.stdout) < 200_000_000
