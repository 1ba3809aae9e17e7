"""Written tensors against ``W + s · B A``: a correct merge passes, each planted fault shows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import save_file

from mens_exp.errors import ModelFileError
from mens_exp.export.parity import tensor_errors
from mens_exp.layout.adapter_base import AdaptedLayer, places
from mens_exp.lora.method import Delta

KEY = "model.layers.0.self_attn.q_proj.weight"
OUT, WIDTH, RANK = 6, 64, 2
QUANTIZER = {
    "quant_type": "nf4",
    "block_size": 64,
    "double_quant": False,
    "compute_dtype": "f32",
    "rounded_to": "f32",
    "skip": [],
    "library": "bitsandbytes",
}


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


DELTA = Delta(A_RI=drawn(RANK, WIDTH), B_OR=drawn(OUT, RANK, seed=1), scale=0.5)
WEIGHT_OI = drawn(OUT, WIDTH, seed=2)


def place_of(tmp_path, weight_OI=WEIGHT_OI):
    """Store a base of one layer and return the layer's place in it."""
    shard = tmp_path / "base.safetensors"
    save_file({KEY: weight_OI}, shard)
    layer = AdaptedLayer(logical="l0.q", key=KEY, shape=(OUT, WIDTH))
    (found,) = places([layer], [shard], only_merged=True)[shard]
    return found


def error_of(tmp_path, written_OI, **changes):
    """Compare one written tensor with the merge of DELTA."""
    path = tmp_path / "merged.safetensors"
    save_file({KEY: written_OI.contiguous()}, path)
    place = dataclasses.replace(place_of(tmp_path), **changes.pop("place", {}))
    delta = dataclasses.replace(DELTA, **changes.pop("delta", {}))
    return tensor_errors({KEY: path}, [place], {"l0.q": delta}, **{"quantizer": None, **changes})[
        KEY
    ]


MERGED_OI = WEIGHT_OI + 0.5 * DELTA.B_OR @ DELTA.A_RI


def test_a_right_merge_differs_by_rounding_alone(tmp_path):
    """The merge is in float32, the reference in float64."""
    assert error_of(tmp_path, MERGED_OI)["relative"] < 1e-6


def test_nothing_that_was_to_change_leaves_the_weight_as_the_measure(tmp_path):
    """If B is zero, the error is relative to the weight."""
    still = {"B_OR": torch.zeros(OUT, RANK)}
    assert error_of(tmp_path, WEIGHT_OI, delta=still)["relative"] == 0
    assert error_of(tmp_path, 2 * WEIGHT_OI, delta=still)["relative"] == pytest.approx(1)


def test_the_figures_are_those_of_the_difference(tmp_path):
    """With one entry off by 1, max_abs is 1 and the relative error 1 / the delta's norm."""
    wrong_OI = MERGED_OI.clone()
    wrong_OI[2, 3] += 1
    found = error_of(tmp_path, wrong_OI)
    assert found["max_abs"] == pytest.approx(1, abs=1e-5)
    assert found["relative"] == pytest.approx(1 / float((MERGED_OI - WEIGHT_OI).norm()), rel=1e-4)


@pytest.mark.parametrize(
    "wrong_OI",
    [
        WEIGHT_OI + 1.0 * DELTA.B_OR @ DELTA.A_RI,
        WEIGHT_OI,
        MERGED_OI.flip(0),
    ],
    ids=["alpha off by two", "left out", "rows in another order"],
)
def test_a_wrong_merge_shows(tmp_path, wrong_OI):
    """The relative error is far above rounding."""
    assert error_of(tmp_path, wrong_OI)["relative"] > 0.9


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounding_to_the_format_that_is_written_is_no_error(tmp_path, dtype):
    """Correct rounding is as good as the format allows, however small the delta is."""
    small = {"scale": 1e-4}
    written_OI = (WEIGHT_OI.double() + 1e-4 * DELTA.B_OR.double() @ DELTA.A_RI.double()).to(dtype)
    assert error_of(tmp_path, written_OI, delta=small)["relative"] == 0
    left_out = error_of(tmp_path, WEIGHT_OI.to(dtype), delta=small)
    assert left_out["relative"] > 0.5


def test_the_base_is_the_one_that_the_adapter_met(tmp_path):
    """A merge into the original weights, after training on 4-bit ones, is off by their error."""
    found = error_of(tmp_path, MERGED_OI, quantizer=QUANTIZER, place={"quantizer": QUANTIZER})
    assert found["relative"] > 0.05
    left_alone = error_of(tmp_path, MERGED_OI, quantizer=QUANTIZER)
    assert left_alone["relative"] < 1e-6


def test_dora_sets_the_length_of_each_row(tmp_path):
    """Every row has norm 3, whatever the norm of the sum."""
    lengths_O = torch.full((OUT,), 3.0)
    right_OI = 3 * MERGED_OI / MERGED_OI.norm(dim=1, keepdim=True)
    delta = {"magnitude_O": lengths_O}
    assert error_of(tmp_path, right_OI, delta=delta)["relative"] < 1e-6
    assert error_of(tmp_path, MERGED_OI, delta=delta)["relative"] > 0.1


def test_a_tensor_that_is_absent_or_of_another_shape_is_refused(tmp_path):
    """A tensor that cannot be compared is an error."""
    place = place_of(tmp_path)
    with pytest.raises(ModelFileError, match="not in the output"):
        tensor_errors({}, [place], {"l0.q": DELTA}, None)
    with pytest.raises(ModelFileError, match="another shape"):
        error_of(tmp_path, MERGED_OI[:-1])
