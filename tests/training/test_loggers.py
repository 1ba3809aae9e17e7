from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.compose import from_yaml, to_yaml, typed
from mens_exp.config.overrides import check
from mens_exp.errors import MissingExtra, RequestError
from mens_exp.planning.checks import machine
from mens_exp.training.loggers import MirrorLogger


def test_csv_holds_every_steps_metrics_and_the_settings(train_in, tmp_path):
    """Lightning's file has the values of the telemetry; hyperparameters use dotted paths."""
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
    """They are in the row of their step only."""
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
    """Lightning's logger would overwrite its file, so each attempt has its own."""
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # dependencies of tensorboard
def test_tensorboard_reads_every_steps_loss(train_in, tmp_path):
    """TensorBoard's own reader is the oracle."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = train_in(tmp_path / "run", "logger=tensorboard")
    told = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    seen = {}
    for file in (run.tensorboard / "attempt_1").glob("events.*"):
        reader = EventAccumulator(str(file)).Reload()
        if "train/loss" in reader.Tags()["scalars"]:
            seen |= {event.step: event.value for event in reader.Scalars("train/loss")}
    assert seen == pytest.approx({p["step"]: p["train/loss"] for p in told}, rel=1e-6)


MLFLOW = """
_target_: lightning.pytorch.loggers.MLFlowLogger
experiment_name: lightning_logs
tracking_uri: sqlite:///{store}
"""
FAILING = """
from lightning.pytorch.loggers import CSVLogger


class Breaks(CSVLogger):
    def log_metrics(self, metrics, step=None):
        if "train/loss" in metrics and step == 2:
            raise ConnectionError("the server is gone")
        super().log_metrics(metrics, step)


class NeverStarts(CSVLogger):
    @property
    def experiment(self):
        raise PermissionError("no such project")
"""


@pytest.fixture
def lab(tmp_path, monkeypatch, train_in):
    """Train in a directory with its own options of the group `logger`."""
    folder = tmp_path / "conf" / "logger"
    folder.mkdir(parents=True)
    module = f"sinks_{tmp_path.name}"
    (tmp_path / f"{module}.py").write_text(FAILING, "utf-8")
    for name in ("Breaks", "NeverStarts"):
        (folder / f"{name.lower()}.yaml").write_text(f"_target_: {module}.{name}\n", "utf-8")
    (folder / "mlflow.yaml").write_text(MLFLOW.format(store=tmp_path / "mlruns.db"), "utf-8")
    (folder / "both.yaml").write_text("defaults: [mlflow, csv]\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda *overrides, **options: train_in(tmp_path / "run", *overrides, **options)
    sys.modules.pop(module, None)


def rows_of(file):
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def steps_of(run):
    return [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]


@pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None,
    reason="mlflow is missing: pip install mlflow-skinny",
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # for mlflow
def test_mlflow_on_a_local_store_has_every_step_beside_csv(lab, tmp_path):
    """MLflow's own client reads settings, curves, KPIs and the final status."""
    from mlflow.tracking import MlflowClient

    run = lab("logger=both", "logger.csv.flush_every_n_steps=1")
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlruns.db'}")
    (found,) = client.search_runs([client.get_experiment_by_name("lightning_logs").experiment_id])
    told = {payload["step"]: payload["train/loss"] for payload in steps_of(run)}
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert {one.step: one.value for one in history} == told
    losses = client.get_metric_history(found.info.run_id, "val/loss")
    assert [one.step for one in losses] == [0, 4]
    assert found.data.params["optim.lr"] == "0.001"
    assert "chat.max_new_tokens" not in found.data.params  # of another task
    assert found.data.metrics["tuned/val_loss"] == losses[-1].value
    assert found.info.status == "FINISHED"
    rows = rows_of(run.csv / "attempt_1" / "metrics.csv")
    assert {int(r["step"]): float(r["train/loss"]) for r in rows if r["train/loss"]} == told


COMET = "_target_: lightning.pytorch.loggers.CometLogger\nproject: ranks\n"


