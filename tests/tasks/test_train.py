from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest

from mens_exp.artifacts import atomic
from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.telemetry import read_events


def test_a_run_leaves_every_file_that_a_run_directory_has(finished):
    """A run directory has no hidden files, no lock and nothing half-written."""
    names = {p.relative_to(finished.path).as_posix() for p in finished.path.rglob("*")}
    names = {name for name in names if not name.startswith((".hydra", "mens_exp.log"))}
    assert names == {
        "MODEL_CARD.md",
        "adapter",
        "adapter/adapter.safetensors",
        "adapter/adapter_manifest.json",
        "adapter/peft",
        "adapter/peft/adapter_config.json",
        "adapter/peft/adapter_model.safetensors",
        "adapter/peft/chat_template.jinja",
        "adapter/peft/tokenizer.json",
        "adapter/peft/tokenizer_config.json",
        "chat_template.jinja",
        "checkpoints",
        "checkpoints/sha256.json",
        "checkpoints/step_00000002.ckpt",
        "checkpoints/step_00000004.ckpt",
        "config.yaml",
        "manifest.json",
        "plan.json",
        "report.html",
        "run_summary.json",
        "telemetry.jsonl",
        "training_skip_stats.json",
        "validation.jsonl",
    }


def test_results_put_base_and_tuned_side_by_side(finished):
    """The change is the ratio of the two less one, and both are in the validation events."""
    manifest = Manifest.read(finished.manifest)
    results = manifest.results
    assert manifest.status is Status.SUCCEEDED
    events = read_events(finished.telemetry)
    read = [e["payload"] for e in events if e["event"] == "validation"]
    assert [(p["step"], p["condition"]) for p in read] == [(0, "base"), (4, "tuned")]
    assert (read[0]["val/loss"], read[1]["val/loss"]) == (
        results["base_val_loss"],
        results["tuned_val_loss"],
    )
    assert results["tuned_val_loss"] < results["base_val_loss"]
    change = results["tuned_val_loss"] / results["base_val_loss"] - 1
    assert results["val_loss_change_frac"] == pytest.approx(change)
    assert results["steps"] == 4
    assert results["checkpoint"] == "checkpoints/step_00000004.ckpt"
    assert results["tokens_per_s"] > results["supervised_tokens_per_s"] > 0


def test_what_is_unknown_says_why(finished):
    """Every null among the results has a reason, and no other result has one."""
    manifest = Manifest.read(finished.manifest)
    null = {f"results.{name}" for name, value in manifest.results.items() if value is None}
    assert null == {"results.peak_cuda_bytes"}
    origin = {
        "contract.provenance.license_class": "no publisher's card states one",
        "contract.provenance.attribution_required": "the licence is unknown",
    }
    assert manifest.unknown == origin | {
        "results.peak_cuda_bytes": "no GPU was used",
        "scorecard": "suite=none",
    }


def test_bits_per_byte_are_the_loss_over_the_learned_text(finished):
    """Nats times tokens over bytes and ln 2; each token is a byte, but for one end marker a row."""
    manifest = Manifest.read(finished.manifest)
    results, data = manifest.results, manifest.inputs["data"]
    read = [e["payload"] for e in read_events(finished.telemetry) if e["event"] == "validation"]
    tokens = read[0]["val/supervised_tokens"]
    assert results["val_text_bytes"] == tokens - data["val_rows"]
    for condition, event in zip(("base", "tuned"), read, strict=True):
        per_byte = results[f"{condition}_val_loss"] * tokens / results["val_text_bytes"]
        found = results[f"{condition}_val_bits_per_byte"]
        assert found == pytest.approx(per_byte / math.log(2))
        assert event["val/bits_per_byte"] == pytest.approx(found)


def test_inputs_are_on_record_by_content(finished, rows_file):
    """Weights, tokenizer, template and tokenized rows have hashes; both sides are counted."""
    inputs = Manifest.read(finished.manifest).inputs
    hashes = [name for name in inputs if name.endswith("_sha256")]
    assert sorted(hashes) == ["base_weights_sha256", "chat_template_sha256", "tokenizer_sha256"]
    data = inputs["data"]
    assert {"rows_sha256", "train_sha256", "val_sha256"} <= data.keys()
    lines = len(rows_file.read_text(encoding="utf-8").splitlines())
    assert data["train_rows"] + data["val_rows"] + data["heldout_rows"] == lines


def test_measured_stands_beside_predicted(finished):
    """The plan from the start of the run is completed with the figures of the end."""
    plan = json.loads(finished.plan.read_text(encoding="utf-8"))
    results = Manifest.read(finished.manifest).results
    assert plan["measured"] == {
        "time_s": results["train_s"],
        "peak_bytes": results["peak_rss_bytes"],
    }


def test_the_adapter_is_the_trained_graph(finished):
    """Seven projections in two layers; B is no longer zero in any of them."""
    manifest, tensors = read_adapter(finished.adapter)
    assert len(manifest.layer_order) == 14
    assert all(tensors[f"{name}.lora_b"].any() for name in manifest.layer_order)
    recorded = Manifest.read(finished.manifest)
    name = "adapter/adapter.safetensors"
    assert recorded.outputs[name] == sha256_file(finished.path / name)
    ours = manifest.mens_exp or {}
    assert ours["base_weights_sha256"] == recorded.inputs["base_weights_sha256"]


