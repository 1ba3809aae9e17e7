from __future__ import annotations

import json

import pytest

from mens_exp.artifacts.manifest import Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.sweeps.search_study import Curve, objective_values


def line(event, **payload):
    return json.dumps({"ts_ms": 0, "event": event, "payload": payload}) + "\n"


def validated(step, loss, condition="tuned"):
    return line("validation", step=step, condition=condition, **{"val/loss": loss})


def append(path, *lines):
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def test_losses_are_read_as_they_come(tmp_path):
    """Validations of the base and before the first step do not count."""
    path = tmp_path / "telemetry.jsonl"
    curve = Curve(path)
    assert curve.read() is False
    append(path, validated(0, 9.0, "base"), validated(0, 8.0), line("train_start", max_steps=9))
    assert curve.read() is True
    assert curve.points == []
    append(path, line("step", step=3), validated(3, 7.0), validated(6, 6.0)[:20])
    assert curve.read() is True
    assert curve.points == [(3, 7.0)]
    append(path, validated(6, 6.0)[20:], validated(7, None))
    assert curve.read() is True
    assert curve.points == [(3, 7.0), (6, 6.0)]


@pytest.mark.parametrize("end", [validated(9, 5.0), line("train_complete", step=9)])
def test_a_run_with_no_step_left_is_not_to_be_ended(tmp_path, end):
    """It cannot save any time, and its result is worth more."""
    path = tmp_path / "telemetry.jsonl"
    append(path, line("train_start", max_steps=9), validated(3, 7.0), end)
    assert Curve(path).read() is False


def test_a_run_put_back_to_a_checkpoint_is_read_anew(tmp_path):
    """Losses after the checkpoint are dropped."""
    path = tmp_path / "telemetry.jsonl"
    append(path, line("train_start", max_steps=9), validated(3, 7.0), validated(6, 6.0))
    curve = Curve(path)
    curve.read()
    path.write_text(line("train_start", max_steps=9) + validated(3, 7.0), encoding="utf-8")
    assert curve.read() is True
    assert curve.points == [(3, 7.0)]


def test_objectives_are_those_of_a_comparison(write_manifest, tmp_path):
    """From the manifest or the tuned model's scorecard, in the requested order."""
    run = RunDir(tmp_path / "run")
    results = {"tuned_val_loss": 1.5, "peak_cuda_bytes": None, "peak_rss_bytes": 700}
    write_manifest(run, Status.SUCCEEDED, results=results)
    names = ["peak_bytes", "val_loss"]
    assert objective_values(run, names) == ([700.0, 1.5], None)
    Scorecard(
        suite="s",
        suite_digest="d" * 64,
        items=2,
        conditions={"base": {"task_success": 0.1}, "tuned": {"task_success": 0.5}},
        generation={},
    ).write(run.scorecard)
    assert objective_values(run, ["task_success"]) == ([0.5], None)


def test_a_value_that_is_not_there_has_its_reason(write_manifest, tmp_path):
    """Such a trial has failed, although its run did not."""
    run = RunDir(tmp_path / "run")
    write_manifest(run, Status.SUCCEEDED, results={"tuned_val_loss": None})
    assert objective_values(run, ["val_loss"]) == (
        None,
        "val_loss: the run's record has no value",
    )
    assert objective_values(run, ["task_success"]) == (
        None,
        "task_success: the run measured none",
    )
    run.manifest.write_text("{", encoding="utf-8")
    values, why = objective_values(run, ["val_loss"])
    assert values is None
    assert "not JSON" in str(why)
