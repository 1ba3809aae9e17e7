from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest

from mens_exp.artifacts.adapter_v2 import (
    AdapterMeta,
    lift,
    lower,
    read_adapter_directory,
    read_adapter_files,
    read_adapter_v2,
    schema_in,
    write_adapter_v2,
)
from mens_exp.artifacts.adapter_v3 import read_adapter, write_adapter
from mens_exp.errors import DataError, MensError, Problems

FILES = ("candle_qlora_adapter_meta.json", "candle_qlora_adapter.safetensors")


def copied(golden, target, **changes):
    shutil.copytree(golden / "adapters" / "v2", target)
    path = target / FILES[0]
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), encoding="utf-8")
    return target


def test_the_committed_adapter_is_read(golden):
    """A proxy stack of one middle projection and a tied head; values of the seeds' test."""
    meta, tensors = read_adapter_v2(golden / "adapters" / "v2")
    assert meta == AdapterMeta(
        embed_key="wte.weight",
        vocab=4,
        d_model=3,
        rank=2,
        alpha=4,
        layer_order=["mid0", "lm_head"],
        base_key_map={"mid0": "h.0.attn.c_proj.weight", "lm_head": "wte.weight"},
    )
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "mid0.lora_a": (2, 3),
        "mid0.lora_b": (3, 2),
        "lm_head.lora_a": (2, 3),
        "lm_head.lora_b": (4, 2),
    }
    np.testing.assert_array_equal(tensors["mid0.lora_a"], [[0, 1, 2], [3, 4, 5]])


def test_what_was_read_is_written_as_it_was(golden, tmp_path):
    """The bytes are the same, also after a round trip through v3 on disk."""
    there = golden / "adapters" / "v2"
    write_adapter_v2(tmp_path / "again", *read_adapter_v2(there))
    meta, tensors = read_adapter_v2(there)
    write_adapter(tmp_path / "v3", lift(meta), tensors)
    manifest, lifted = read_adapter(tmp_path / "v3")
    write_adapter_v2(tmp_path / "back", lower(manifest), lifted)
    for place in ("again", "back"):
        for name in FILES:
            assert (tmp_path / place / name).read_bytes() == (there / name).read_bytes()


def test_the_older_format_name_is_read_as_todays(golden, tmp_path):
    """Accept vox_populi_qlora_lora_only_v2 as the current format."""
    directory = copied(golden, tmp_path / "a", format="vox_populi_qlora_lora_only_v2")
    assert read_adapter_v2(directory)[0] == read_adapter_v2(golden / "adapters" / "v2")[0]


@pytest.mark.parametrize("name", [None, "org/model"])
def test_the_base_models_name_may_be_there(golden, tmp_path, name):
    """Later writers of v2 record it, possibly as null."""
    directory = copied(golden, tmp_path / "a", base_model=name)
    assert read_adapter_v2(directory)[0].base_model == name


def test_lifted_it_is_qlora_on_nf4(golden):
    """Double quantization is the default; layers and sizes do not change."""
    meta, _ = read_adapter_v2(golden / "adapters" / "v2")
    manifest = lift(meta)
    assert manifest.adapter_method == "qlora"
    assert manifest.quant == {"base_quant": "nf4", "double_quant": True}
    assert lift(meta, double_quant=False).quant["double_quant"] is False
    for name in ("layer_order", "base_key_map", "vocab", "d_model", "rank", "alpha"):
        assert getattr(manifest, name) == getattr(meta, name)
    assert manifest.scale_of("mid0") == 2.0


@pytest.fixture
def tied(golden):
    """The committed v2 adapter as v3, without the key of the embedding."""
    manifest = lift(read_adapter_v2(golden / "adapters" / "v2")[0])
    return dataclasses.replace(manifest, mens_exp=None)


def test_a_tied_head_tells_the_embeddings_key(tied):
    """The key of the head is the embedding's key, as in the seeds' own conversion."""
    assert lower(tied).embed_key == "wte.weight"


