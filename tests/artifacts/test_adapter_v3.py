from __future__ import annotations

import dataclasses
import json
import math
import shutil
import struct

import numpy as np
import pytest
from safetensors.numpy import save

from mens_exp.artifacts.adapter_v3 import read_adapter, write_adapter
from mens_exp.errors import DataError, MensError, Problems

Tensors = dict[str, np.ndarray]
RANKS = {"rank_pattern": {"l0.v": 1}}
QUANTIZER = {
    "quant_type": "nf4",
    "block_size": 64,
    "double_quant": True,
    "compute_dtype": "bf16",
    "rounded_to": "bf16",
    "skip": [],
    "library": "bitsandbytes 0.50.2",
}


def copied(golden, target, **changes):
    shutil.copytree(golden / "adapters" / "v3", target)
    path = target / "adapter_manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes))
    return target


def test_the_committed_adapter_is_read(golden, adapter, tensors):
    """The manifest and every matrix have the expected values."""
    manifest, read = read_adapter(golden / "adapters" / "v3")
    assert manifest == adapter
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(read[name], tensor, strict=True)


def test_an_adapter_is_written_as_committed(golden, adapter, tensors, tmp_path):
    """The bytes are the golden ones, whatever the order and memory layout of the matrices."""
    for order in (sorted(tensors), sorted(tensors, reverse=True)):
        shuffled = {name: np.asfortranarray(tensors[name]) for name in order}
        write_adapter(tmp_path, adapter, shuffled)
        for name in ("adapter_manifest.json", "adapter.safetensors"):
            assert (tmp_path / name).read_bytes() == (
                golden / "adapters" / "v3" / name
            ).read_bytes()


def test_optional_keys_are_absent_when_there_is_nothing_to_say(golden):
    """The schema does not allow null in their place."""
    value = json.loads((golden / "adapters" / "v3" / "adapter_manifest.json").read_text("utf-8"))
    assert "base_model" not in value
    assert "provenance" not in value


def test_writing_leaves_other_files_alone(adapter, tensors, tmp_path):
    """A PEFT view in the same directory is kept."""
    (tmp_path / "peft").mkdir()
    write_adapter(tmp_path, adapter, tensors)
    assert (tmp_path / "peft").is_dir()


def test_the_older_format_and_file_name_are_read_as_todays(golden, adapter, tmp_path):
    """Accept the format vox_populi_adapter in populi_adapter_manifest_v3.json."""
    directory = copied(golden, tmp_path / "a", format="vox_populi_adapter")
    old = directory / "populi_adapter_manifest_v3.json"
    (directory / "adapter_manifest.json").rename(old)
    assert read_adapter(directory)[0] == adapter


