"""Files for the mens trainer, with keys and values written here by hand."""

from __future__ import annotations

import copy
import json

import pytest

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.report.write import run_summary, training_skip_stats, write_report

SHA = "ab" * 32
MANIFEST = {
    "run_id": "20261120T055801Z_3fa9c1d2",
    "task": "train",
    "status": "succeeded",
    "started_utc": "2026-11-20T05:58:01.123Z",
    "ended_utc": "2026-11-20T06:04:40.871Z",
    "config_digest": SHA,
    "contract": {"digest": "cd" * 32},
    "seed": 1,
    "inputs": {
        "base_model": "org/model",
        "data": {
            "train_rows": 90,
            "train_truncated": 7,
            "train_dropped": 10,
            "train_short": 3,
            "quarantined": {"rows": 130, "bad": 5, "reasons": {"not JSON": 2, "no prompt": 3}},
            "filtered": {"rows": 125, "kept": 110, "refused": {"min_rating": 11, "category": 4}},
        },
    },
    "results": {
        "base_val_loss": 2.0,
        "tuned_val_loss": 1.5,
        "steps": 6,
        "micro_batches": 23,
        "tokens": 6000,
        "supervised_tokens": 900,
        "wall_s": 12.5,
    },
    "outputs": {"adapter/adapter.safetensors": SHA, "telemetry.jsonl": SHA},
}


def manifest(**changes):
    return Manifest(**copy.deepcopy(MANIFEST | changes))


def test_the_skips_of_a_manifest_typed_by_hand():
    """Dropped documents are short or unsupervised; other skips have their own reasons."""
    assert training_skip_stats(manifest()) == {
        "schema": "vox_mens_training_skip_stats_v1",
        "optimizer_steps_executed": 6,
        "micro_steps_executed": 23,
        "skip_no_supervised_positions": 7,
        "skip_short_seq": 3,
        "skip_curriculum": 0,
        "skip_token_id_oob": 0,
        "no_supervised_skip_rate": 0.07,
        "mens_exp": {
            "run_id": "20261120T055801Z_3fa9c1d2",
            "documents": 90,
            "truncated": 7,
            "skips": {
                "bad_vocab": 0,
                "short_seq": 3,
                "no_supervision": 7,
                "quarantined": {"not JSON": 2, "no prompt": 3},
                "filtered": {"min_rating": 11, "category": 4},
            },
            "unknown": {},
        },
    }


def test_the_summary_of_a_manifest_typed_by_hand():
    """The keys are theirs plus one of ours; unknown values are null with a reason."""
    found = run_summary(manifest())
    ours = found.pop("mens_exp")
    assert found == {
        "schema": "vox_mens_run_summary_v1",
        "run_id": "20261120T055801Z_3fa9c1d2",
        "base_model": "org/model",
        "adapter_tag": None,
        "global_step": 23,
        "optimizer_step_count": 6,
        "avg_train_loss": None,
        "avg_val_loss_last_epoch": 1.5,
        "total_tokens": 6000,
        "artifacts": {
            "final_adapter": "adapter/adapter.safetensors",
            "training_skip_stats": "training_skip_stats.json",
            "telemetry_jsonl": "telemetry.jsonl",
            "model_card": "MODEL_CARD.md",
        },
    }
    assert ours.pop("unknown").keys() == {"adapter_tag", "avg_train_loss"}
    assert ours == {
        "status": "succeeded",
        "experiment": None,
        "started_utc": "2026-11-20T05:58:01.123Z",
        "ended_utc": "2026-11-20T06:04:40.871Z",
        "config_digest": SHA,
        "contract_digest": "cd" * 32,
        "base_val_loss": 2.0,
        "supervised_tokens": 900,
        "wall_s": 12.5,
    }


def test_rows_that_were_streamed_are_counted_as_far_as_they_were_read():
    """The first window, which the inputs record, is included."""
    rows = {"rows": 50, "bad": 2, "filtered": 4}
    read = {"documents": 40, "truncated": 1, "dropped": 4, "short": 1, "rows": rows}
    inputs = {"data": {"first_window": {"train_rows": 5, "train_dropped": 0}}}
    found = training_skip_stats(
        manifest(inputs=inputs, results=MANIFEST["results"] | {"streamed": read})
    )
    assert found["skip_no_supervised_positions"] == 3
    assert found["no_supervised_skip_rate"] == pytest.approx(3 / 44)
    assert found["mens_exp"]["documents"] == 40
    assert found["mens_exp"]["skips"]["quarantined"] == 2
    assert found["mens_exp"]["skips"]["filtered"] == 4


