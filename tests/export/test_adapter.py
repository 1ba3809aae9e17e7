"""Converted adapters give the same logits before and after, by PEFT's own forward pass."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mens_exp.artifacts.adapter_v2 import read_adapter_v2
from mens_exp.artifacts.adapter_v3 import deltas, read_adapter
from mens_exp.backends.lora import tied_head_is_meant
from mens_exp.config.model import HfModel
from mens_exp.config.task import ExportFormat
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.export.adapter import find, needs_base, out_problems, read, write
from mens_exp.layout.adapter_base import base_of
from mens_exp.model.quiet import quiet

PEFT, V2, V3 = ExportFormat.peft, ExportFormat.v2, ExportFormat.v3
IDS = torch.arange(3, 27).reshape(2, 12)
QV = {"target_modules": ["q_proj", "v_proj"]}
# The arguments of PEFT's LoraConfig, and the model family that it is applied to.
ADAPTERS = {
    "lora": ("llama", {"target_modules": "all-linear"}),
    "rslora": ("llama", {**QV, "use_rslora": True}),
    "regex": ("llama", {"target_modules": r".*layers\.1\..*(up|down)_proj"}),
    "some layers": ("llama", {**QV, "layers_to_transform": [1]}),
    "ranks": ("llama", {**QV, "rank_pattern": {"q_proj": 2, "layers.1.*v_proj": 8}}),
    "alphas": ("llama", {**QV, "alpha_pattern": {"q_proj": 3}}),
    "a fraction": ("llama", {**QV, "lora_alpha": 2.5, "rank_pattern": {"q_proj": 8}}),
    "rslora and patterns": (
        "llama",
        {**QV, "use_rslora": True, "rank_pattern": {"q_proj": 8}, "alpha_pattern": {"v_proj": 5}},
    ),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_fc", "c_proj"]}),
    "gpt2 rslora": ("gpt2", {"target_modules": ["mlp.c_proj"], "use_rslora": True}),
    "phi3": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "tied head": ("gemma2", {"target_modules": ["lm_head", "q_proj"]}),
    "head": ("llama", {"target_modules": ["lm_head", "q_proj"]}),
}
DORAS = {
    "dora": ("llama", {**QV, "use_dora": True}),
    "dora of a fraction": ("llama", {**QV, "use_dora": True, "lora_alpha": 2.5}),
    "dora and rslora": (
        "llama",
        {**QV, "use_dora": True, "use_rslora": True, "rank_pattern": {"q_proj": 8}},
    ),
    "gpt2 dora": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True}),
}


def model_of(base):
    from transformers import AutoModelForCausalLM

    with quiet():
        return AutoModelForCausalLM.from_pretrained(base.directory, dtype=torch.float32).eval()


def with_peft(base, directory):
    from peft import PeftModel

    with tied_head_is_meant():
        return PeftModel.from_pretrained(model_of(base), directory).eval()


def logits(model):
    with torch.inference_mode():
        return model(input_ids=IDS).logits.numpy()


@pytest.fixture
def golden():
    return Path(__file__).parents[1] / "golden"


@pytest.fixture
def made(family_base, tmp_path):
    """Save an adapter with PEFT itself, with random A and B; return it with its base."""
    from peft import LoraConfig, get_peft_model

    def saved(family, **config):
        base = family_base(family)
        torch.manual_seed(3)
        settings = {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM", **config}
        with quiet(), tied_head_is_meant():
            model = get_peft_model(model_of(base), LoraConfig(**settings))
            for name, parameter in model.named_parameters():
                if ".lora_B." in name or "magnitude" in name:
                    parameter.data += 0.3 * torch.randn_like(parameter)
            model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
        described = base_of(HfModel(id=str(base.directory)), tmp_path)
        return tmp_path / "theirs", base, described

    return saved


def convert(source, form, out, base):
    write(*read(find(source), base, None), form, out, base)
    return out


def by_the_header(model, directory):
    """Merge a v3 adapter by the seeds' formula, from the header's standard keys alone."""
    from transformers.pytorch_utils import Conv1D

    header = json.loads((directory / "adapter_manifest.json").read_text("utf-8"))
    _, tensors = read_adapter(directory)
    scale = header["alpha"] / max(header["rank"], 1)
    transposed = any(isinstance(one, Conv1D) for one in model.modules())
    for layer, key in header["base_key_map"].items():
        delta = scale * tensors[f"{layer}.lora_b"] @ tensors[f"{layer}.lora_a"]
        weight = model.get_parameter(key)
        weight.data += torch.from_numpy(delta.T if transposed else delta)
    return model


@pytest.mark.parametrize("name", ADAPTERS)
def test_any_lora_keeps_its_logits_through_v3_and_back(made, tmp_path, name):
    """PEFT to v3 to PEFT, to 1e-5 in float32, for an adapter that changes the logits."""
    family, config = ADAPTERS[name]
    theirs, base, described = made(family, **config)
    three = convert(theirs, V3, tmp_path / "v3", described)
    ours = convert(three, PEFT, tmp_path / "peft", described)
    before = logits(with_peft(base, theirs))
    np.testing.assert_allclose(logits(with_peft(base, ours)), before, atol=1e-5, rtol=0)
    assert np.abs(before - logits(model_of(base))).max() > 0.05
    if name != "tied head":  # its delta would also change the embedding
        merged = by_the_header(model_of(base), three)
        np.testing.assert_allclose(logits(merged), before, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", [*DORAS, *ADAPTERS])
def test_peft_written_again_keeps_its_logits(made, tmp_path, name):
    """PEFT to PEFT, to 1e-5 in float32; the magnitudes of DoRA are kept."""
    family, config = {**DORAS, **ADAPTERS}[name]
    theirs, base, described = made(family, **config)
    ours = convert(theirs, PEFT, tmp_path / "peft", described)
    before = logits(with_peft(base, theirs))
    np.testing.assert_allclose(logits(with_peft(base, ours)), before, atol=1e-5, rtol=0)
    assert np.abs(before - logits(model_of(base))).max() > 0.05


@pytest.mark.parametrize("form", [V2, V3], ids=lambda form: form.value)
def test_a_dora_is_no_delta_and_leaves_as_peft_alone(made, tmp_path, form):
    """The message gives the reason and suggests export.format=peft; nothing is written."""
    theirs, _, described = made("llama", **QV, use_dora=True)
    with pytest.raises(DataError, match=r"DoRA is not a delta.*export.format=peft"):
        convert(theirs, form, tmp_path / "out", described)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_tensors_are_read_exactly(made, tmp_path, dtype):
    """TRL and Unsloth save such tensors; float32 represents each value exactly."""
    from safetensors.torch import load_file, save_file

    theirs, _, described = made("llama", **QV)
    file = theirs / "adapter_model.safetensors"
    halves = {name: values.to(dtype) for name, values in load_file(file).items()}
    save_file(halves, file)
    _, tensors = read_adapter(convert(theirs, V3, tmp_path / "v3", described))
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    np.testing.assert_array_equal(tensors["l1.v.lora_b"], halves[name].float().numpy())


def test_v2_holds_the_same_deltas_and_goes_back(made, tmp_path):
    """PEFT to v2 to v3 to v2: both v2 are the same bytes, and B contains rsLoRA's sqrt(r)."""
    theirs, _, described = made("llama", **QV, use_rslora=True)
    two = convert(theirs, V2, tmp_path / "v2", described)
    meta, tensors = read_adapter_v2(two)
    assert (meta.rank, meta.alpha, meta.embed_key) == (4, 8, "model.embed_tokens.weight")
    source, raw = read(find(theirs), described, None)
    for layer, (A_RI, B_OR, scale) in deltas(source, raw).items():
        assert scale == 4.0  # 8 / sqrt 4
        again = 2.0 * tensors[f"{layer}.lora_b"] @ tensors[f"{layer}.lora_a"]
        np.testing.assert_allclose(again, 4.0 * B_OR @ A_RI, rtol=1e-5, atol=1e-6)
    assert not needs_base(find(two), V3)
    three = convert(two, V3, tmp_path / "v3", None)
    assert not needs_base(find(three), V2)
    back = convert(three, V2, tmp_path / "back", None)
    for file in two.iterdir():
        assert (back / file.name).read_bytes() == file.read_bytes()


