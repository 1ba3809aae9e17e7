"""Scorecards during training, as a whole run shows them."""

from __future__ import annotations

import pytest

from mens_exp import cli
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.scorecard import Scorecard, read_item_events
from mens_exp.artifacts.telemetry import read_events
from mens_exp.export.bundle import run_files

SUITE = ("suite=heldout_syntax", "suite.items=2", "suite.max_new_tokens=64")
EVERY = (*SUITE, "callbacks.scorecard.every_n_steps=2", "callbacks.scorecard.items=1")
BY_KPI = ("adapter.select=best", "adapter.metric=parse_rate", "trainer.val_check_interval=4")


def adapter(run):
    return (run.adapter / "adapter.safetensors").read_bytes()


def payloads(run):
    events = read_events(run.telemetry)
    return [event["payload"] for event in events if event["event"] == "scorecard_step"]


@pytest.fixture(scope="module")
def scored(finished_with):
    """A run scored after steps 2 and 4, with its adapter selected by a KPI; do not change it."""
    return finished_with(*EVERY, *BY_KPI)


def test_a_run_that_scores_itself_trains_the_same(train_in, finished, tmp_path):
    """The adapter and the loss of every step are those of a run without scorecards."""
    run = train_in(tmp_path / "run", *EVERY)
    assert [(p["step"], p["items"]) for p in payloads(run)] == [(2, 1), (4, 1)]
    assert adapter(run) == adapter(finished)
    losses = [
        [e["payload"]["train/loss"] for e in read_events(one.telemetry) if e["event"] == "step"]
        for one in (run, finished)
    ]
    assert losses[0] == losses[1]


def test_its_answers_are_apart_from_the_final_scorecard(scored):
    """One item for each step in training; two for base and tuned at the end."""
    names = sorted(path.name for path in scored.scorecards.iterdir())
    assert names == ["step_00000002.jsonl", "step_00000004.jsonl"]
    assert [len(read_item_events(scored.events_at(step))) for step in (2, 4)] == [1, 1]
    final = read_item_events(scored.events)
    assert len(final) == 4
    assert Scorecard.read(scored.scorecard).items == 2
    assert "KPIs while training" in scored.report.read_text(encoding="utf-8")
    assert {f"scorecards/{name}" for name in names} <= run_files(scored).keys()


def test_the_adapter_of_the_best_kpi_is_the_result(scored):
    """The earliest of equal adapters; the manifest has the criterion and the adapter's own loss."""
    values = {p["step"]: p["eval/parse_rate"] for p in payloads(scored)}
    best = max(values, key=lambda step: (values[step], -step))
    results = Manifest.read(scored.manifest).results
    assert (results["adapter_step"], results["adapter_metric"]) == (best, "eval/parse_rate")
    assert results["adapter_metric_value"] == values[best]
    losses = {
        e["payload"]["step"]: e["payload"]["val/loss"]
        for e in read_events(scored.telemetry)
        if e["event"] == "validation" and e["payload"]["condition"] == "tuned"
    }
    assert results["tuned_val_loss"] == losses[best]


def test_a_killed_run_still_knows_its_best_kpi(scored, broken, tmp_path):
    """Stopped in step 3 and resumed, it has the same adapter and the same scorecards."""
    run = broken(tmp_path / "run", 5, *EVERY, *BY_KPI)
    assert cli.main([f"resume={run.path}"]) == 0
    assert Manifest.read(run.manifest).attempts[-1]["resumed_from_step"] == 2
    assert adapter(run) == adapter(scored)
    timeless = [
        [{k: v for k, v in p.items() if not k.endswith(("seconds", "_ms"))} for p in payloads(one)]
        for one in (run, scored)
    ]
    assert timeless[0] == timeless[1]


def test_a_suite_without_an_item_is_refused_before_training(train_in, tmp_path, capsys):
    """It is refused before the hours that training takes."""
    run = train_in(tmp_path / "run", *EVERY, "suite.max_new_tokens=3", code=2)
    assert "nothing can be scored while training runs" in capsys.readouterr().err
    assert not any(event["event"] == "step" for event in read_events(run.telemetry))


def test_a_first_scorecard_after_the_last_epoch_is_refused(train_in, tmp_path, capsys):
    """The steps of an epoch are known once the rows are packed."""
    epochs = ("trainer.max_steps=-1", "trainer.max_epochs=1")
    train_in(tmp_path / "run", *SUITE, *epochs, "callbacks.scorecard.every_n_steps=500", code=2)
    assert "training ends before its first scorecard" in capsys.readouterr().err


def test_a_kpi_of_executed_answers_needs_a_sandbox(train_in, tmp_path, capsys):
    """With sandbox=none, the KPI would be unknown at the first scorecard."""
    train_in(
        tmp_path / "run",
        *EVERY,
        *BY_KPI,
        *("suite=mini_python", "adapter.metric=task_success", "sandbox=none"),
        code=2,
    )
    assert "never measured" in capsys.readouterr().err.replace("\n", " ")
