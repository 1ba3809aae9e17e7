"""Check the shipped JSON Schemas against the writers, the readers and the committed adapters."""

from __future__ import annotations

import dataclasses
import json
from importlib import resources
from pathlib import Path

import jsonschema
import pytest

from mens_exp.artifacts import adapter_v2, adapter_v3
from mens_exp.artifacts.adapter_v2 import (
    lift,
    read_adapter_directory,
    read_adapter_files,
    read_adapter_v2,
    write_adapter_v2,
)
from mens_exp.artifacts.adapter_v3 import write_adapter
from mens_exp.errors import DataError, Problems

GOLDEN = Path(__file__).parents[1] / "golden" / "adapters"
HEADERS = {"v2": "candle_qlora_adapter_meta.json", "v3": "adapter_manifest.json"}
# A part of each refused header's message; True means that the schema alone refuses it.
REFUSED = {
    "v2_another_format": ("not an adapter header", True),
    "v2_another_rank": (r"mid0\.lora_a: wrong shape.*found \[2, 3\].*expected \[3, in\]", False),
    "v2_another_vocab": (r"lm_head\.lora_b: wrong shape.*expected 5 rows.*vocab", False),
    "v2_another_width": (r"lm_head\.lora_a: wrong shape.*expected 2 columns.*d_model", False),
    "v2_float_rank": ("rank: wrong value.*expected an integer", True),
    "v2_key_without_layer": ("a base key does not belong to any layer.*found l9.q", False),
    "v2_layer_without_key": ("a layer without a base key.*found mid0", False),
    "v2_layer_without_tensors": (r"a tensor is missing.*l9\.q\.lora_a", False),
    "v2_missing_key": ("d_model: missing key", True),
    "v2_newer_version": ("written by a newer version", True),
    "v2_no_layers": ("layer_order: contains no layers", True),
    "v2_older_version": ("expected 2; no reader for older", True),
    "v2_repeated_layer": ("layer_order: repeated.*mid0", True),
    "v2_text_alpha": ("alpha: wrong value.*'4'", True),
    "v2_two_layers_one_key": ("base_key_map: repeated", False),
    "v2_unknown_key": ("ranks: unknown key.*rank", True),
    "v2_zero_alpha": ("alpha: wrong value.*1 or more", True),
    "v3_another_format": ("not an adapter header", True),
    "v3_another_method": ("adapter_method: unknown.*prefix", True),
    "v3_another_rank": (r"l0\.q\.lora_a: wrong shape.*expected \[3, in\]", False),
    "v3_float_rank": ("rank: wrong value.*expected an integer", True),
    "v3_key_without_layer": ("a base key does not belong to any layer.*found l9.q", False),
    "v3_layer_without_key": ("a layer without a base key.*found l0.q", False),
    "v3_layer_without_tensors": (r"a tensor is missing.*l9\.q\.lora_a", False),
    "v3_missing_key": ("d_model: missing key", True),
    "v3_newer_version": ("written by a newer version", True),
    "v3_no_layers": ("layer_order: contains no layers", True),
    "v3_older_version": ("expected 3; no reader for older", True),
    "v3_pattern_of_text": (r"rank_pattern\.l0\.v: wrong value", True),
    "v3_repeated_layer": ("layer_order: repeated.*l0.q", True),
    "v3_scale_beside_alphas": ("scale: contradicts", False),
    "v3_text_alpha": ("alpha: wrong value.*'4'", True),
    "v3_two_layers_one_key": ("base_key_map: repeated", False),
    "v3_unknown_addition": ("rank_patern: unknown key.*rank_pattern", True),
    "v3_unknown_key": ("ranks: unknown key.*rank", True),
    "v3_unknown_variant": ("variant: unknown.*dorra", True),
    "v3_zero_alpha": ("alpha: wrong value.*1 or more", True),
}


def schema(version):
    name = f"schemas/adapter_{version}.schema.json"
    text = resources.files("mens_exp.artifacts").joinpath(name).read_text("utf-8")
    return json.loads(text)


