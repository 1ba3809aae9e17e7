from __future__ import annotations

import csv
import importlib.util

import pytest

from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.overrides import check
from mens_exp.errors import MissingExtra
from mens_exp.planning.checks import machine


def test_csv_holds_every_steps_metrics_and_the_settings(train_in, tmp_path):
    """What telemetry has, in Lightning's file; hyperparameters by dotted path."""
    run = train_in(tmp_path / "run", "logger=csv", "logger.flush_every_n_steps=1")
    with (run.csv / "attempt_1" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = {int(row["step"]): row for row in rows if row["train/loss"]}
    told = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    assert {n: float(row["train/loss"]) for n, row in steps.items()} == {
        payload["step"]: payload["train/loss"] for payload in told
    }
    assert float(steps[2]["perf/step_s"]) > 0
    assert sum(bool(row["val/loss"]) for row in rows) == 2
    settings = (run.csv / "attempt_1" / "hparams.yaml").read_text("utf-8")
    assert "optim.lr: 0.001" in settings
    assert "quant.quant_type: nf4" in settings


def test_csv_holds_the_scorecards_of_training(train_in, tmp_path):
    """In the row of their step, and in no other."""
    run = train_in(
        tmp_path / "run",
        *("logger=csv", "suite=heldout_syntax", "suite.max_new_tokens=64"),
        *("callbacks.scorecard.every_n_steps=2", "callbacks.scorecard.items=1"),
    )
    with (run.csv / "attempt_1" / "metrics.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    shown = {int(row["step"]): row["eval/parse_rate"] for row in rows if row["eval/parse_rate"]}
    events = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "scorecard_step"]
    assert {n: float(v) for n, v in shown.items()} == {
        p["step"]: p["eval/parse_rate"] for p in events
    }
    assert list(shown) == [2, 4]


def test_a_resumed_run_keeps_the_rows_of_the_attempt_before(train_in, tmp_path):
    """Lightning's logger would overwrite its file; each attempt has one."""
    from mens_exp import cli

    run = train_in(tmp_path / "run", "logger=csv", "trainer.max_steps=2")
    first = (run.csv / "attempt_1" / "metrics.csv").read_bytes()
    assert cli.main([f"resume={run.path}", "trainer.max_steps=3"]) == 0
    assert (run.csv / "attempt_1" / "metrics.csv").read_bytes() == first
    assert (run.csv / "attempt_2" / "metrics.csv").is_file()


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None,
    reason="tensorboard is missing: pip install 'mens-exp[tensorboard]'",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what tensorboard is made of
def test_tensorboard_reads_every_steps_loss(train_in, tmp_path):
    """Its own reader finds the series."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_in(tmp_path / "run", "logger=tensorboard")
    told = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    seen = {}
    for file in (run.tensorboard / "attempt_1").glob("events.*"):
        reader = EventAccumulator(str(file)).Reload()
        if "train/loss" in reader.Tags()["scalars"]:
            seen |= {event.step: event.value for event in reader.Scalars("train/loss")}
    assert seen == pytest.approx({p["step"]: p["train/loss"] for p in told}, rel=1e-6)


def test_a_missing_tensorboard_names_the_extra(tiny_config, monkeypatch):
    """Before a weight is read; with it, nothing is said."""
    config = tiny_config("logger=tensorboard")
    monkeypatch.setattr(machine, "find_spec", lambda _name: object())
    assert list(machine.check_logger(config)) == []
    monkeypatch.setattr(machine, "find_spec", lambda _name: None)
    (problem,) = machine.check_logger(config)
    assert isinstance(problem, MissingExtra)
    assert "mens-exp[tensorboard]" in str(problem)
    assert list(machine.check_logger(tiny_config("logger=csv"))) == []


def test_a_loggers_settings_are_its_own():
    """A key of another logger is refused."""
    (problem,) = check(["logger=csv", "logger.project=mine"]).problems
    assert "is no key of the chosen logger" in str(problem)
