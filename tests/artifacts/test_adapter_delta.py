from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from mens_exp.artifacts.adapter_v3 import deltas, portable, write_adapter
from mens_exp.errors import DataError

Tensors = dict[str, np.ndarray]


def with_ours(adapter, **ours):
    return dataclasses.replace(adapter, mens_exp={**(adapter.mens_exp or {}), **ours})


def products(manifest, tensors):
    """Compute each layer's delta in float64, from the definition."""
    return {
        layer: scale * (B_OR.astype(np.float64) @ A_RI.astype(np.float64))
        for layer, (A_RI, B_OR, scale) in deltas(manifest, tensors).items()
    }


def test_a_layers_delta_is_its_matrices_and_its_scale(adapter, tensors):
    """By hand: alpha 4, r 2 and r 1; l0.v is [[9], [8]] @ [[1, 2, 3]] times 4."""
    found = deltas(adapter, tensors)
    assert list(found) == ["l0.q", "l0.v"]
    assert {layer: scale for layer, (_, _, scale) in found.items()} == {"l0.q": 2.0, "l0.v": 4.0}
    np.testing.assert_array_equal(products(adapter, tensors)["l0.v"], [[36, 72, 108], [32, 64, 96]])


@pytest.mark.parametrize(
    "ours",
    [
        {},
        {"rank_pattern": {"l0.v": 1}, "alpha_pattern": {"l0.q": 3}},
        {"variant": "rslora"},
        {"variant": "rslora", "alpha_pattern": {"l0.v": 7}},
        {"variant": "rslora", "init": {"doubled_rank": True}},
    ],
)
def test_in_portable_form_the_headers_scale_is_every_layers(adapter, tensors, ours):
    """A reader that ignores `mens_exp` computes the same deltas, up to one rounding of B."""
    tensors["l0.q.lora_b"] = np.array([[1.5, -2], [0, 1], [3, 4]], np.float32)
    manifest = with_ours(adapter, **ours)
    light, folded = portable(manifest, tensors)
    expected = products(manifest, tensors)
    for layer in adapter.layer_order:
        A_RI, B_OR = folded[f"{layer}.lora_a"], folded[f"{layer}.lora_b"]
        theirs = B_OR.astype(np.float64) @ A_RI * (light.alpha / max(light.rank, 1))
        np.testing.assert_allclose(theirs, expected[layer], rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(products(light, folded)[layer], theirs, rtol=1e-12)
    assert light.variant == "lora"


def test_the_portable_form_of_a_portable_adapter_is_itself(adapter, tensors, tmp_path):
    """Converting a portable adapter again changes nothing, and the result can be written."""
    once = portable(with_ours(adapter, variant="rslora"), tensors)
    twice = portable(*once)
    assert twice[0] == once[0]
    for name, values in once[1].items():
        np.testing.assert_array_equal(twice[1][name], values)
    write_adapter(tmp_path, *once)


def test_a_plain_adapter_is_portable_as_it_is(adapter, tensors):
    """Conversion leaves every byte of a plain adapter unchanged."""
    tensors = {name: values for name, values in tensors.items() if name.startswith("l0.q")}
    keys = {"l0.q": adapter.base_key_map["l0.q"]}
    plain = dataclasses.replace(adapter, layer_order=["l0.q"], base_key_map=keys, mens_exp=None)
    manifest, same = portable(plain, tensors)
    assert manifest == plain
    for name, values in tensors.items():
        assert same[name] is values


@pytest.mark.parametrize("function", [deltas, portable])
def test_a_dora_is_no_delta(adapter, tensors, function):
    """The update depends on the base weight, so it is refused; export.format=peft is named."""
    with pytest.raises(DataError, match=r"DoRA is not a delta.*export.format=peft"):
        function(with_ours(adapter, variant="dora"), tensors)


def test_rslora_is_folded_by_the_root_of_its_rank(adapter, tensors):
    """B is scaled by (alpha / sqrt(r)) / (alpha / r): sqrt 2 in l0.q; in l0.v, 4 over 4 / 2."""
    tensors["l0.q.lora_b"] = np.ones((3, 2), np.float32)
    _, folded = portable(with_ours(adapter, variant="rslora"), tensors)
    np.testing.assert_allclose(folded["l0.q.lora_b"], math.sqrt(2) * np.ones((3, 2)), rtol=1e-7)
    np.testing.assert_array_equal(folded["l0.v.lora_b"], [[18], [16]])
