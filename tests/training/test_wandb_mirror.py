from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import fork_server
import pytest

from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.metrics import declares, own_metric
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.telemetry import Telemetry, read_events, rewind
from mens_exp.config.logger import WandbLogger, WandbMode
from mens_exp.errors import MensError, SetupError
from mens_exp.training.wandb_mirror import WandbMirror
from mens_exp.training.wandb_names import agent_inputs
from mens_exp.training.wandb_rendering import settings_of

RUN_ID = "20261120T055801_abcd1234"
SHA = "ab" * 32
CONFIG = {"seed": 42, "model": {"name": "tiny_llama"}, "lora": {"r": 8}}
PLAN = {"steps": 2, "tokens_total": 200}


class FakeRun:
    """The real directory, telemetry and manifest without a task."""

    def __init__(self, path):
        self.dir = RunDir(path)
        self.telemetry = Telemetry(self.dir.telemetry)
        self.manifest = Manifest(
            run_id=RUN_ID,
            task="train",
            started_utc="2026-11-20T05:58:01.123Z",
            overrides=["lora.r=8"],
            choices={"model": "tiny_llama", "backend": "qlora"},
            config_digest=SHA,
            seed=42,
        )
        self.manifest.write(self.dir.manifest)
        self.after = []

    def after_close(self, fn):
        self.after.append(fn)

    def emit_start(self):
        payload = {"run_id": RUN_ID, "task": "train", "config": CONFIG, "overrides": []}
        self.telemetry.emit("run_started", payload)
        self.telemetry.emit("plan", PLAN)
        self.emit_validation(0, "base", 2.0)

    def emit_step(self, step):
        self.telemetry.emit(
            "step",
            {
                "step": step,
                "train/loss": 2.0 - step / 4,
                "perf/step_s": float(step),
                "perf/eta_s": None,
                "data/supervised_tokens": 100 * step,
            },
        )

    def emit_validation(self, step, condition, loss):
        payload = {"step": step, "condition": condition, "val/loss": loss}
        self.telemetry.emit("validation", payload)

    def emit_scorecard(self, step, parse_rate):
        payload = {"step": step, "items": 8, "unknown": {"eval/task_success": "no sandbox"}}
        self.telemetry.emit("scorecard_step", {**payload, "eval/parse_rate": parse_rate})

    def close(self, status=Status.SUCCEEDED, **results):
        self.manifest.status = status
        self.manifest.results = dict(results)
        self.telemetry.close()
        self.manifest.write(self.dir.manifest)
        after, self.after = self.after, []
        for fn in after:
            fn(self.manifest)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Set an empty home directory without an account, and clear all W&B variables."""
    path = tmp_path / "home"
    path.mkdir()
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("USERPROFILE", str(path))
    for name in [*os.environ]:
        if name.startswith(("WANDB", "XDG_", "NETRC")):
            monkeypatch.delenv(name)
    return path


@pytest.fixture
def run(tmp_path):
    """Return an unfinished run; it is closed after the test."""
    fake = FakeRun(tmp_path / "run")
    yield fake
    fake.close(Status.CANCELLED)


def mirror_of(run, **logger):
    return WandbMirror(logger=WandbLogger(**logger), run=run)


def started(run, **logger):
    mirror = mirror_of(run, **logger)
    mirror.start()
    return mirror


def offline_runs(run):
    return sorted(run.dir.wandb.glob("offline-run-*"))


def leet(path, *options):
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", *options, str(path)]
    return fork_server.run(command, check=True, capture_output=True, text=True).stdout


def records(path, kind):
    lines = [json.loads(line) for line in leet(path).splitlines()]
    return [line[kind] for line in lines if line["type"] == kind]


def history(path):
    return [record["item"] for record in records(path, "history")]


def summary(run):
    return json.loads(leet(run.dir.wandb, "--summary"))


def table_of(run, name):
    """Return the last table of a name from its file."""
    row = [one for one in history(run.dir.wandb) if f"{name}.path" in one][-1]
    return json.loads((offline_runs(run)[-1] / "files" / row[f"{name}.path"]).read_text("utf-8"))


def write_scorecard(run, **more):
    conditions = {"base": {"parse_rate": None, **more}, "tuned": {"parse_rate": 1.0, **more}}
    card = Scorecard(
        suite="heldout_syntax", suite_digest=SHA, items=1, conditions=conditions, generation={}
    )
    card.write(run.dir.scorecard)
    item = {"item_id": "i0", "prompt": "Write f.", "reference": "def f(): pass"}
    counts = {"finished": True, "error": None, "tokens_in": 3, "tokens_out": 4}
    base = {**item, **counts, "condition": "base", "completion": "def f(", "parses": False}
    tuned = {**item, **counts, "condition": "tuned", "completion": "f = 1", "parses": True}
    # The columns of version 1; later ones do not matter for this table.
    run.dir.events.write_text("".join(f"{json.dumps(event)}\n" for event in (base, tuned)))


def write_adapter(run):
    run.dir.peft.mkdir(parents=True)
    (run.dir.adapter / "adapter.safetensors").write_bytes(b"matrices")
    (run.dir.peft / "adapter_config.json").write_text("{}", encoding="utf-8")
    (run.dir.adapter / ".adapter.safetensors.0-0.tmp").write_bytes(b"half")


def test_leet_shows_the_resolved_configuration_and_the_plan(run):
    """Configuration and plan were recorded before the mirror started, and are kept."""
    run.emit_start()
    started(run)
    run.telemetry.emit("facts", {"seq_len": 512})
    run.close()
    shown = summary(run)
    assert shown["config"] == {**CONFIG, "plan": PLAN, "facts": {"seq_len": 512}}


def test_configuration_falls_back_to_config_yaml(run):
    """Without a run_started event the configuration is read from the file."""
    run.dir.config.write_text("seed: 42\nlora:\n  r: 8\n", encoding="utf-8")
    started(run)
    run.close()
    assert summary(run)["config"] == {"seed": 42, "lora": {"r": 8}}


def test_sections_of_other_tasks_are_no_part_of_the_configuration(run):
    """About forty irrelevant settings would hide those of training."""
    unread = {"chat": {"max_new_tokens": 9}, "serve": {"port": 1}, "push": {"message": "m"}}
    payload = {"run_id": RUN_ID, "task": "train", "config": {**CONFIG, **unread}, "overrides": []}
    run.telemetry.emit("run_started", payload)
    started(run)
    run.close()
    assert summary(run)["config"] == CONFIG


def test_metrics_of_the_users_are_curves_with_the_summary_that_they_declare(run):
    """Values of the base after training are not points; undotted names work like others."""
    declares("probe/entropy_of_w", unit="nats", direction="min", reduction="min")(object)
    own_metric("lr-AdamW")
    started(run)
    for step, value in ((1, 2.0), (2, 1.0), (3, 4.0)):
        values = {"probe/entropy_of_w": value, "lr-AdamW": 0.1}
        run.telemetry.emit("logged", {"step": step, "values": values})
        run.emit_step(step)
    other = {"step": 3, "condition": "base", "values": {"lr-AdamW": 7.0}}
    run.telemetry.emit("logged", other)
    run.close()
    rows = history(run.dir.wandb)
    assert [row["probe/entropy_of_w"] for row in rows] == [2.0, 1.0, 4.0]
    assert {row["lr-AdamW"] for row in rows} == {0.1}
    defined = {one["name"]: one for one in records(run.dir.wandb, "metric")}
    assert defined["probe/entropy_of_w"]["step_metric"] == "step"
    assert summary(run)["summary"]["probe/entropy_of_w"] == {"min": 1.0}


def test_the_best_point_of_each_curve_is_in_the_summary(run):
    """The metric's direction decides; the kept adapter's value stands beside it."""
    run.emit_start()
    started(run)
    for step, loss, rate in ((1, 1.5, 0.25), (2, 1.25, 0.75), (3, 1.75, 0.5)):
        run.emit_step(step)
        run.emit_scorecard(step, rate)
        run.emit_validation(step, "tuned", loss)
    run.emit_validation(3, "base", 0.5)
    run.close(tuned_val_loss=1.75)
    shown = summary(run)["summary"]
    assert (shown["best/val_loss"], shown["best/parse_rate"]) == (1.25, 0.75)
    assert shown["tuned/val_loss"] == 1.75


def test_the_best_point_of_a_metric_of_the_users_is_in_the_summary(run):
    """Without a declared direction there is no best point."""
    declares("probe/margin_of_w", unit="1", direction="max")(object)
    own_metric("probe/width_of_w")
    directions = {"probe/margin_of_w": "max", "probe/width_of_w": "none"}
    run.manifest.facts = {"metrics": {name: {"direction": of} for name, of in directions.items()}}
    started(run)
    for step, value in ((1, 1.0), (2, 3.0), (3, 2.0)):
        run.telemetry.emit("logged", {"step": step, "values": {"probe/margin_of_w": value}})
        run.emit_step(step)
    other = {"step": 3, "condition": "base", "values": {"probe/margin_of_w": 9.0}}
    run.telemetry.emit("logged", {**other, "values": {**other["values"], "probe/width_of_w": 1.0}})
    run.close()
    shown = summary(run)["summary"]
    assert shown["best/probe/margin_of_w"] == 3.0
    assert not [name for name in shown if "width_of_w" in name and name.startswith("best/")]


def test_shares_of_the_scorecard_are_a_panel_of_bars(run):
    """The chart is W&B's own bar chart; unknown values have no bar."""
    started(run)
    run.emit_step(1)
    write_scorecard(run, compile_at_1=0.75, latency_p50_ms=9.0)
    run.close()
    shown = {}
    for record in records(run.dir.wandb, "config"):
        shown |= record.get("update", {})
    panel = shown["_wandb.visualize.plots/kpis"]["panel_config"]
    assert panel["panelDefId"] == "wandb/bar/v0"
    assert table_of(run, "plots/kpis_table")["data"] == [
        *(["parse_rate · tuned", 1.0], ["compile_pass_1 · base", 0.75]),
        ["compile_pass_1 · tuned", 0.75],
    ]


