from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mens_exp.config.model import HfModel, ModelFamily, RandomModel
from mens_exp.errors import ModelFileError
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.model_cache import random_config
from mens_exp.layout.shape import Shape, check_weights, shape_of

# Three query heads and one key-value head of width 4, two layers.
SHAPE = Shape(
    family=FAMILIES["llama"],
    hidden_size=12,
    intermediate_size=20,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    head_dim=4,
    vocab_size=100,
    max_position_embeddings=64,
    tied=True,
)


def configure(base, **changes):
    """Change config.json; a value of None removes its key."""
    path = base / "config.json"
    config = json.loads(path.read_text("utf-8")) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}), "utf-8")
    return HfModel(id=str(base))


def test_projections_have_their_shapes():
    """The shapes are [out, in] by hand, for grouped queries."""
    assert SHAPE.projections() == {
        "self_attn.q_proj": (12, 12),
        "self_attn.k_proj": (4, 12),
        "self_attn.v_proj": (4, 12),
        "self_attn.o_proj": (12, 12),
        "mlp.gate_proj": (20, 12),
        "mlp.up_proj": (20, 12),
        "mlp.down_proj": (12, 20),
    }


def test_parameters_are_counted():
    """By hand: two layers of 144+48+48+144+3·240, and a table of 1,200, twice if untied."""
    assert SHAPE.linear_parameters == 2 * 1104
    assert SHAPE.embedding_parameters == 1200
    untied = Shape(**{name: getattr(SHAPE, name) for name in SHAPE.__slots__} | {"tied": False})
    assert untied.embedding_parameters == 2400


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_weight_of_a_family_is_counted(name, tied):
    """The oracle is transformers' model of the same config.json on the meta device."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = RandomModel(
        name=name,
        family=ModelFamily(name),
        hidden_size=128,
        num_hidden_layers=3,
        num_key_value_heads=4 if name == "gpt2" else 2,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(AutoConfig.for_model(**random_config(model)))
    shape = shape_of(model)
    assert shape.total_parameters == built.num_parameters()


def test_written_model_has_the_configured_shape(tiny_config, tiny_base):
    """tiny_llama's config.json equals its YAML."""
    configured = tiny_config().model
    assert isinstance(configured, RandomModel)
    assert shape_of(HfModel(id=str(tiny_base.directory))) == shape_of(configured)


def test_written_model_has_the_weights_of_its_shape(tiny_base):
    """Every expected projection is written."""
    check_weights(read_directory(tiny_base.directory))


def test_directory_states_its_shape(base):
    """Sizes come from config.json, and the width of a head follows."""
    shape = shape_of(HfModel(id=str(base)))
    assert (shape.hidden_size, shape.head_dim, shape.num_key_value_heads) == (64, 32, 1)
    assert shape.tied


def test_optional_dimensions_have_transformers_defaults(base):
    """The defaults are as many key-value heads as query heads, and an untied head."""
    model = configure(base, num_key_value_heads=None, tie_word_embeddings=None)
    shape = shape_of(model)
    assert (shape.num_key_value_heads, shape.tied) == (2, False)


def test_width_of_a_head_may_be_stated(base):
    """In some families the width is not hidden_size over heads."""
    assert shape_of(configure(base, head_dim=48)).projections()["self_attn.q_proj"] == (96, 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": None}, "config.json: has no hidden_size"),
        ({"max_position_embeddings": None}, "config.json: has no max_position_embeddings"),
        ({"vocab_size": "many"}, "unusable dimension"),
        ({"num_hidden_layers": [2]}, "unusable dimension"),
        ({"num_attention_heads": 0}, "unusable dimension"),
    ],
)
def test_directory_without_its_shape_is_refused(base, changes, reason):
    """The error names the missing or invalid dimension."""
    with pytest.raises(ModelFileError, match=reason):
        shape_of(configure(base, **changes))


def test_weights_of_the_stated_shape_are_accepted(base):
    """The prefix may be missing, as in a model saved without its head."""
    check_weights(read_directory(base))
    for shard in base.glob("*.safetensors"):
        bare = {name.removeprefix("model."): t for name, t in load_file(shard).items()}
        save_file(bare, shard)
    index = json.loads((base / "model.safetensors.index.json").read_text("utf-8"))
    index["weight_map"] = {k.removeprefix("model."): v for k, v in index["weight_map"].items()}
    (base / "model.safetensors.index.json").write_text(json.dumps(index), "utf-8")
    check_weights(read_directory(base))


def test_layer_without_weights_is_refused(base):
    """Three layers are stated and two exist."""
    configure(base, num_hidden_layers=3)
    with pytest.raises(ModelFileError, match="weights disagree with") as caught:
        check_weights(read_directory(base))
    assert str(caught.value.where).endswith("layers.2.self_attn.q_proj.weight")
    assert caught.value.found == "no such tensor"


def test_weights_of_another_shape_are_refused(base):
    """The error shows both shapes."""
    tensors = load_file(base / "shard-1.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"] = np.zeros((128, 64), np.float16)
    save_file(tensors, base / "shard-1.safetensors")
    with pytest.raises(ModelFileError) as caught:
        check_weights(read_directory(base))
    assert str(caught.value.where).endswith("layers.1.mlp.down_proj.weight")
    assert (caught.value.found, caught.value.expected) == ("[128, 64]", "[64, 128]")


def _config_json(directory, **values):
    """Write the two files from which a shape is read, with dummy weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(values), "utf-8")
    (directory / "tokenizer.json").write_text("{}", "utf-8")
    save_file({"x": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return HfModel(id=str(directory))


def test_gpt2_names_its_dimensions_its_own_way(tmp_path):
    """If n_inner is null it is four times the width; the head is tied by default."""
    shape = shape_of(
        _config_json(
            tmp_path / "gpt2",
            model_type="gpt2",
            n_embd=768,
            n_head=12,
            n_layer=12,
            n_positions=1024,
            n_inner=None,
            vocab_size=50257,
        )
    )
    assert shape.tied
    assert shape.max_position_embeddings == 1024
    assert shape.projections() == {
        "attn.c_attn": (2304, 768),
        "attn.c_proj": (768, 768),
        "mlp.c_fc": (3072, 768),
        "mlp.c_proj": (768, 3072),
    }
    # Published: 124,439,808 parameters; 1,024 positions, biases and norms are not counted here.
    assert shape.linear_parameters + shape.embedding_parameters == 84_934_656 + 38_597_376


def test_phi3_fuses_projections(tmp_path):
    """In Phi-3-mini q, k and v are one matrix, and gate and up another."""
    shape = shape_of(
        _config_json(
            tmp_path / "phi3",
            model_type="phi3",
            hidden_size=3072,
            intermediate_size=8192,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=32,
            vocab_size=32064,
            max_position_embeddings=4096,
        )
    )
    assert shape.projections() == {
        "self_attn.qkv_proj": (9216, 3072),
        "self_attn.o_proj": (3072, 3072),
        "mlp.gate_up_proj": (16384, 3072),
        "mlp.down_proj": (3072, 8192),
    }
    assert not shape.tied