@pytest.mark.soak
def test_an_offline_archive_of_comet_has_every_step(tmp_path, tiny_run):
    """The archive is read without comet_ml, whose 65 MB are installed separately."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path / "comet")]
    constraints = Path(__file__).parents[2] / "constraints.txt"
    subprocess.run([*pip, "--constraint", str(constraints), "comet-ml"], check=True)
    (tmp_path / "conf" / "logger").mkdir(parents=True)
    (tmp_path / "conf" / "logger" / "comet.yaml").write_text(COMET, "utf-8")
    run = RunDir(tmp_path / "run")
    told = [*tiny_run, "logger=comet", f"hydra.run.dir={run.path}"]
    surroundings = {"PYTHONPATH": str(tmp_path / "comet"), "COMET_START_ONLINE": "false"}
    subprocess.run(
        [sys.executable, "-m", "mens_exp", *told],
        cwd=tmp_path,
        env={**os.environ, **surroundings, "COMET_OFFLINE_DIRECTORY": str(tmp_path / "archives")},
        check=True,
        timeout=300,
    )
    (archive,) = (tmp_path / "archives").glob("*.zip")
    with zipfile.ZipFile(archive) as opened:
        messages = [json.loads(line) for line in opened.read("messages.json").splitlines()]
    found = [m["payload"]["metric"] for m in messages if m["type"] == "metric_msg"]
    losses = {m["step"]: m["metricValue"] for m in found if m["metricName"] == "train/loss"}
    assert losses == {payload["step"]: payload["train/loss"] for payload in steps_of(run)}


def test_comet_that_lightning_would_switch_off_is_refused(tiny_config, monkeypatch):
    """All metrics of the run would be lost silently."""
    monkeypatch.setattr(machine, "find_spec", lambda _name: object())
    config = tiny_config("logger=csv")
    comet = "lightning.pytorch.loggers.CometLogger"
    node = config.logger = SimpleNamespace(sink="comet", _target_=comet, online=False)
    (problem,) = machine.check_logger(config)
    assert "COMET_START_ONLINE=false" in str(problem)
    node.online = None
    assert not [*machine.check_logger(config)]


def test_a_logger_that_fails_later_is_left_alone_and_recorded(lab):
    """Training continues; other loggers have every step, the failed one those before."""
    run = lab("logger=[breaks,csv]", "logger.csv.flush_every_n_steps=1")
    assert [payload["step"] for payload in steps_of(run)] == [1, 2, 3, 4]
    failed = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "sink_failed"]
    assert failed == [{"sink": "breaks", "error": "ConnectionError: the server is gone"}]
    rows = rows_of(run.csv / "attempt_1" / "metrics.csv")
    assert [row["step"] for row in rows if row["train/loss"]] == ["1", "2", "3", "4"]
    kept = rows_of(run.path / "breaks" / "attempt_1" / "metrics.csv")
    assert [row["step"] for row in kept if row["train/loss"]] == ["1"]


def test_a_logger_that_does_not_start_ends_the_run_with_a_remedy(lab, capsys):
    """The error comes before training."""
    lab("logger=neverstarts", code=3)
    told = " ".join(capsys.readouterr().err.split())
    assert "logger=neverstarts: the logger did not start" in told
    assert "PermissionError: no such project" in told
    assert "logger=none" in told


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("logger=[none,csv]", "none means no logger"),
        ("logger.project=lab", "write logger.wandb.project=lab"),
        ("logger.wandb.sink=csv", "is set by the option"),
        ("logger.wandb.projct=lab", "the nearest is logger.wandb.project"),
    ],
)
def test_a_mistake_about_several_loggers_is_told(override, told):
    """The keys of each logger are under its own name."""
    (problem,) = check(["logger=[wandb,csv]", override]).problems
    assert told in str(problem)


def test_several_loggers_read_back_as_they_were_chosen(tmp_path):
    """The run's config.yaml restores each logger with its class."""
    (cell,) = check(["logger=[wandb,csv]", "logger.wandb.tags=[a]"]).cells
    file = tmp_path / "config.yaml"
    file.write_text(to_yaml(cell.composed.values), "utf-8")
    assert typed(from_yaml(file)).loggers == cell.config.loggers
    assert cell.config.wandb.tags == ["a"]


def test_a_missing_tensorboard_names_the_extra(tiny_config, monkeypatch):
    """The error comes before a weight is read; if it is installed, there is none."""
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
    assert "is not a key of the chosen logger" in str(problem)


def test_a_model_cannot_be_watched_by_the_mirror():
    """W&B's hooks would fail in a backward pass; the error says so and gives an alternative."""
    with pytest.raises(RequestError, match=r"WandbLogger.watch.*Histogram"):
        MirrorLogger.watch(None, object())