def test_wandb_collects_what_it_is_asked_to_collect(run):
    """Notes, commit, packages and the load of the training process are collected."""
    started(run, notes="Does rank matter?", git=True, requirements=True)
    run.close()
    assert records(run.dir.wandb, "run")[0]["notes"] == "Does rank matter?"
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (environment, *_) = records(run.dir.wandb, "environment")
    assert environment["git"]["commit"] == commit.strip()
    files = offline_runs(run)[0] / "files"
    assert "lightning==" in (files / "requirements.txt").read_text("utf-8")
    logger = WandbLogger(system_metrics=True)
    sampled = settings_of(logger, run.dir, run.manifest, CONFIG, "id", process=7)
    assert (sampled["x_disable_stats"], sampled["x_stats_pid"]) == (False, 7)
    assert (
        settings_of(WandbLogger(console=True), run.dir, run.manifest, CONFIG, "id")["console"]
        == "wrap"
    )
    later = settings_of(logger, run.dir, run.manifest, CONFIG, "id")
    assert later["x_disable_stats"] is True  # at that time on another machine


def test_leet_shows_each_step_with_both_axes(run):
    """Each row has the optimizer step and the supervised tokens so far."""
    run.emit_start()
    started(run)
    for step in (1, 2):
        run.emit_step(step)
    run.emit_validation(2, "tuned", 1.25)
    run.close()
    axes = ("step", "data/supervised_tokens", "train/loss", "tuned/val_loss")
    shown = [tuple(row.get(name) for name in axes) for row in history(run.dir.wandb)]
    assert shown == [(0, 0, None, 2.0), (1, 100, 1.75, None), (2, 200, 1.5, 1.25)]


