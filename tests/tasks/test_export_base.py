"""The command task=export path=base: the base model as a directory that other programs load."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from mens_exp.artifacts.manifest import Manifest
from mens_exp.export.handoff import read_handoff
from mens_exp.layout.model_cache import hash_weights
from mens_exp.model.quiet import quiet

WORDS = ["path=base", "export.format=hf", "model=tiny_llama"]


@pytest.fixture
def export(typed):
    """Type the command in an empty directory, and return what it said."""
    return lambda *overrides, code=0: typed("task=export", *overrides, code=code)


def test_transformers_loads_the_base_that_we_train_on(export, tiny_base, tiny_backend, tmp_path):
    """Same bytes, and in f32 exactly the same logits; a second export replaces the first."""
    for _ in range(2):
        said = export(*WORDS, "out=there")
    out = tmp_path / "here" / "there"
    assert "Written: there" in said
    assert 'base = AutoModelForCausalLM.from_pretrained("there")' in said
    assert hash_weights(out) == tiny_base.weights_sha256
    ours = tiny_backend("backend=lora", "quant.compute_dtype=f32").model.eval()
    with quiet():
        theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    ids = torch.arange(3, 35)[None]
    with torch.inference_mode():
        assert torch.equal(theirs(input_ids=ids).logits, ours(input_ids=ids).logits)


def test_the_tokenizer_renders_prompts_as_a_run_does(export, finished, tmp_path):
    """The base has no chat template of its own; transformers finds the run's in the directory."""
    export(*WORDS, "out=there")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "here" / "there")
    assert tokenizer.chat_template == finished.chat_template.read_text("utf-8")
    assert (
        tokenizer("Add 3.").input_ids
        == AutoTokenizer.from_pretrained(finished.peft)("Add 3.").input_ids
    )
    assert read_handoff(tmp_path / "here" / "there").base_model == "tiny_llama"


def test_settings_of_the_model_are_kept(export, tmp_path):
    """Without `out`, the directory is in the command's own run, which records its hashes."""
    export(*WORDS, "model.num_hidden_layers=1", "hydra.run.dir=own")
    written = json.loads((tmp_path / "here" / "own" / "hf" / "config.json").read_text("utf-8"))
    assert written["num_hidden_layers"] == 1
    manifest = Manifest.read(tmp_path / "here" / "own" / "manifest.json")
    assert manifest.inputs["base_weights_sha256"] == hash_weights(tmp_path / "here" / "own" / "hf")
    assert "model.safetensors" in manifest.results["files_sha256"]


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["path=base", "export.format=gguf"], "task=export export.format=hf"),
        (["path=base"], "task=export export.format=hf"),
        ([*WORDS, "out=mine"], "out: already exists"),
        (
            [*WORDS, "merge.dtype=f32"],
            "merge.dtype: has no effect with export.format=hf and path=base",
        ),
        (
            [*WORDS, "parity.tokens=9"],
            "parity.tokens: has no effect with export.format=hf and path=base",
        ),
        ([*WORDS, "data=synthetic"], "data: has no effect with export.format=hf and path=base"),
        ([*WORDS, "lora.r=4"], "lora.r: has no effect with task=export"),
        (["path=base", "export.format=hf", "model=hf", "model.id=./nowhere"], "nowhere"),
    ],
)
def test_a_command_that_cannot_be_done_is_refused(export, tmp_path, overrides, said):
    """The message says why, before a run directory is created."""
    (tmp_path / "here" / "mine").write_text("something", "utf-8")
    assert said in " ".join(export(*overrides, code=2).split())
    assert [path.name for path in (tmp_path / "here").iterdir()] == ["mine"]
