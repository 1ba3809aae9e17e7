"""Training from PiSSA and LoftQ: recorded, resumed, scored again, and loaded by PEFT."""

from __future__ import annotations

import pytest

from mens_exp import cli
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events

SUITE = ["suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=40"]
LEARN = ["quant.compute_dtype=f32", "optim.lr=5e-3", "data.val_max_tokens=100000"]


@pytest.fixture(scope="module")
def pissa(finished_with):
    """A run of a few steps from PiSSA; do not change it."""
    return finished_with("lora.init=pissa", *LEARN, *SUITE)


def test_the_base_of_the_record_is_the_plain_one(pissa, finished_with):
    """The base loss is that of a run from plain LoRA; the tuned loss is not."""
    plain = finished_with(*LEARN)
    ours, theirs = (Manifest.read(run.manifest).results for run in (pissa, plain))
    assert ours["base_val_loss"] == theirs["base_val_loss"]
    assert ours["tuned_val_loss"] != theirs["tuned_val_loss"]
    assert "peft_view_val_loss" not in theirs


def test_the_error_before_and_after_is_recorded_layer_by_layer(pissa):
    """The facts have the means, and an event has each layer."""
    (event,) = [e for e in read_events(pissa.telemetry) if e["event"] == "initialisation"]
    layers = event["payload"]["layers"]
    assert len(layers) == 14
    assert all(error["after"] < error["before"] for error in layers.values())
    facts = Manifest.read(pissa.manifest).facts
    assert facts["quantization_error_after"] == pytest.approx(event["payload"]["after"])
    assert facts["lora_init"] == "pissa"


def test_the_peft_directory_has_the_loss_that_the_record_says(pissa, peft_loss):
    """On the plain base it is not the trained model; manifest and card give its loss."""
    manifest = Manifest.read(pissa.manifest)
    results = manifest.results
    found = peft_loss(pissa)
    assert found == pytest.approx(results["peft_view_val_loss"], rel=1e-5)
    assert found != pytest.approx(results["tuned_val_loss"], rel=1e-5)
    (note,) = [note for note in manifest.notes if "adapter/peft" in note]
    assert f"{results['peft_view_val_loss']:.4f}" in note
    card = (pissa.path / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert f"{results['peft_view_val_loss']:.4f}" in card


def test_loftq_s_peft_directory_is_the_trained_model(
    finished_with,
    peft_loss,
    notes_of,
):
    """One iteration leaves the base unchanged, so there is no note."""
    run = finished_with("lora.init=loftq", *LEARN)
    manifest = Manifest.read(run.manifest)
    found = peft_loss(run)
    assert found == pytest.approx(manifest.results["tuned_val_loss"], rel=1e-5)
    assert "peft_view_val_loss" not in manifest.results
    assert notes_of(run) == []


def test_evaluation_rebuilds_the_trained_graph(pissa, untimed, tmp_path):
    """The scorecard equals the run's own."""
    out = tmp_path / "evaluation"
    command = ["task=evaluate", "logger=none", f"path={pissa.path}", *SUITE, f"hydra.run.dir={out}"]
    assert cli.main(command) == 0
    assert untimed(RunDir(out)) == untimed(pissa)


def test_a_start_from_gradients_is_recorded_and_scored_again(
    finished_with, untimed, peft_loss, tmp_path
):
    """The recorded base loss is the plain base's, and evaluation rebuilds the changed base."""
    run = finished_with("lora.init=lora_ga", *LEARN, *SUITE)
    manifest, plain = Manifest.read(run.manifest), Manifest.read(finished_with(*LEARN).manifest)
    assert manifest.results["base_val_loss"] == plain.results["base_val_loss"]
    assert manifest.results["tuned_val_loss"] < plain.results["base_val_loss"]
    assert manifest.facts["init_micro_batches"] == 2
    (event,) = [e for e in read_events(run.telemetry) if e["event"] == "initialisation"]
    assert len(event["payload"]["layers"]) == 14
    assert peft_loss(run) == pytest.approx(manifest.results["peft_view_val_loss"], rel=1e-5)
    out = tmp_path / "evaluation"
    command = ["task=evaluate", "logger=none", f"path={run.path}", *SUITE, f"hydra.run.dir={out}"]
    assert cli.main(command) == 0
    assert untimed(RunDir(out)) == untimed(run)


@pytest.mark.parametrize(
    "init",
    [["lora.init=pissa"], ["lora.init=loftq", "lora.loftq_iters=2"], ["lora.init=lora_ga"]],
)
def test_a_run_that_goes_on_ends_as_one_never_stopped(whole_and_parts, init):
    """Base and adapter are rebuilt from the checkpoint, and the bytes are the same."""
    both = whole_and_parts(*init)
    ours, theirs = (read_adapter(run.adapter) for run in both)
    assert ours[0] == theirs[0]
    files = [run.adapter / "adapter.safetensors" for run in both]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    "overrides",
    [
        ["lora.variant=rslora", "optim.lr=1e-3"],
        ["lora.variant=dora"],
        ["lora.targets=[all_linear,lm_head]"],
        ["lora.rank_pattern={mlp:4}"],
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:Model .*tie_word_embeddings=True")
def test_variants_reach_the_disk_as_they_were_validated(
    train_in,
    peft_loss,
    tmp_path,
    overrides,
):
    """PEFT alone computes the run's loss, in float32."""
    run = train_in(tmp_path / "run", *LEARN, *overrides)
    results = Manifest.read(run.manifest).results
    assert results["tuned_val_loss"] < 0.99 * results["base_val_loss"]
    found = peft_loss(run)
    assert found == pytest.approx(results["tuned_val_loss"], rel=1e-5)