def test_a_scorecard_of_training_is_a_point_of_its_curve(run):
    """Unknown values and the number of items are not points of a curve."""
    run.emit_start()
    started(run)
    for step, rate in ((1, 0.25), (2, 0.5)):
        run.emit_step(step)
        run.emit_scorecard(step, rate)
    run.close()
    rows = history(run.dir.wandb)
    name = "tuned/parse_rate"
    assert [(row["step"], row[name]) for row in rows if name in row] == [(1, 0.25), (2, 0.5)]
    assert not any("items" in row or "tuned/task_success" in row for row in rows)


@pytest.mark.parametrize("has_scorecard", [True, False])
def test_the_result_of_a_kpi_has_the_last_word_over_its_curve(run, has_scorecard):
    """The curve uses the first items or another step's adapter, so the result overrides it."""
    started(run)
    run.emit_step(1)
    run.emit_scorecard(1, 0.25)
    run.emit_validation(1, "tuned", 1.5)
    if has_scorecard:
        write_scorecard(run)
    run.close(tuned_val_loss=1.25, base_val_loss=2.0)
    shown = summary(run)["summary"]
    assert (shown["tuned/val_loss"], shown["base/val_loss"]) == (1.25, 2.0)
    assert shown["tuned/parse_rate"] == (1.0 if has_scorecard else 0.25)
    (row,) = history(run.dir.wandb)
    assert (row["tuned/parse_rate"], row["tuned/val_loss"]) == (0.25, 1.5)