def test_mixed_ranks_have_no_v2(made, tmp_path):
    """A v2 header has one rank; the message names the layers that differ."""
    theirs, _, described = made("llama", **QV, rank_pattern={"q_proj": 2})
    with pytest.raises(DataError, match=r"rank_pattern.*l0\.q"):
        convert(theirs, V2, tmp_path / "v2", described)


def test_the_base_that_is_recorded_stays_recorded(made, tmp_path):
    """The name survives the way from PEFT's configuration to v3 and back."""
    theirs, _, described = made("llama", **QV)
    file = theirs / "adapter_config.json"
    config = json.loads(file.read_text("utf-8")) | {"base_model_name_or_path": "org/model"}
    file.write_text(json.dumps(config), encoding="utf-8")
    three = convert(theirs, V3, tmp_path / "v3", described)
    assert read_adapter(three)[0].base_model == "org/model"
    ours = convert(three, PEFT, tmp_path / "peft", described)
    written = json.loads((ours / "adapter_config.json").read_text("utf-8"))
    assert written["base_model_name_or_path"] == "org/model"


@pytest.mark.parametrize(("other", "message"), [("gpt2", "not a projection"), ("qwen3", "another")])
def test_an_adapter_of_another_base_is_refused(
    made,
    family_base,
    tmp_path,
    other,
    message,
):
    """The base lacks the layer names, or the shapes differ: qwen3's heads are wider here."""
    theirs, _, _ = made("llama", **QV)
    foreign = base_of(HfModel(id=str(family_base(other).directory)), tmp_path)
    with pytest.raises((MensError, Problems), match=message):
        read(find(theirs), foreign, None)


