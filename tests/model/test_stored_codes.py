"""Codes in published formats, compared with the values of other packages.

tests/support/published_codes.py wrote the files with those packages; transformers' and
bitsandbytes' own functions are asked here.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from mens_exp.errors import ModelFileError
from mens_exp.layout.prequantized import format_of
from mens_exp.model.sources import write_byte_level_tokenizer
from mens_exp.model.stored_codes import stored_codes
from mens_exp.model.stored_weights import StoredTensors

PUBLISHED = Path(__file__).with_name("published")
FILES = sorted(path.stem for path in PUBLISHED.glob("*.safetensors"))


def published(name):
    with safe_open(PUBLISHED / f"{name}.safetensors", framework="pt") as file:
        config = json.loads(file.metadata()["quantization_config"])
        tensors = {key: file.get_tensor(key) for key in list(file.keys())}
    return config, tensors


def decoded(config, tensors, width=64):
    stored = format_of({"quantization_config": config}, "a model")
    return stored_codes(stored, tensors.get, "a model: layer", width)


@pytest.mark.parametrize("name", FILES)
def test_codes_stand_for_the_values_that_the_package_gives(name):
    config, tensors = published(name)
    expected = tensors.pop("expected")
    found = decoded(config, tensors)
    assert torch.equal(found.rows(0, 64), expected)
    assert torch.equal(found.rows(7, 30), expected[7:30])


def test_there_is_a_file_of_each_format():
    assert len(FILES) == 12


@pytest.mark.parametrize("block", [None, (32, 32), (48, 48)], ids=str)
def test_fp8_is_what_transformers_makes_of_it(block):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    generator = torch.Generator().manual_seed(2)
    weight_OI = torch.randn(96, 144, generator=generator).to(torch.float8_e4m3fn)
    shape = () if block is None else (96 // block[0], -(-144 // block[1]))
    scale = torch.rand(shape, generator=generator) + 0.5
    config = {"quant_method": "fp8", "weight_block_size": block}
    found = decoded(config, {"weight": weight_OI, "weight_scale_inv": scale}, 144)
    expected = _dequantize_fp8_weight(weight_OI, scale, block, torch.float32)
    assert torch.equal(found.rows(0, 96), expected)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_of_bitsandbytes_are_what_it_dequantizes(kind, nested):
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    weight_OI = torch.randn(48, 512, generator=torch.Generator().manual_seed(3))
    codes, state = quantize_4bit(weight_OI, quant_type=kind, compress_statistics=nested)
    tensors = {"weight": codes} | {
        f"weight.{name}": one for name, one in state.as_dict(packed=True).items()
    }
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": kind,
    }
    found = decoded(config, tensors, 512)
    expected = dequantize_4bit(codes, state)
    assert torch.allclose(found.rows(0, 48), expected, rtol=1e-6, atol=0)


def test_eight_bits_of_bitsandbytes_are_what_it_dequantizes():
    from bitsandbytes.functional import int8_vectorwise_dequant, int8_vectorwise_quant

    weight_OI = torch.randn(32, 64, generator=torch.Generator().manual_seed(4))
    codes, scales, _ = int8_vectorwise_quant(weight_OI.half())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    found = decoded(config, {"weight": codes, "SCB": scales})
    expected = int8_vectorwise_dequant(codes, scales)
    assert torch.allclose(found.rows(0, 32), expected, rtol=1e-6, atol=0)


def test_integers_of_fewer_bits_take_a_byte_where_they_are_not_packed():
    config, _ = published("int8")
    config["format"] = "naive-quantized"
    (scheme,) = config["config_groups"].values()
    scheme["format"], scheme["weights"]["num_bits"] = None, 4
    stored = format_of({"quantization_config": config}, "a model")
    assert stored.bits_per_weight(64) == 8 + 32 / 64


def test_a_header_that_the_library_does_not_read_is_refused(tmp_path):
    """Python accepts a lone surrogate in a header, and the safetensors library does not."""
    write_byte_level_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text("{}", "utf-8")
    text = b'{"a\\ud800": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    stored = StoredTensors(tmp_path)
    (key,) = stored.directory.tensors
    with pytest.raises(ModelFileError, match="cannot be read by the safetensors library"):
        stored.tensor(key)


def broken(name, **changed):
    config, tensors = published(name)
    tensors.pop("expected")
    return config, {key: one for key, one in (tensors | changed).items() if one is not None}


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("gptq", {"scales": None}),
        ("gptq", {"scales": torch.full((2, 64), torch.nan)}),
        ("gptq", {"qzeros": torch.zeros(3, 8, dtype=torch.int32)}),
        ("gptq_2_ordered", {"g_idx": None}),
        ("gptq_2_ordered", {"g_idx": torch.zeros(64, dtype=torch.int32)}),
        ("fp8_block", {"weight_scale": torch.ones(2, 3)}),
        ("fp8_block", {"weight": torch.full((64, 64), 127, dtype=torch.uint8)}),
        ("fp8_tensor", {"weight": torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn)}),
        ("mxfp4", {"weight_scale": torch.zeros(64, 3, dtype=torch.uint8)}),
        ("packed_zeros", {"weight_zero_point": None}),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}),
    ],
)
def test_tensors_that_are_not_the_format_s_are_refused(name, changed):
    config, tensors = broken(name, **changed)
    with pytest.raises(ModelFileError) as refused:
        decoded(config, tensors)
    assert "a model: layer" in str(refused.value)


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "hqq"},
        {"quant_method": "gptq", "bits": 3, "group_size": 32},
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"},
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:a": {"bits": 8}}},
        {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {}},
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {"group_0": {"weights": {}}},
            "sparsity_config": {"format": "sparse-24-bitmask"},
        },
        "gptq",
    ],
    ids=str,
)
def test_a_format_that_is_not_read_is_refused_by_name(config):
    with pytest.raises(ModelFileError, match="unsupported quantization format"):
        format_of({"quantization_config": config}, "a model")


def test_a_model_that_says_that_it_is_dense_is_read():
    config, tensors = published("fp8_tensor")
    tensors.pop("expected")
    said = {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}
    expected = decoded(config, tensors).rows(0, 64)
    assert torch.equal(decoded(config | said, tensors).rows(0, 64), expected)