def test_one_kpi_has_one_name_everywhere(run):
    """Curve, axis, summary and tables use the name from the KPI table after its condition."""
    started(run)
    run.emit_step(1)
    payload = {"step": 1, "items": 8, "unknown": {}, "eval/compile_pass_1": 0.5}
    run.telemetry.emit("scorecard_step", payload)
    write_scorecard(run, compile_at_1=0.75, repair_stall_rate=0.0, latency_p50_ms=9.0)
    run.close(tuned_val_bits_per_byte=0.5, val_loss_change_frac=-0.5)
    defined = {one["name"]: one for one in records(run.dir.wandb, "metric")}
    assert defined["tuned/compile_pass_1"]["step_metric"] == "step"
    row, shown = history(run.dir.wandb)[-1], summary(run)["summary"]
    assert row["tuned/compile_pass_1"] == 0.5
    own = {"tuned/compile_pass_1", "tuned/repair_stalled", "tuned/latency_p50_ms"}
    assert {"tuned/parse_rate", "tuned/val_bits_per_byte", *own} <= shown.keys()
    card = table_of(run, "scorecard")
    assert card["columns"][1:] == [
        *("compile_pass_1", "latency_p50_ms", "parse_rate", "repair_stalled")
    ]
    assert card["data"] == [["base", 0.75, 9.0, None, 0.0], ["tuned", 0.75, 9.0, 1.0, 0.0]]
    assert {"base/compile_pass_1", "tuned/compile_pass_1"} <= {
        *table_of(run, "predictions")["columns"]
    }
    spelled = {*defined, *row, *shown, *card["columns"]}
    assert not {name for name in spelled if name.startswith(("eval/", "tuned_", "base_", "val/l"))}
    assert not {name for name in spelled if "compile_at" in name or "stall_rate" in name}


def test_metrics_are_drawn_against_the_step_and_tokens_are_an_axis(run):
    """The metric table decides the axis and the summary."""
    started(run)
    run.close()
    defined = {record["name"]: record for record in records(run.dir.wandb, "metric")}
    assert defined["train/loss"]["step_metric"] == "step"
    assert defined["perf/step_s"]["summary"] == {"mean": True}
    assert "step_metric" not in defined["data/supervised_tokens"]


def test_base_validation_after_training_is_no_point_of_the_curve(run):
    """It would look like the tuned model's loss at that step."""
    started(run)
    run.emit_step(1)
    run.emit_validation(1, "base", 2.0)
    run.close()
    assert "tuned/val_loss" not in history(run.dir.wandb)[-1]
    assert summary(run)["summary"]["base/val_loss"] == 2.0