def test_the_filters_of_a_mix_s_sources_are_added_up():
    """Each source has its own filters, and the mix has one for all rows."""
    sources = {
        "a": {"rows": 5, "refused": {"min_rating": 2}},
        "b": {"rows": 5, "refused": {"min_rating": 1, "language": 3}},
        "c": {"rows": 5},
    }
    data = MANIFEST["inputs"]["data"] | {"mixed": {"sources": sources}}
    found = training_skip_stats(manifest(inputs={"data": data}))["mens_exp"]["skips"]["filtered"]
    assert found == {"min_rating": 14, "category": 4, "language": 3}


def test_what_a_run_never_reached_is_null_with_its_reason():
    """An uncounted value is not shown as zero."""
    failed = manifest(status="failed", inputs={}, results={}, outputs={})
    stats, summary = training_skip_stats(failed), run_summary(failed)
    null = {name for name, value in stats.items() if value is None}
    assert null == {
        "optimizer_steps_executed",
        "micro_steps_executed",
        "skip_no_supervised_positions",
        "skip_short_seq",
        "no_supervised_skip_rate",
    }
    assert stats["mens_exp"]["unknown"].keys() == null
    assert summary["artifacts"]["final_adapter"] is None
    assert (
        summary["mens_exp"]["unknown"]["artifacts.final_adapter"] == "not reached: the run failed"
    )


def test_only_training_runs_get_the_files(tmp_path):
    """An evaluation skips no training rows."""
    for task, expected in (("train", True), ("evaluate", False)):
        run = RunDir(tmp_path / task)
        run.path.mkdir()
        manifest(task=task).write(run.manifest)
        write_report(run)
        assert run.run_summary.is_file() is expected
        assert run.skip_stats.is_file() is expected


def test_a_real_run_counts_what_it_left_out(train_in, tmp_path):
    """Rows too long for their answer, a bad line and a filter are counted from a real run."""
    rows = [{"prompt": f"Add {n}.", "response": f"x + {n}", "rating": 5} for n in range(40)]
    long = [{"prompt": "word " * 400 + str(n), "response": "y", "rating": 5} for n in range(3)]
    low = [{"prompt": f"Low {n}.", "response": "z", "rating": 1} for n in range(4)]
    lines = [json.dumps(row) for row in [*rows, *long, *low]]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*lines, "{"]) + "\n")
    run = train_in(
        tmp_path / "run",
        *("data=jsonl", f"data.path={path}", "data.seq_len=64", "data.filter.min_rating=3"),
        *("data.on_bad_row=quarantine", "data.max_bad_frac=0.5", "trainer.max_steps=2"),
        "trainer.accumulate_grad_batches=3",
    )
    record = Manifest.read(run.manifest)
    stats = json.loads(run.skip_stats.read_text("utf-8"))
    ours = stats["mens_exp"]["skips"]
    assert ours["filtered"] == {"min_rating": 4}
    assert sum(ours["quarantined"].values()) == 1
    assert (ours["bad_vocab"], ours["short_seq"]) == (0, 0)
    sides = record.inputs["data"]
    elsewhere = 43 - stats["mens_exp"]["documents"] - ours["no_supervision"]
    assert elsewhere == sides["val_rows"] + sides["heldout_rows"]
    assert 1 <= ours["no_supervision"] <= 3
    assert (stats["optimizer_steps_executed"], stats["micro_steps_executed"]) == (2, 6)
    summary = json.loads(run.run_summary.read_text("utf-8"))
    assert (summary["global_step"], summary["optimizer_step_count"]) == (6, 2)
    steps = [one["payload"] for one in read_events(run.telemetry) if one["event"] == "step"]
    assert summary["total_tokens"] == steps[-1]["data/tokens"]
    for file in (run.path / name for name in summary["artifacts"].values()):
        assert file.is_file()