def test_a_manifest_with_the_base_models_provenance_is_read(golden, tmp_path):
    """The licence is optional, as in the schema."""
    origin = {"base_family": "llama", "upstream_model_id": "x/y", "attribution_required": True}
    directory = copied(golden, tmp_path / "a", base_model="x/y", provenance=origin)
    assert read_adapter(directory)[0].provenance == origin


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "peft"}, "not this format.*expected vox_mens_adapter"),
        ({"version": 4}, "newer version"),
        ({"version": 2}, "expected 3; no reader for older"),
        ({"ranks": 2}, "ranks: unknown key.*the nearest is rank"),
        ({"rank": 2.0}, "rank: wrong value.*expected an integer"),
        ({"alpha": 0}, "alpha: wrong value.*expected 1 or more"),
        ({"quant": {"base_quant": "nf4"}}, r"quant\.double_quant: missing key"),
        ({"base_key_map": {"l0.q": "k"}}, "a layer without a base key.*found l0.v"),
        ({"layer_order": ["l0.q", "l0.q", "l0.v"]}, "layer_order: repeated.*l0.q"),
        (
            {"layer_order": ["l0.q"], "mens_exp": None},
            "a tensor does not belong to any layer.*found l0.v.lora_a",
        ),
        ({"rank": 3}, r"l0\.q\.lora_a: wrong shape.*found \[2, 3\].*expected \[3, in\]"),
        ({"mens_exp": None}, r"l0\.v\.lora_b: wrong shape.*found \[2, 1\].*expected \[out, 2\]"),
        ({"mens_exp": {"rank_pattern": {"l0.k": 1}}}, "unknown layer.*found l0.k"),
        ({"mens_exp": {"rank_pattern": {"l0.v": "1"}}}, r"rank_pattern\.l0\.v: wrong value.*'1'"),
        ({"mens_exp": {"rank_pattern": {"l0.v": 0}}}, "wrong rank.*found 0"),
        ({"mens_exp": {"rank_pattern": {"l0.v": 1}, "init": {"dubled": True}}}, "init.dubled"),
        ({"mens_exp": {"rank_patern": {"l0.v": 1}}}, "rank_patern: unknown key.*rank_pattern"),
        ({"mens_exp": {"rank_pattern": {"l0.v": 1}, "scale": "mine"}}, "scale: unknown"),
        (
            {"mens_exp": {"rank_pattern": {"l0.v": 1}, "scale": "header", "variant": "rslora"}},
            "scale: contradicts the variant",
        ),
        ({"mens_exp": {**RANKS, "quantizer": []}}, "quantizer: wrong value.*an object"),
        (
            {"mens_exp": {**RANKS, "quantizer": {**QUANTIZER, "quant_type": "nf5"}}},
            r"quantizer\.quant_type: wrong value.*found nf5.*nf4, as quant.base_quant says",
        ),
        (
            {"mens_exp": {**RANKS, "quantizer": {**QUANTIZER, "block_size": 0}}},
            r"quantizer\.block_size: wrong value.*1 or more",
        ),
        (
            {"mens_exp": {**RANKS, "quantizer": {"quant_type": "nf4"}}},
            r"quantizer\.block_size: missing key",
        ),
        (
            {"mens_exp": {**RANKS, "quantizer": {**QUANTIZER, "levels": [1.0, 0.5]}}},
            r"quantizer\.levels: wrong value.*2 to 256 different numbers",
        ),
        ({"adapter_method": "prefix"}, "adapter_method: unknown.*lora, qlora"),
        ({"mens_exp": {"rank_pattern": [1]}}, "rank_pattern: wrong value"),
        ({"mens_exp": {"alpha_pattern": {"l0.k": 1}}}, "alpha_pattern: unknown layer"),
        ({"mens_exp": {"alpha_pattern": {"l0.v": 0}}}, "wrong alpha"),
        ({"mens_exp": {"rank_pattern": {"l0.v": 1}, "variant": "dorra"}}, "variant: unknown"),
        (
            {"mens_exp": {"rank_pattern": {"l0.v": 1}, "variant": "dora"}},
            r"a tensor is missing.*expected l0\.q\.lora_magnitude",
        ),
        ({"provenance": {"base_family": "llama"}}, r"provenance\.upstream_model_id: missing"),
    ],
)
def test_an_adapter_manifest_is_refused(golden, tmp_path, changes, message):
    """The message names each problem with its dotted path."""
    with pytest.raises((DataError, Problems), match=message):
        read_adapter(copied(golden, tmp_path / "a", **changes))


def test_problems_of_both_files_are_reported_together(golden, tmp_path):
    """An alpha of zero in the manifest and a wrong rank in the tensors give one error."""
    with pytest.raises(Problems) as caught:
        read_adapter(copied(golden, tmp_path / "a", alpha=0, rank=3))
    said = str(caught.value)
    assert "adapter_manifest.json: alpha: wrong value" in said
    assert "adapter.safetensors: l0.q.lora_a: wrong shape" in said


def test_a_file_that_notes_another_alpha_is_refused(golden, tmp_path, tensors):
    """Metadata in the safetensors file, where present, has to agree with the manifest."""
    directory = copied(golden, tmp_path / "a")
    for alpha, refused in (("4", False), ("8", True)):
        content = save(tensors, metadata={"alpha": alpha, "rank": "2"})
        (directory / "adapter.safetensors").write_bytes(content)
        if refused:
            with pytest.raises(DataError, match=r"notes another alpha.*found 8.*expected 4"):
                read_adapter(directory)
        else:
            assert read_adapter(directory)[0].alpha == 4


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_truncated_tensor_file_is_refused(golden, tmp_path, keep):
    """The message names the file, wherever it was truncated."""
    directory = copied(golden, tmp_path / "a")
    path = directory / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=r"adapter\.safetensors: not a valid safetensors file"):
        read_adapter(directory)


def test_a_missing_tensor_file_is_refused(golden, tmp_path):
    """A manifest without tensors is not an adapter."""
    directory = copied(golden, tmp_path / "a")
    (directory / "adapter.safetensors").unlink()
    with pytest.raises(DataError, match=r"adapter\.safetensors"):
        read_adapter(directory)


def test_a_missing_manifest_is_refused(golden, tmp_path):
    """Tensors without a manifest are not an adapter."""
    directory = copied(golden, tmp_path / "a")
    (directory / "adapter_manifest.json").unlink()
    with pytest.raises(DataError, match=r"adapter_manifest\.json: the file cannot be read"):
        read_adapter(directory)