def test_leet_shows_the_results_as_summary(run):
    """Unknown values are null, as in the manifest."""
    started(run)
    write_scorecard(run)
    run.close(tuned_val_loss=1.25, peak_cuda_bytes=None)
    shown = summary(run)["summary"]
    assert shown["tuned/val_loss"] == 1.25
    written = {}  # --summary omits null; the log has it
    for record in records(run.dir.wandb, "summary"):
        written |= record["update"]
    assert written["peak_cuda_bytes"] is None
    assert shown["tuned/parse_rate"] == 1.0
    assert shown["status"] == "succeeded"


def test_leet_shows_scorecard_and_predictions_as_tables(run):
    """The tables have condition by KPI, and base beside tuned for each item."""
    started(run)
    run.emit_step(1)
    write_scorecard(run)
    run.close()
    row = history(run.dir.wandb)[-1]
    assert row["step"] == 1
    files = offline_runs(run)[0] / "files"
    card = json.loads((files / row["scorecard.path"]).read_text(encoding="utf-8"))
    assert card["columns"] == ["condition", "parse_rate"]
    assert card["data"] == [["base", None], ["tuned", 1.0]]
    items = json.loads((files / row["predictions.path"]).read_text(encoding="utf-8"))
    sides = ["base", "tuned", "base/parse_rate", "tuned/parse_rate"]
    assert items["columns"][3:7] == sides
    shown = ["i0", "Write f.", "def f(): pass", "def f(", "f = 1", False, True]
    assert [line[:7] for line in items["data"]] == [shown]
    assert "tuned/compile_pass_1" in items["columns"]
    assert "tuned/task_success" not in items["columns"]  # no answer has one


def test_predictions_have_what_is_known_of_meaning_repairs_and_errors(run):
    """Each column exists for both conditions, and for those that the suite adds."""
    item = {"item_id": "i0", "prompt": "Write f.", "reference": "", "group": "", "sample": 0}
    made = {"version": 3, "finished": True, "parses": True, "tokens_in": 3, "tokens_out": 4}
    none = ["pass_1", "canonical_pass", "strictness", "latency_ms", "time_to_first_valid_ms"]
    none += ["placeholder_marker_hits", "trivial_placeholder_output", "richness"]
    none += ["compile_pass_1", "compile_pass_n", "anti_stub_pass"]
    shared = {**item, **made, **dict.fromkeys(none), "unknown": {}}
    sides = {
        "base": {
            "completion": "a",
            "error": "This test fails: f() == 1",
            "error_count": 3,
            "outcome": "failed_test",
            "task_success": False,
            "semantic_task_success": False,
            "attempts": 3,
            "repair_depth": None,
            "repair_stalled": True,
            "style": "whole",
        },
        "tuned": {
            "completion": "b",
            "error": None,
            "error_count": 1,
            "outcome": "passed",
            "task_success": True,
            "semantic_task_success": False,
            "attempts": 2,
            "repair_depth": 1,
            "repair_stalled": False,
            "style": "class Solution",
        },
    }
    sides["other"] = {**sides["tuned"], "completion": "c"}
    lines = [json.dumps({**shared, "condition": name, **of}) for name, of in sides.items()]
    run.dir.events.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    started(run)
    run.close()
    table = table_of(run, "predictions")
    (row,) = (dict(zip(table["columns"], line, strict=True)) for line in table["data"])
    assert (row["base"], row["tuned"], row["other"]) == ("a", "b", "c")
    names = ["task_success", "semantic_task_success", "attempts", "repair_depth", "error"]
    names += ["repair_stalled", "error_count", "outcome", "style"]
    for side, of in sides.items():
        assert {name: row[f"{side}/{name}"] for name in names} == {name: of[name] for name in names}
    places = [table["columns"].index(f"{side}/error") for side in sides]
    assert places == [places[0], places[0] + 1, places[0] + 2]
    assert not [name for name in table["columns"] if name.endswith(("/latency_ms", "/richness"))]