def test_a_v3_of_another_base_is_refused(
    made,
    family_base,
    tmp_path,
):
    """The message names layers, keys and sizes, and suggests model.id."""
    theirs, _, described = made("llama", target_modules="all-linear")
    three = convert(theirs, V3, tmp_path / "v3", described)
    foreign = base_of(HfModel(id=str(family_base("gpt2").directory)), tmp_path)
    with pytest.raises(Problems, match=r"another base model.*l0\.q.*model\.id") as caught:
        read(find(three), foreign, None)
    assert "more problems of this kind" in str(caught.value)


@pytest.mark.parametrize("ours", [None, {"candle_qlora_graph_id": "lm_head_only"}])
def test_a_proxy_stack_has_no_peft_form(golden, family_base, tmp_path, ours):
    """It is recognized by its layers or its graph id; v2 and v3 can store it."""
    manifest, tensors = read(find(golden / "adapters" / "v2"), None, None)
    if ours is not None:
        manifest.layer_order, manifest.base_key_map = ["lm_head"], {"lm_head": "wte.weight"}
        manifest.mens_exp = ours
        del tensors["mid0.lora_a"], tensors["mid0.lora_b"]
    write(manifest, tensors, V3, tmp_path / "v3", None)
    write(manifest, tensors, V2, tmp_path / "v2", None)
    described = base_of(HfModel(id=str(family_base("gpt2").directory)), tmp_path)
    with pytest.raises(DataError, match=r"proxy stack has no PEFT form.*(mid0|lm_head_only)"):
        read(find(tmp_path / "v3"), described, None)


def test_a_runs_revision_is_put_down_for_whoever_loads_it(made, tmp_path):
    """The Hub commit is written to adapter_config.json, as PEFT does."""
    theirs, _, described = made("llama", **QV)
    pinned = dataclasses.replace(described, revision="ab" * 20)
    ours = convert(theirs, PEFT, tmp_path / "peft", pinned)
    written = json.loads((ours / "adapter_config.json").read_text("utf-8"))
    assert written["revision"] == "ab" * 20


def test_what_lies_at_the_target_is_not_replaced(tmp_path):
    """An empty directory may be used; one with the user's files may not."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    (tmp_path / "empty").mkdir()
    for name, count in (("full", 1), ("full/notes.txt", 1), ("empty", 0), ("new", 0)):
        assert len(list(out_problems(tmp_path / name))) == count


def test_a_directory_without_an_adapter_is_refused(tmp_path):
    """The message lists the files that would make it an adapter."""
    with pytest.raises(MensError, match=r"no adapter.*candle_qlora_adapter_meta\.json"):
        find(tmp_path)