def test_tensors_of_another_type_are_refused_when_read(golden, tmp_path, tensors):
    """bfloat16, which numpy does not support, is named like any other dtype."""
    directory = copied(golden, tmp_path / "a")
    whole = save({name: tensor.astype(np.float16) for name, tensor in tensors.items()})
    size = struct.unpack("<Q", whole[:8])[0]
    header = whole[8 : 8 + size].replace(b'"F16"', b'"BF16"')
    content = struct.pack("<Q", len(header)) + header + whole[8 + size :]
    (directory / "adapter.safetensors").write_bytes(content)
    with pytest.raises(Problems, match=r"l0\.q\.lora_a: wrong type.*found BF16.*expected F32"):
        read_adapter(directory)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("l0.q.lora_b", None, "a tensor is missing.*expected l0.q.lora_b"),
        ("l0.k.lora_a", np.zeros((2, 3), np.float32), "a tensor does not belong to any layer"),
        ("l0.q.lora_a", np.zeros((2, 3), np.float64), "found float64.*expected F32"),
        ("l0.q.lora_a", np.zeros((3, 2), np.float32), r"found \[3, 2\].*expected \[2, in\]"),
        ("l0.q.lora_b", np.zeros((2,), np.float32), r"found \[2\].*expected \[out, 2\]"),
    ],
)
def test_tensors_that_disagree_are_not_written(
    adapter,
    tensors,
    tmp_path,
    name,
    tensor,
    message,
):
    """Nothing is written to the directory."""
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    with pytest.raises(MensError, match=message):
        write_adapter(tmp_path, adapter, tensors)
    assert list(tmp_path.iterdir()) == []


def test_the_rank_of_a_layer_is_its_own_or_the_adapters(adapter):
    """`rank_pattern` sets the rank of l0.v only; l0.q has the adapter's."""
    assert (adapter.rank_of("l0.q"), adapter.rank_of("l0.v")) == (2, 1)


def with_ours(adapter, **ours):
    return dataclasses.replace(adapter, mens_exp={**(adapter.mens_exp or {}), **ours})


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ({}, {"l0.q": 2.0, "l0.v": 4.0}),
        ({"variant": "dora"}, {"l0.q": 2.0, "l0.v": 4.0}),
        ({"variant": "rslora"}, {"l0.q": 4 / math.sqrt(2), "l0.v": 4.0}),
        ({"alpha_pattern": {"l0.v": 3}}, {"l0.q": 2.0, "l0.v": 3.0}),
        ({"scale": "header"}, {"l0.q": 2.0, "l0.v": 2.0}),
        ({"rank_pattern": {}, "init": {"doubled_rank": True}}, {"l0.q": 2.0, "l0.v": 2.0}),
        (
            {"rank_pattern": {}, "variant": "rslora", "init": {"doubled_rank": True}},
            {"l0.q": 2.0, "l0.v": 2.0},
        ),
    ],
)
def test_the_scale_of_a_layer_is_its_variant_s(adapter, ours, expected):
    """By hand, for alpha 4, r 2 and r 1: alpha / r or alpha / sqrt(r); doubling r has no effect."""
    manifest = with_ours(dataclasses.replace(adapter, alpha=4), **ours)
    assert {layer: manifest.scale_of(layer) for layer in manifest.layer_order} == expected


def test_lengths_of_dora_are_written_and_read(adapter, tensors, tmp_path):
    """DoRA magnitudes, one for each output, are stored with the matrices."""
    manifest = with_ours(adapter, variant="dora")
    whole = tensors | {
        f"{layer}.lora_magnitude": np.ones(tensors[f"{layer}.lora_b"].shape[0], np.float32)
        for layer in manifest.layer_order
    }
    write_adapter(tmp_path, manifest, whole)
    read, values = read_adapter(tmp_path)
    assert read == manifest
    assert values.keys() == whole.keys()


def test_lengths_of_another_number_are_refused(adapter, tensors, tmp_path):
    """Their number has to equal the rows of B."""
    manifest = with_ours(adapter, variant="dora")
    whole = tensors | {
        f"{layer}.lora_magnitude": np.ones(9, np.float32) for layer in manifest.layer_order
    }
    with pytest.raises(MensError, match=r"lora_magnitude: wrong shape.*\[9\].*the rows of lora_b"):
        write_adapter(tmp_path, manifest, whole)


def test_lengths_without_dora_are_refused(adapter, tensors, tmp_path):
    """No reader would apply the magnitudes of an adapter that is not DoRA."""
    whole = tensors | {"l0.q.lora_magnitude": np.ones(4, np.float32)}
    with pytest.raises(MensError, match="a tensor does not belong to any layer"):
        write_adapter(tmp_path, adapter, whole)