def test_minimal_callbacks_leave_no_checkpoint_and_say_so(train_in, tmp_path):
    """The adapter is written even so."""
    unread = "checkpoint.every_n_steps"
    run = train_in(tmp_path / "run", "callbacks=minimal", without=unread)
    manifest = Manifest.read(run.manifest)
    assert manifest.results["checkpoint"] is None
    assert manifest.unknown["results.checkpoint"] == "no checkpoint callback was configured"
    assert (run.adapter / "adapter.safetensors").is_file()


def test_epochs_bound_a_run_too(train_in, finished, tmp_path):
    """A run of one epoch trains on all documents; the last step is filled from the next epoch."""
    run = train_in(tmp_path / "run", "trainer.max_steps=-1", "trainer.max_epochs=1")
    assert finished.manifest.is_file()  # the rows are encoded, so the plan's count is exact
    results = Manifest.read(run.manifest).results
    data = Manifest.read(run.manifest).inputs["data"]
    every = json.loads(run.plan.read_text(encoding="utf-8"))["data"]
    assert every["train_rows"] == data["train_rows"]
    assert every["train_tokens"] <= results["tokens"] <= every["train_tokens"] + 3 * 192


def test_the_research_lane_warm_starts_on_the_model_s_own_ids(tiny_base, train_in, tmp_path):
    """Plan, manifest and contract record it; ids of another tokenizer are refused, exit code 2."""
    on_directory = ["model=hf", f"model.id={tiny_base.directory}", "backend=burn"]
    run = train_in(tmp_path / "run", *on_directory, "trainer.max_steps=1")
    manifest = Manifest.read(run.manifest)
    assert manifest.facts["tokenizer"] == "hf"
    assert manifest.contract["data"]["tokenizer_mode"] == "hf"
    assert json.loads(run.plan.read_text("utf-8"))["tokenizer"] == "hf"
    own = sha256_file(tiny_base.directory / "tokenizer.json")
    assert manifest.inputs["tokenizer_sha256"] == own
    refused = tmp_path / "refused"
    train_in(refused, *on_directory, "tokenizer=vox", code=2)
    assert not refused.exists()


def test_ids_of_another_tokenizer_are_taken_where_that_is_said(tiny_base, train_in, tmp_path):
    """The permission to use them is recorded."""
    run = train_in(
        tmp_path / "run",
        *("model=hf", f"model.id={tiny_base.directory}", "backend=burn", "tokenizer=vox"),
        *("tokenizer.allow_unrelated_rows=true", "trainer.max_steps=1"),
    )
    assert Manifest.read(run.manifest).facts["tokenizer"] == "vox"
    assert "allow_unrelated_rows: true" in run.config.read_text("utf-8")


@pytest.mark.parametrize("backend", ["qlora", "lora", "full", "proxy", "burn"])
@pytest.mark.parametrize("model", ["tiny_llama", "tiny_gpt2"])
def test_every_backend_records_the_model_s_dimensions(backend, model, train_in, tmp_path):
    """They are read from config.json, in which every family has its own names for them."""
    options = [f"backend={backend}", f"model={model}", "model.num_hidden_layers=3"]
    run = train_in(tmp_path / "run", *options, "trainer.max_steps=1")
    facts = Manifest.read(run.manifest).facts
    assert {name: facts[name] for name in ("n_layers", "n_heads", "d_model", "vocab_size")} == {
        "n_layers": 3,
        "n_heads": 4,
        "d_model": 64,
        "vocab_size": 320,
    }


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ([], "burn_lora_masked_chatml_ce"),
        (["tokenizer.chat_template=plain"], "burn_lora_masked_chat_template_ce"),
        (["objective=causal"], "burn_lora_causal_ce"),
        (["objective=last_k", "objective.k=3"], "burn_lora_last_k3_ce"),
    ],
)
def test_the_research_lane_s_objective_is_noted_as_it_is(options, note, train_in, tmp_path):
    """One note, where it is true: answers alone, in ChatML, next-token cross entropy."""
    run = train_in(tmp_path / "run", "backend=burn", "trainer.max_steps=1", *options)
    assert Manifest.read(run.manifest).facts["training_objective_note"] == note


def test_the_card_of_the_research_lane_names_its_method(train_in, tmp_path):
    """The method is LoRA, although the base learned too; only backend=full is full fine-tuning."""
    told = {}
    for backend in ("burn", "full"):
        run = train_in(tmp_path / backend, f"backend={backend}", "trainer.max_steps=1")
        told[backend] = run.model_card.read_text("utf-8")
    assert "A LoRA model" in told["burn"]
    assert "full" not in told["burn"].split("## ", 1)[0]
    assert "A full fine-tuning model" in told["full"]


def test_a_run_removes_what_a_killed_one_left_of_a_comparison(train_in, tmp_path, monkeypatch):
    """A run resumed after its comparison does not write the comparison's file again."""
    monkeypatch.setenv("MENS_EXP_CACHE", str(tmp_path / "cache"))
    train_in(tmp_path / "first")
    (known,) = (tmp_path / "cache" / "reference").iterdir()
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        dead.wait()
    left = known.with_name(f".{known.name}.{atomic._machine()}-{dead.pid}-00000000.tmp")
    left.write_text("{")
    train_in(tmp_path / "second")
    assert list(known.parent.iterdir()) == [known]
