from __future__ import annotations

import pytest

from mens_exp.errors import ModelFileError
from mens_exp.layout.names import (
    LLAMA_SHAPED,
    MLP,
    PROJECTIONS,
    base_key,
    check_family,
    logical_name,
)

LAYER = "model.layers.12"


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{LAYER}.self_attn.q_proj", "l12.q"),
        (f"{LAYER}.self_attn.k_proj", "l12.k"),
        (f"{LAYER}.self_attn.v_proj", "l12.v"),
        (f"{LAYER}.self_attn.o_proj", "l12.o"),
        (f"{LAYER}.mlp.gate_proj", "l12.gate"),
        (f"{LAYER}.mlp.up_proj", "l12.up"),
        (f"{LAYER}.mlp.down_proj", "l12.down"),
        ("base_model.model.model.layers.0.mlp.up_proj", "l0.up"),
    ],
)
def test_projection_has_its_logical_name(path: str, name: str) -> None:
    """The names of the adapter schema; PEFT's prefix does not matter."""
    assert logical_name(path) == name
    assert base_key(path) == f"{path.removeprefix('base_model.model.')}.weight"


@pytest.mark.parametrize(
    "path",
    [
        "lm_head",
        "model.layers.0.self_attn",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.x.mlp.up_proj",
        "model.layers.0.mlp.up_proj.lora_A",
        "model.layers.0.cross_attn.q_proj",
    ],
)
def test_other_module_has_none(path: str) -> None:
    """Not even one that looks alike."""
    with pytest.raises(ModelFileError, match="no projection with a logical name"):
        logical_name(path)


def test_logical_names_are_one_to_one() -> None:
    """Seven projections, seven names; three of them belong to the MLP."""
    assert len(set(PROJECTIONS.values())) == len(PROJECTIONS) == 7
    assert set(MLP) < set(PROJECTIONS)


@pytest.mark.parametrize("family", LLAMA_SHAPED)
def test_known_family_is_accepted(family: str) -> None:
    """Each has these layer names."""
    check_family(family)


@pytest.mark.parametrize(("family", "hint"), [("lama", "nearest is llama"), (None, "one of")])
def test_unknown_family_is_refused(family: object, hint: str) -> None:
    """The nearest known one is named, or all."""
    with pytest.raises(ModelFileError, match=hint):
        check_family(family)
