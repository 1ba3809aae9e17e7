from __future__ import annotations

import dataclasses
import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from mens_exp.artifacts.adapter_v3 import AdapterManifest, read_adapter, write_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.errors import DataError, MensError, RequestError
from mens_exp.layout.families import FAMILIES
from mens_exp.layout.starting_adapter import find, read

BASE = "ab" * 32

LLAMA = FAMILIES["llama"]


@pytest.fixture
def run(tmp_path):
    """Return a finished run with an adapter of one layer, rank 2, in both forms."""
    made = RunDir(tmp_path / "outputs" / "run")
    manifest = AdapterManifest(
        adapter_method="qlora",
        quant={"base_quant": "nf4", "double_quant": True},
        base_key_map={"l0.q": "model.layers.0.self_attn.q_proj.weight"},
        layer_order=["l0.q"],
        vocab=8,
        d_model=4,
        rank=2,
        alpha=6,
        mens_exp={"base_weights_sha256": BASE},
    )
    tensors = {
        "l0.q.lora_a": np.arange(8, dtype=np.float32).reshape(2, 4) / 8,
        "l0.q.lora_b": np.arange(6, dtype=np.float32).reshape(3, 2) - 2,
    }
    write_adapter(made.adapter, manifest, tensors)
    peft_in(made.peft, tensors)
    Manifest(
        run_id="run",
        task="train",
        started_utc="2026-11-20T05:58:01.123Z",
        config_digest=BASE,
        seed=1,
    ).write(made.manifest)
    return made


def peft_in(directory, tensors, dtype=torch.float32, **config):
    directory.mkdir(parents=True)
    values = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "bias": "none", **config}
    (directory / "adapter_config.json").write_text(json.dumps(values), encoding="utf-8")
    path = "base_model.model.model.layers.0.self_attn.q_proj"
    names = {"l0.q.lora_a": f"{path}.lora_A.weight", "l0.q.lora_b": f"{path}.lora_B.weight"}
    save_file(
        {names[name]: torch.from_numpy(value).to(dtype) for name, value in tensors.items()},
        directory / "adapter_model.safetensors",
    )
    return directory


@pytest.mark.parametrize("place", ["", "adapter"])
def test_a_run_and_its_adapter_directory_are_one_adapter(run, place):
    """Both paths give the same adapter with its manifest."""
    assert find(str(run.path / place)) == run.adapter
    adapter = read(run.adapter, LLAMA)
    assert (adapter.form, adapter.rank, adapter.alpha) == ("v3", 2, 6)
    assert adapter.base_weights_sha256 == BASE
    assert adapter.sha256 == sha256_file(run.adapter / "adapter.safetensors")
    assert adapter.tensors["l0.q.lora_b"].shape == (3, 2)


def test_latest_is_the_run_that_started_last(run, monkeypatch):
    """The newest run under ./outputs is resolved to an absolute path."""
    monkeypatch.chdir(run.path.parents[1])
    assert find("latest") == run.adapter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_peft_directory_is_read_under_logical_names(run, tmp_path, dtype):
    """All formats of PEFT are read; the values here are exact in each."""
    ours = read(run.adapter, LLAMA).tensors
    theirs = read(find(str(peft_in(tmp_path / "peft", ours, dtype))), LLAMA)
    assert (theirs.form, theirs.rank, theirs.alpha) == ("peft", 2, 6)
    assert theirs.base_weights_sha256 is None
    assert theirs.tensors.keys() == ours.keys()
    for name, values in theirs.tensors.items():
        assert values.dtype == np.float32
        assert np.array_equal(values, ours[name])


def test_the_peft_view_of_a_run_knows_its_base(run):
    """The manifest of schema v3 is stored next to it."""
    assert read(find(str(run.peft)), LLAMA).base_weights_sha256 == BASE


def test_a_variant_and_its_patterns_are_read_from_peft(run, tmp_path):
    """alpha_pattern gives a layer's alpha; the rank is that of the matrices."""
    directory = peft_in(
        tmp_path / "peft",
        read(run.adapter, LLAMA).tensors,
        r=4,
        rank_pattern={"q_proj": 2},
        alpha_pattern={"q_proj": 3},
        use_rslora=True,
    )
    adapter = read(directory, LLAMA)
    assert (adapter.variant, adapter.rank, adapter.alpha) == ("rslora", 4, 6)
    assert adapter.alphas == {"l0.q": 3}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lora_alpha": 0.5}, "no whole alpha.*0.5"),
        ({"alpha_pattern": {"q_proj": 2.5}}, "no whole alpha.*2.5"),
        ({"use_dora": True, "use_rslora": True}, "combines two variants"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
def test_a_peft_adapter_that_no_run_could_have_left_is_refused(run, tmp_path, config, message):
    """No setting of ours expresses its scale or variant."""
    directory = peft_in(tmp_path / "peft", read(run.adapter, LLAMA).tensors, **config)
    with pytest.raises(DataError, match=message):
        read(directory, LLAMA)


def test_an_export_of_mixed_ranks_is_no_start(run, tmp_path):
    """One scale cannot be alpha over several ranks; the error names the PEFT form."""
    manifest, tensors = read_adapter(run.adapter)
    ours = {"rank_pattern": {"l0.q": 2}, "scale": "header"}
    mixed = dataclasses.replace(manifest, rank=4, mens_exp=ours)
    write_adapter(tmp_path / "mixed", mixed, tensors)
    with pytest.raises(DataError, match=r"one scale.*task=export path=.*export.format=peft"):
        read(tmp_path / "mixed", LLAMA)


@pytest.mark.parametrize("text", ["nowhere", "latest"])
def test_what_is_not_there_is_refused(tmp_path, monkeypatch, text):
    """The error names the setting and lists accepted values."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError) as caught:
        find(text)
    assert caught.value.where == "lora.init_from"
    assert "an adapter directory (schema v3 or PEFT)" in (caught.value.expected or "")


def test_a_run_that_has_not_ended_is_refused(run):
    """It has no adapter yet; the error says how to get one."""
    os.rename(run.adapter, run.path / "gone")
    with pytest.raises(RequestError, match="the run has no adapter") as caught:
        find(str(run.path))
    assert f"resume={run.path}" in (caught.value.remedy or "")


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: (d / "adapter_config.json").write_text("[]", encoding="utf-8"),
        lambda d: (d / "adapter_config.json").write_text('{"r": 2}', encoding="utf-8"),
        lambda d: (d / "adapter_model.safetensors").unlink(),
        lambda d: (d / "adapter_model.safetensors").write_bytes(b"\x08"),
    ],
    ids=["no object", "no alpha", "no tensors", "truncated"],
)
def test_a_damaged_peft_directory_is_refused(run, tmp_path, damage):
    """Every kind of damage gives one of our errors."""
    directory = peft_in(tmp_path / "peft", read(run.adapter, LLAMA).tensors)
    damage(directory)
    with pytest.raises(MensError) as caught:
        read(directory, LLAMA)
    assert str(directory) in str(caught.value)
