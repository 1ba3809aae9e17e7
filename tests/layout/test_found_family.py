from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from mens_exp.config.model import HfModel
from mens_exp.errors import ModelFileError
from mens_exp.layout.checkpoint_files import read_directory
from mens_exp.layout.families import FAMILIES, family_in
from mens_exp.layout.modules import linear_modules, norm_modules
from mens_exp.layout.shape import logical_name, shape_of

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "max_position_embeddings": 128,
}
LAYER = {"attention.query_key_value": (192, 64), "attention.dense": (64, 64), "mlp.up": (256, 64)}


@pytest.fixture
def directory(tmp_path):
    """Write a model directory of two layers with some tensors replaced, or left out if None."""

    def written(changes=None, **config):
        shapes = {"net.embed_in.weight": (300, 64), "embed_out.weight": (300, 64)}
        for layer in range(2):
            shapes |= {f"net.layers.{layer}.{path}.weight": out for path, out in LAYER.items()}
            shapes[f"net.layers.{layer}.norm.weight"] = (64,)
        shapes |= changes or {}
        tensors = {k: np.zeros(v, np.float32) for k, v in shapes.items() if v is not None}
        save_file(tensors, tmp_path / "model.safetensors")
        values = {"model_type": "novel", **SIZES, **config}
        (tmp_path / "config.json").write_text(json.dumps(values), "utf-8")
        (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
        return read_directory(tmp_path)

    return written


def test_a_known_model_type_keeps_its_table(directory):
    """The headers are checked against the table elsewhere."""
    assert family_in(directory(model_type="gpt2")) is FAMILIES["gpt2"]


def test_an_unknown_one_is_read_off_its_headers(directory):
    """Paths, sizes, layers, the embedding and an untied head are found."""
    made = directory()
    shape = shape_of(HfModel(id=str(made.path)))
    assert shape.projections() == LAYER
    assert (shape.num_hidden_layers, shape.tied, shape.family.verified) == (2, False, False)
    assert shape.family.embedding == "net.embed_in"
    assert shape.linear_parameters == 2 * 64 * (192 + 64 + 256)
    paths = {one.logical: one.path for one in linear_modules(shape)}
    assert paths["l1.query_key_value"] == "net.layers.1.attention.query_key_value"
    assert logical_name(paths["l1.dense"], shape.family) == "l1.dense"


def test_one_table_alone_is_a_tied_head(directory):
    """config.json may say otherwise."""
    assert family_in(directory({"embed_out.weight": None})).tied


def test_usual_names_get_the_usual_logical_names_and_groups(
    directory,
):
    """An adapter on them has the usual names."""
    usual = {"self_attn.q_proj": (64, 64), "self_attn.v_proj": (64, 64), "mlp.fc": (128, 64)}
    changes = {}
    for layer in range(2):
        changes |= dict.fromkeys(f"net.layers.{layer}.{path}.weight" for path in LAYER)
        changes |= {f"net.layers.{layer}.{path}.weight": out for path, out in usual.items()}
    family = family_in(directory(changes))
    assert [one.logical for one in family.projections] == ["fc", "q", "v"]
    assert family.groups["qv"] == ("q", "v")
    assert "mlp" not in family.groups


def test_names_that_are_not_unique_are_whole_paths(
    directory,
):
    """Two dense layers of one decoder layer remain distinct."""
    twice = {f"net.layers.{layer}.mlp.dense.weight": (64, 256) for layer in range(2)}
    logical = [one.logical for one in family_in(directory(twice)).projections]
    assert {"attention_dense", "mlp_dense"} <= set(logical)


def test_layers_that_differ_have_modules_of_their_own(directory):
    """A module of another size, and one that only the second layer has, are kept."""
    changes = {
        "net.layers.1.mlp.up.weight": (512, 64),
        "net.layers.1.router.weight": (4, 64),
    }
    shape = shape_of(HfModel(id=str(directory(changes).path)))
    assert shape.linear_parameters == 2 * 64 * (192 + 64) + 64 * (256 + 512 + 4)
    modules = {one.logical: (one.out, one.width) for one in linear_modules(shape) if one.layer == 1}
    assert (modules["l1.up"], modules["l1.router"]) == ((512, 64), (4, 64))
    first = {one.logical: one.out for one in linear_modules(shape) if one.layer == 0}
    assert (first["l0.up"], "l0.router" in first) == (256, False)


def test_weights_without_layers_are_refused(directory):
    """The error names the nearest known family, or all of them."""
    without = {f"net.layers.{layer}.{path}.weight": None for layer in range(2) for path in LAYER}
    with pytest.raises(ModelFileError, match=r"unknown model_type.*nearest is llama"):
        family_in(directory(without, model_type="lama"))


def test_norms_are_vectors_with_the_name_of_one(directory):
    """One is in the first layer alone; a vector of another name and a matrix are no norms."""
    made = directory(
        {
            "net.layers.0.attention.q_norm.weight": (16,),
            "net.layers.1.norm.bias": (64,),
            "net.layers.1.decay.weight": (64,),
            "net.layers.1.norm_proj.weight": (64, 64),
            "net.ln_f.weight": (64,),
            "net.ln_f.bias": (64,),
            "net.gate.weight": (64,),
        }
    )
    found = norm_modules(shape_of(HfModel(id=str(made.path))))
    assert {(one.logical, one.parameter, one.out) for one in found} == {
        ("l0.q_norm", "net.layers.0.attention.q_norm.weight", 16),
        ("l0.norm", "net.layers.0.norm.weight", 64),
        ("l1.norm", "net.layers.1.norm.weight", 64),
        ("l1.norm_bias", "net.layers.1.norm.bias", 64),
        ("ln_f", "net.ln_f.weight", 64),
        ("ln_f_bias", "net.ln_f.bias", 64),
    }


def test_norms_of_one_name_at_two_places_of_a_layer_are_called_by_their_paths(directory):
    """The norm after the layers keeps its short name."""
    twice = {f"net.layers.{layer}.mlp.norm.weight": (256,) for layer in range(2)}
    made = directory(twice | {"net.norm.weight": (64,)})
    found = norm_modules(shape_of(HfModel(id=str(made.path))))
    assert {one.logical: one.out for one in found} == {
        **{f"l{layer}.norm": 64 for layer in range(2)},
        **{f"l{layer}.mlp_norm": 256 for layer in range(2)},
        "norm": 64,
    }
    family = family_in(made)
    assert all(family.logical_norm(one.path, "weight") == one.logical for one in found)
    assert family.logical_norm("net.norm", "bias") is None
