"""The smoke experiment with an offline W&B run, read back with W&B's own reader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fork_server
import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.telemetry import read_events


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A home directory without a W&B account."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def run(cache, home, rows_file, tmp_path_factory):
    """`python -m mens_exp experiment=smoke logger=wandb` for a user without an account."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "XDG_", "NETRC"))}
    source = os.pathsep.join(filter(None, sys.path))
    here = tmp_path_factory.mktemp("here")
    done = fork_server.run(
        [
            *(sys.executable, "-m", "mens_exp", "experiment=smoke", "logger=wandb", "lora.r=8"),
            "suite=heldout_syntax",
            *("data=jsonl", f"data.path={rows_file}", "data.val_frac=0.1", "data.heldout_frac=0.3"),
            "suite.max_new_tokens=48",
        ],
        check=False,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        cwd=here,
        env={**kept, "PYTHONPATH": source, "MENS_EXP_CACHE": str(cache), "HOME": str(home)},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    (manifest,) = here.glob("outputs/train/smoke/*/manifest.json")
    return RunDir(manifest.parent)


@pytest.fixture(scope="module")
def records(run):
    """The records that `wandb leet inspect` reads, by kind."""
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run.wandb)]
    text = fork_server.run(command, check=True, capture_output=True, text=True).stdout
    found = {}
    for line in text.splitlines():
        record = json.loads(line)
        found.setdefault(record["type"], []).append(record.get(record["type"]) or record)
    return found


def summary(run):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", "--summary"]
    text = fork_server.run([*command, str(run.wandb)], check=True, capture_output=True, text=True)
    return json.loads(text.stdout)


def test_the_run_is_there_under_its_names(records, run):
    """Group, job type and tags identify a run without opening it."""
    shown = records["run"][0]
    assert shown["run_id"] == run.path.name
    assert shown["run_group"] == "smoke"
    assert shown["job_type"] == "train"
    assert "lora.r=8" in shown["tags"]
    assert shown["display_name"].startswith("r=8 suite=heldout_syntax data=jsonl ")
    assert " seed42" in shown["display_name"]  # a long path may replace the model


def test_configuration_plan_and_facts_are_there(run):
    """The values are resolved ones, not overrides."""
    config = summary(run)["config"]
    assert config["lora"]["r"] == 8
    assert config["model"]["name"] == "tiny_llama"
    assert config["plan"]["steps"] == 4
    assert config["facts"]["trainable_parameters"] == 16_384


def test_history_has_every_step_on_both_axes(records, run):
    """Losses and cumulative supervised tokens are those of telemetry.jsonl."""
    rows = [record["item"] for record in records["history"]]
    shown = [
        (row["step"], row["train/loss"], row["data/supervised_tokens"])
        for row in rows
        if "train/loss" in row
    ]
    read = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    assert shown == [(p["step"], p["train/loss"], p["data/supervised_tokens"]) for p in read]
    assert [row["tuned/val_loss"] for row in rows if "tuned/val_loss" in row] == [
        e["payload"]["val/loss"] for e in read_events(run.telemetry) if e["event"] == "validation"
    ]


def test_summary_has_the_results(run):
    """Base and tuned validation loss, and the scorecard's KPIs."""
    shown = summary(run)["summary"]
    results = Manifest.read(run.manifest).results
    assert shown["base/val_loss"] == results["base_val_loss"]
    assert shown["tuned/val_loss"] == results["tuned_val_loss"]
    tuned = Scorecard.read(run.scorecard).conditions["tuned"]["parse_rate"]
    assert shown["tuned/parse_rate"] == tuned
    assert shown["status"] == "succeeded"


def test_scorecard_and_predictions_are_tables(records, run):
    """Their rows are those of scorecard.json and events.jsonl."""
    (row,) = [r["item"] for r in records["history"] if "scorecard.path" in r["item"]]
    (offline,) = run.wandb.glob("offline-run-*")
    table = json.loads((offline / "files" / row["scorecard.path"]).read_text(encoding="utf-8"))
    assert [line[0] for line in table["data"]] == ["base", "tuned"]
    items = json.loads((offline / "files" / row["predictions.path"]).read_text(encoding="utf-8"))
    assert len(items["data"]) == Scorecard.read(run.scorecard).items


def test_adapter_and_manifest_are_artifacts_inside_the_run(records, run):
    """The run directory is self-contained: it holds every file to be uploaded."""
    shown = {record["type"]: record for record in records["artifact"]}
    assert {"adapter", "manifest"} <= shown.keys()  # and W&B's own for the tables
    files = {entry["path"]: entry for entry in shown["adapter"]["manifest"]["contents"]}
    assert {"adapter.safetensors", "peft/adapter_model.safetensors"} <= files.keys()
    staged = Path(files["adapter.safetensors"]["local_path"])
    assert staged.is_relative_to(run.wandb.resolve())
    assert staged.read_bytes() == (run.adapter / "adapter.safetensors").read_bytes()


def test_nothing_is_left_outside_of_the_run(run, home, notes_of):
    """No account, no prompt, and no file in the home directory."""
    assert [p for p in home.rglob("*") if "wandb" in p.name] == []
    assert [e for e in read_events(run.telemetry) if e["event"] == "sink_failed"] == []
    assert notes_of(run) == []
