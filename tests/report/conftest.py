from __future__ import annotations

import pytest
from item_events import item_event

from mens_exp.artifacts.atomic import write_json, write_text
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Condition, Scorecard, write_item_events
from mens_exp.artifacts.telemetry import Telemetry
from mens_exp.report import terminal

SHA = "ab" * 32


def manifest(**changes):
    """Return the manifest of a finished QLoRA run on the bundled base."""
    fields = {
        "run_id": "20261120T055801Z_3fa9c1d2",
        "task": "train",
        "status": Status.SUCCEEDED,
        "started_utc": "2026-11-20T05:58:01.123Z",
        "ended_utc": "2026-11-20T06:04:40.871Z",
        "overrides": ["optim.lr=2e-4", "data.path=my rows.jsonl"],
        "config_digest": SHA,
        "seed": 1,
        "provenance": {"commit": "9f" * 20, "dirty": True, "packages": {"torch": "2.13.0"}},
        "inputs": {
            "base_model": "HuggingFaceTB/SmolLM2-135M-Instruct",
            "base_source": "bundled",
            "base_weights_sha256": SHA,
            "data": {"source": "stdlib", "train_rows": 2904},
        },
        "facts": {"quant": "nf4", "double_quant": True, "trainable_parameters": 4884480},
        "results": {
            "base_val_loss": 2.0,
            "tuned_val_loss": 1.5,
            "steps": 3,
            "tokens": 6000,
            "tokens_per_s": 441.2,
            "supervised_tokens_per_s": 331.6,
            "train_s": 274.4,
            "wall_s": 399.7,
            "peak_rss_bytes": 2268000000,
            "peak_cuda_bytes": None,
        },
        "unknown": {"results.peak_cuda_bytes": "this run used no GPU"},
        "outputs": {"adapter/adapter.safetensors": SHA},
    }
    return Manifest(**(fields | changes))


def failed_manifest():
    """Return the manifest of a run that failed before anything was measured."""
    return manifest(
        status=Status.FAILED,
        error={
            "type": "DataError",
            "message": "rows.jsonl:3: not JSON",
            "remedy": "fix the line",
            "exit_code": 2,
        },
        inputs={},
        facts={},
        results={},
        unknown={},
        outputs={},
    )


def make_plan():
    """Return a plan with estimated counts."""
    return {
        "format": "mens_exp_plan",
        "version": 1,
        "model": "SmolLM2-135M-Instruct (bundled)",
        "backend": "qlora",
        "quant": "nf4, double quantization",
        "lora": {"r": 16, "alpha": 16},
        "objective": "assistant",
        "trainable_parameters": 4884480,
        "data": {
            "source": "stdlib",
            "train_rows": 2900,
            "train_tokens": 402000,
            "val_tokens": 20400,
            "exact": False,
            "basis": "estimated from file sizes",
        },
        "tokens_per_step": 2048,
        "steps": 3,
        "tokens_total": 6144,
        "time_s": {"estimate": 262.0, "basis": "467 tokens per second"},
        "memory_bytes": {
            "estimate": 2 * 1024**3,
            "components": {"weights": 1024**3, "activations": 1024**3},
            "basis": "model of the step",
        },
        "measured": None,
    }


def make_item(condition, completion, **changes):
    """Return one completion; both conditions of an item share its id."""
    named = {
        "item_id": "textwrap.py::indent",
        "condition": Condition(condition),
        "prompt": "Write `indent`.",
        "reference": "def indent(): ...",
        "completion": completion,
        "tokens_in": 8,
        "tokens_out": 12,
    }
    return item_event(**{**named, **changes})


def scorecard():
    """Return a scorecard of 16 items, of which 10 and 14 parse."""
    return Scorecard(
        suite="heldout_syntax",
        suite_digest=SHA,
        items=16,
        generation={"engine": "hf", "temperature": 0.0, "samples": 1, "max_retries": 0},
        conditions={
            "base": {"parse_rate": 0.625, "parsed": 10, "completed": 9, "tokens_out_mean": 61.4},
            "tuned": {"parse_rate": 0.875, "parsed": 14, "completed": 15, "tokens_out_mean": 72.9},
        },
    )


def write_telemetry(run, losses):
    """Write one step per loss, a base validation before and a tuned one after."""
    with Telemetry(run.telemetry, clock=lambda: 1.0) as telemetry:
        base = {"step": 0, "condition": "base", "val/loss": 2.0, "val/supervised_tokens": 90}
        telemetry.emit("validation", base)
        for step, loss in enumerate(losses, start=1):
            telemetry.emit(
                "step",
                {
                    "step": step,
                    "train/loss": loss,
                    "train/grad_norm": 0.5,
                    "optim/lr": 2e-4,
                    "perf/tokens_per_s": 441.0,
                    "perf/supervised_tokens_per_s": 331.0,
                },
            )
        tuned = {**base, "step": len(losses), "condition": "tuned", "val/loss": 1.5}
        telemetry.emit("validation", tuned)


@pytest.fixture
def write_run(tmp_path):
    """Write a finished run with the given completions and changes to its manifest."""

    def write(items=None, **changes):
        run = RunDir(tmp_path)
        manifest(**changes).write(run.manifest)
        write_json(run.plan, make_plan())
        write_text(run.config, "seed: 1\n")
        write_telemetry(run, [2.1, 1.8, 1.6])
        scorecard().write(run.scorecard)
        both = [make_item("base", "def f(:", parses=False, error="line 1: invalid syntax")]
        write_item_events(run.events, items or [*both, make_item("tuned", "def f(): pass")])
        return run

    return write


@pytest.fixture(scope="session")
def screen():
    """Return the text of parts of a document on a terminal of a given width."""

    def drawn(parts, width=80, *, is_plain=False):
        lines = [line.plain for line in terminal.lines(parts, width, is_plain=is_plain)]
        return "\n".join(lines)

    return drawn


@pytest.fixture
def failed_run(tmp_path):
    """Write a run directory with only a manifest."""
    run = RunDir(tmp_path)
    failed_manifest().write(run.manifest)
    return run


@pytest.fixture
def plan():
    return make_plan()


@pytest.fixture
def item():
    return make_item