def test_leet_shows_adapter_and_manifest_as_artifacts(run):
    """Each has all files with their digests and no temporary files."""
    started(run)
    write_adapter(run)
    run.close()
    shown = {record["type"]: record for record in records(run.dir.wandb, "artifact")}
    assert sorted(shown) == ["adapter", "manifest"]
    files = {entry["path"]: entry for entry in shown["adapter"]["manifest"]["contents"]}
    assert sorted(files) == ["adapter.safetensors", "peft/adapter_config.json"]
    assert Path(files["adapter.safetensors"]["local_path"]).read_bytes() == b"matrices"
    assert Path(files["adapter.safetensors"]["local_path"]).is_relative_to(run.dir.wandb)
    metadata = json.loads(shown["manifest"]["metadata"])
    assert metadata["sha256"] == {"manifest.json": sha256_file(run.dir.manifest)}


def test_leet_shows_project_group_name_tags_and_job_type(run):
    """The logger's settings take precedence over the manifest."""
    run.emit_start()
    run.manifest.experiment = "double_quant"
    started(run, project="lab", tags=["mine"])
    run.close()
    shown = records(run.dir.wandb, "run")[0]
    assert shown["project"] == "lab"
    assert shown["run_group"] == "double_quant"
    assert shown["display_name"] == "r=8 seed42 tiny_llama qlora"
    assert shown["tags"] == ["lora.r=8", "mine"]
    assert shown["job_type"] == "train"


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(Status.SUCCEEDED, 0), (Status.FAILED, 1), (Status.CANCELLED, 1)],
)
def test_exit_code_tells_success(run, status, exit_code):
    """The mirror is finished with the exit code, whatever ended the run."""
    started(run)
    run.emit_step(1)
    run.close(status)
    assert [one["exit_code"] for one in records(run.dir.wandb, "exit")] == [exit_code]


def test_several_starts_make_one_mirror(run):
    """Lightning asks for the experiment before each fit and validation."""
    mirror = started(run)
    mirror.start()
    run.emit_step(1)
    run.close()
    mirror.start()
    assert len(offline_runs(run)) == 1
    assert len(history(run.dir.wandb)) == 1


def test_resumed_run_continues_the_same_wandb_run(run, tmp_path):
    """The second attempt replays the record of the first under the same id."""
    run.emit_start()
    started(run)
    for step in (1, 2):
        run.emit_step(step)
    run.close(Status.FAILED)
    rewind(run.dir.telemetry, 1)
    again = FakeRun(tmp_path / "run")
    started(again)
    again.emit_step(2)
    again.close()
    first, second = offline_runs(run)
    assert [record["run_id"] for record in records(second, "run")] == [RUN_ID]
    assert records(first, "run")[0]["run_id"] == RUN_ID
    assert records(second, "run")[0]["resume"] is True
    assert [row["step"] for row in history(second)] == [0, 1, 2]


def test_mirror_is_silent_and_stays_inside_the_run_directory(run, home, tmp_path, capfd):
    """Nothing is written to the console, the home directory or outside the run."""
    run.emit_start()
    started(run)
    run.emit_step(1)
    write_scorecard(run)
    write_adapter(run)
    run.close()
    assert capfd.readouterr() == ("", "")
    assert list(home.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "run"]


def test_mirror_collects_nothing_about_the_machine(run, monkeypatch):
    """Its files contain no host name, working directory, program or credentials."""
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(sys, "argv", ["a_program_of_its_own.py"])
    started(run)
    run.close()
    found = b"".join(path.read_bytes() for path in run.dir.wandb.rglob("*") if path.is_file())
    host = socket.gethostname()
    secrets = [str(Path.cwd()), sys.argv[0], "0123456789"]
    if len(host) > 4:  # a shorter string may occur in binary files by chance
        secrets.append(host)
    assert [text for text in secrets if text.encode() in found] == []