def accepts(version, value):
    return bool(jsonschema.Draft202012Validator(schema(version)).is_valid(value))


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_the_schema_is_a_schema(version):
    """Each file is valid JSON Schema 2020-12."""
    jsonschema.Draft202012Validator.check_schema(schema(version))


@pytest.mark.parametrize("version", ["v2", "v3"])
def test_the_committed_adapter_is_accepted(version):
    """The schema accepts its header, and the reader reads it with its tensors."""
    assert accepts(version, json.loads((GOLDEN / version / HEADERS[version]).read_text("utf-8")))
    read_adapter_directory(GOLDEN / version)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_committed_header_is_refused(name):
    """The reader always refuses it; the schema does where the header alone is wrong."""
    version, (message, by_the_schema) = name[:2], REFUSED[name]
    path = GOLDEN / "refused" / f"{name}.json"
    (tensors,) = (GOLDEN / version).glob("*.safetensors")
    with pytest.raises((DataError, Problems), match=message):
        read_adapter_files(tensors, path)
    assert accepts(version, json.loads(path.read_text("utf-8"))) is not by_the_schema


def test_every_committed_refusal_is_expected():
    """Every header in golden/refused has an expected message in `REFUSED`."""
    assert {path.stem for path in (GOLDEN / "refused").iterdir()} == REFUSED.keys()


def test_what_the_writers_write_is_accepted(adapter, tensors, tmp_path):
    """The schemas accept headers with every key of v3's `mens_exp`, and every key of v2."""
    ours = {
        "rank_pattern": {"l0.v": 1},
        "base_weights_sha256": "ab" * 32,
        "candle_qlora_graph_id": "lm_head_only",
        "embed_key": "model.embed_tokens.weight",
        "init": {"name": "loftq", "doubled_rank": True, "exactness": "…", "loftq_iters": 2},
        "lane": "research",
        "quantizer": {
            "quant_type": "nf4",
            "block_size": 64,
            "double_quant": True,
            "compute_dtype": "bf16",
            "rounded_to": "f32",
            "skip": ["model.layers.0.mlp.up_proj"],
            "library": "bitsandbytes 0.50.2",
        },
        "scale": "header",
        "tied_head": True,
        "variant": "lora",
    }
    full = dataclasses.replace(
        adapter,
        base_model="x/y",
        provenance={
            "base_family": "llama",
            "upstream_model_id": "x/y",
            "license_class": None,
            "attribution_required": True,
        },
        mens_exp=ours,
    )
    write_adapter(tmp_path, full, tensors)
    written = json.loads((tmp_path / HEADERS["v3"]).read_text("utf-8"))
    assert set(written["mens_exp"]) | {"alpha_pattern"} == set(
        schema("v3")["properties"]["mens_exp"]["properties"]
    )
    assert accepts("v3", written)
    meta, matrices = read_adapter_v2(GOLDEN / "v2")
    write_adapter_v2(tmp_path, dataclasses.replace(meta, base_model="x/y"), matrices)
    assert accepts("v2", json.loads((tmp_path / HEADERS["v2"]).read_text("utf-8")))
    write_adapter(tmp_path, lift(meta), matrices)
    assert accepts("v3", json.loads((tmp_path / HEADERS["v3"]).read_text("utf-8")))


@pytest.mark.parametrize(
    ("version", "record", "formats"),
    [
        ("v2", adapter_v2.AdapterMeta, adapter_v2.FORMATS),
        ("v3", adapter_v3.AdapterManifest, adapter_v3.FORMATS),
    ],
)
def test_schema_and_record_have_the_same_keys(version, record, formats):
    """The schema and the record declare the same keys and the same format names."""
    value = schema(version)
    assert set(value["properties"]) == {field.name for field in dataclasses.fields(record)}
    assert tuple(value["properties"]["format"]["enum"]) == formats