def test_an_untied_head_does_not_tell_the_embeddings_key(tied):
    """The caller has to pass `embed_key`, or the conversion is refused."""
    keys = tied.base_key_map | {"lm_head": "lm_head.weight"}
    untied = dataclasses.replace(tied, base_key_map=keys)
    with pytest.raises(DataError, match="no key of the embedding table"):
        lower(untied)
    assert lower(untied, embed_key="model.embed_tokens.weight").embed_key == (
        "model.embed_tokens.weight"
    )


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        ({"variant": "dora"}, "dora, which is not a delta"),
        ({"variant": "rslora"}, r"rslora, where mid0 has the scale 2\.82843.*alpha / rank = 2 "),
        ({"alpha_pattern": {"lm_head": 8}}, "lora, where lm_head has the scale 4"),
        ({"rank_pattern": {"mid0": 1}}, r"rank_pattern.*mid0.*expected rank 2 in every layer"),
    ],
)
def test_what_v2_has_no_word_for_is_refused(tied, ours, message):
    """The message names what v2 cannot express and suggests another format."""
    with pytest.raises((DataError, Problems), match=message) as caught:
        lower(dataclasses.replace(tied, mens_exp=ours))
    assert "export.format=v3" in str(caught.value)


def test_a_v2_is_no_v3_and_the_other_way_round(golden, tmp_path):
    """The reader of each schema refuses a header of the other."""
    two, three = golden / "adapters" / "v2", golden / "adapters" / "v3"
    shutil.copy(three / "adapter_manifest.json", tmp_path / FILES[0])
    shutil.copy(two / FILES[1], tmp_path / FILES[1])
    with pytest.raises(DataError, match=r"not this format.*expected vox_mens_qlora_lora_only_v2"):
        read_adapter_v2(tmp_path)


def test_a_directory_is_read_in_its_own_schema(golden):
    """The schema is detected; a v2 adapter is returned as v3."""
    assert schema_in(golden / "adapters" / "v2") == "v2"
    assert schema_in(golden / "adapters" / "v3") == "v3"
    assert schema_in(golden) is None
    meta, _ = read_adapter_v2(golden / "adapters" / "v2")
    assert read_adapter_directory(golden / "adapters" / "v2")[0] == lift(meta)
    manifest, _ = read_adapter_directory(golden / "adapters" / "v3")
    assert manifest == read_adapter(golden / "adapters" / "v3")[0]


@pytest.mark.parametrize(
    ("version", "name", "older"),
    [
        ("v2", "candle_qlora_adapter_meta.json", "vox_populi_qlora_lora_only_v2"),
        ("v3", "adapter_manifest.json", "vox_populi_adapter"),
    ],
)
def test_two_files_of_any_names_are_told_by_their_format(golden, tmp_path, version, name, older):
    """The format in the header decides: the current name or the older one, as in merge."""
    there = golden / "adapters" / version
    manifest, tensors = read_adapter_directory(there)
    header = json.loads((there / name).read_text("utf-8"))
    (weights,) = there.glob("*.safetensors")
    for form in (header["format"], older):
        (tmp_path / "meta.json").write_text(json.dumps(header | {"format": form}))
        found, read = read_adapter_files(weights, tmp_path / "meta.json")
        assert found == manifest
        assert read.keys() == tensors.keys()


@pytest.mark.parametrize("content", ["[]", "{}", '{"format": "peft"}'])
def test_a_header_of_no_adapter_is_refused(golden, tmp_path, content):
    """The message lists all four format names."""
    (tmp_path / "meta.json").write_text(content)
    weights = golden / "adapters" / "v2" / FILES[1]
    with pytest.raises(DataError, match=r"not an adapter header.*vox_populi_qlora_lora_only_v2"):
        read_adapter_files(weights, tmp_path / "meta.json")


def test_an_adapter_that_could_not_be_read_is_not_written(golden, tmp_path):
    """A missing matrix or a wrong rank is refused, and the directory stays empty."""
    meta, tensors = read_adapter_v2(golden / "adapters" / "v2")
    with pytest.raises(MensError, match="wrong shape"):
        write_adapter_v2(tmp_path, dataclasses.replace(meta, rank=1), tensors)
    del tensors["mid0.lora_b"]
    with pytest.raises(MensError, match=r"a tensor is missing.*mid0\.lora_b"):
        write_adapter_v2(tmp_path, meta, tensors)
    assert list(tmp_path.iterdir()) == []