def test_process_is_left_as_it_was(run, monkeypatch):
    """Environment and exit hooks are unchanged during and after the run."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    before = dict(os.environ), sys.exit, sys.excepthook
    started(run)
    assert (dict(os.environ), sys.exit, sys.excepthook) == before
    run.close()
    assert (dict(os.environ), sys.exit, sys.excepthook) == before


def test_configuration_wins_over_the_environment(run, monkeypatch):
    """WANDB_ variables do not override the configuration."""
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setenv("WANDB_RUN_ID", "stray")
    started(run)
    run.close()
    assert records(run.dir.wandb, "run")[0]["run_id"] == RUN_ID


def test_the_run_of_an_agent_is_that_of_its_sweep(run):
    """Its own ids are used, under which the agent waits for the run."""
    told = {"WANDB_RUN_ID": "theirs", "WANDB_SWEEP_ID": "sweep"}
    run.manifest.inputs |= agent_inputs(told)
    started(run)
    run.close()
    (record, *_) = records(run.dir.wandb, "run")
    assert (record["run_id"], record["sweep_id"]) == ("theirs", "sweep")


def test_online_without_an_account_is_refused_without_a_prompt(run, monkeypatch):
    """Even on a terminal there is an error with a remedy, and no prompt."""
    terminal = SimpleNamespace(isatty=lambda: True, write=len, flush=list)
    monkeypatch.setattr(sys, "stdin", terminal)  # without readline a prompt would fail
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(SetupError, match="logger=none") as caught:
        started(run, mode=WandbMode.online)
    assert "No API key configured" in str(caught.value)
    assert run.after == []


def test_tag_that_wandb_refuses_is_refused_at_the_start(run):
    """A user's tag is not truncated silently."""
    with pytest.raises(SetupError, match="65 characters"):
        started(run, tags=["x" * 65])


def test_sink_that_fails_later_is_recorded_and_still_finishes(run, monkeypatch):
    """Training continues, and the mirror keeps what was logged before."""
    mirror = started(run)
    run.emit_step(1)

    def refuse(*_, **__):
        raise OSError("disk full")

    monkeypatch.setattr(mirror._sink, "log", refuse)
    run.emit_step(2)
    run.emit_step(3)
    run.close()
    names = [record["event"] for record in read_events(run.dir.telemetry)]
    assert names == ["step", "step", "sink_failed", "step"]
    assert [row["step"] for row in history(run.dir.wandb)] == [1]


def test_unreadable_scorecard_still_finishes_the_mirror(run):
    """The error is recorded by the run itself."""
    started(run)
    run.dir.scorecard.write_text("{", encoding="utf-8")
    with pytest.raises(MensError, match=r"scorecard\.json"):
        run.close()
    assert [one["exit_code"] for one in records(run.dir.wandb, "exit")] == [0]


def test_crash_of_wandbs_process_does_not_end_ours(run, monkeypatch):
    """W&B raises SystemExit, which is caught here."""
    import wandb

    teardown = wandb.teardown

    def crash(exit_code):
        teardown(exit_code=exit_code)
        raise SystemExit(2)

    monkeypatch.setattr(wandb, "teardown", crash)
    started(run)
    with pytest.raises(MensError, match="exit code 2"):
        run.close()


def test_run_of_somebody_else_in_the_process_survives(run, tmp_path):
    """A W&B run of a notebook is neither reused nor finished."""
    import wandb

    options = {"mode": "offline", "dir": tmp_path, "id": "theirs"}
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    hooks = {"exit": sys.exit, "excepthook": sys.excepthook}
    theirs = wandb.init(**options, settings=settings)
    try:
        started(run)
        run.emit_step(1)
        run.close()
        theirs.log({"x": 1})
        assert wandb.run is theirs
        assert len(history(run.dir.wandb)) == 1
    finally:
        theirs.finish()
        wandb.teardown()
        vars(sys).update(hooks)


def test_wandb_is_not_imported_before_the_mirror_starts():
    """Importing and constructing the callback do not import wandb."""
    code = (
        "import sys; from pathlib import Path; from types import SimpleNamespace as N\n"
        "from mens_exp.training.wandb_mirror import WandbMirror\n"
        "WandbMirror(logger=None, run=N(manifest=N(run_id='r')))\n"
        "sys.exit('wandb' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, env=environment).returncode == 0
    )
