"""quant=int8, from the command line to what other libraries load."""

from __future__ import annotations

import json
import shutil

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.config.compose import compose, typed
from mens_exp.export.adapter import config_of_adapter
from mens_exp.tasks.merge import decided_merge

SUITE = ("suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40")
INT8 = ("quant=int8", "quant.compute_dtype=f32", "optim.lr=5e-3", "trainer.max_steps=12", *SUITE)


@pytest.fixture(scope="module")
def run(finished_with):
    """A finished run that validates on every validation row; do not change it."""
    return finished_with(*INT8, "data.val_max_tokens=100000")


def test_the_record_says_what_was_computed(run):
    """Quantizer, inputs and method; the adapter learned, and its loss in PEFT is noted."""
    manifest = Manifest.read(run.manifest)
    facts, results = manifest.facts, manifest.results
    assert (facts["quant"], facts["double_quant"], facts["quantized_linears"]) == (
        "int8",
        False,
        14,
    )
    assert facts["int8_inputs"] == "as computed"
    assert manifest.contract is not None
    assert manifest.contract["quant"] == {"base": "int8", "double_quant": False}
    assert results["tuned_val_loss"] < 0.95 * results["base_val_loss"]
    (note,) = [note for note in manifest.notes if "8-bit layers quantize their inputs" in note]
    assert f"{results['peft_view_val_loss']:.4f}" in note
    written = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    assert written["quant"] == {"base_quant": "int8", "double_quant": False}


def test_peft_reproduces_the_loss_of_its_view(run, peft_loss):
    """With transformers and PEFT alone, in evaluation mode on the CPU, to 1e-4."""
    results = Manifest.read(run.manifest).results
    assert peft_loss(run) == pytest.approx(results["peft_view_val_loss"], rel=1e-4)
    assert results["peft_view_val_loss"] != results["tuned_val_loss"]


def test_the_card_says_how_to_load_it(run):
    """The card's code uses the quantizer of training."""
    assert "BitsAndBytesConfig(load_in_8bit=True)" in run.model_card.read_text("utf-8")


def test_an_evaluation_repeats_its_scorecard(
    run,
    untimed,
    tmp_path,
    monkeypatch,
):
    """The saved adapter is loaded on a newly quantized 8-bit base."""
    monkeypatch.chdir(tmp_path)
    assert (
        cli.main(
            ["task=evaluate", "logger=none", f"path={run.path}", *SUITE, "hydra.run.dir=again"]
        )
        == 0
    )
    assert untimed(RunDir(tmp_path / "again")) == untimed(run)


def test_what_was_left_out_is_known_without_the_run(train_in, tiny_base, tmp_path):
    """The adapter's header records it, so merging the adapter alone loads the right base."""
    left = ("quant.skip=[down_proj]", "lora.targets=[q_proj]", "trainer.max_steps=2")
    run = train_in(tmp_path / "run", "quant=int8", *left)
    written = json.loads((run.adapter / "adapter_manifest.json").read_text("utf-8"))
    skipped = written["mens_exp"]["quantizer"]["skip"]
    assert skipped == [f"model.layers.{layer}.mlp.down_proj" for layer in (0, 1)]
    shutil.copytree(run.adapter, tmp_path / "alone")
    told = [
        "task=merge",
        "parity.tokens=64",
        f"path={tmp_path / 'alone'}",
        f"base={tiny_base.directory}",
        "out=new",
    ]
    config = typed(compose([told])[0].values)
    merging = decided_merge(config)
    inputs, quantizer = merging.inputs, merging.choices.trained_on
    again = config_of_adapter(config, inputs.manifest, inputs.base, inputs.shape, quantizer)
    assert (again.quant.quant_type.value, again.quant.skip) == ("int8", skipped)


def test_a_run_in_two_parts_is_the_run_in_one(whole_and_parts):
    """Resuming from the checkpoint gives the same bytes."""
    both = whole_and_parts("quant=int8")
    found = [(one.adapter / "adapter.safetensors").read_bytes() for one in both]
    assert found[0] == found[1]
