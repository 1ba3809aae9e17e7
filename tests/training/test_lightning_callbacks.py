"""Callbacks from the documentation of Lightning and W&B, each run with ours."""

from __future__ import annotations

import csv
import re
import sys

import pytest
from lightning.pytorch.callbacks import ModelSummary

from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.scorecard import Scorecard
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.overrides import check
from mens_exp.planning.checks import classes
from mens_exp.report import summary
from mens_exp.tasks.study_runs import read_study

LIGHTNING = "lightning.pytorch.callbacks."
# Names of options, and what Lightning's docstrings construct.
DOCUMENTED = {
    "lr_monitor": "LearningRateMonitor\nlogging_interval: step",
    "device_stats": "DeviceStatsMonitor",
    "timer": 'Timer\nduration: "00:12:00:00"',
    "model_summary": "ModelSummary\nmax_depth: 1",
    "early_stopping_theirs": "EarlyStopping\nmonitor: val/loss",
    "model_checkpoint": "ModelCheckpoint\nmonitor: val/loss",
}
# From "Logging" in Lightning's docs, the docstrings of WandbLogger, and W&B's `run.log`.
CODE = """
import numpy as np
from lightning import Callback

from mens_exp.artifacts.metrics import declares


@declares("probe/recall", unit="share", direction="max", reduction="max")
class Logs(Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.log("my_metric", trainer.global_step)
        values = {"loss": outputs["loss"], "acc": 0.5}
        self.log_dict(values)
        if pl_module.at_step_boundary:
            pl_module.record("probe/recall", trainer.global_step / 4)

    def on_validation_epoch_end(self, trainer, pl_module):
        self.log("val_acc", 0.25)

    def on_train_end(self, trainer, pl_module):
        run = trainer.logger.experiment
        run.log({"key": 7, "nested": {"value": 8}})


class Direct(Callback):
    def on_train_end(self, trainer, pl_module):
        pl_module.logger.log_metrics({"direct": 3.5}, step=trainer.global_step)
        pl_module.logger.log_hyperparams({"tried": 7})
        trainer.logger.experiment.log({"said": 2.5})


class Media(Callback):
    def on_train_end(self, trainer, pl_module):
        logger = trainer.logger
        images = [np.zeros((4, 4, 3), np.uint8)] * 2
        logger.log_image(key="samples", images=images)
        columns = ["input", "label", "prediction"]
        my_data = [["cheese", "english", "english"], ["fromage", "french", "spanish"]]
        logger.log_text(key="texts", columns=columns, data=my_data)
        logger.experiment.config.update({"mine": 3})
"""


@pytest.fixture
def lab(tmp_path, monkeypatch, train_in):
    """Train in a directory with these callbacks in its `conf`."""
    module = f"lab_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(CODE, "utf-8")
    folder = tmp_path / "conf" / "callbacks"
    folder.mkdir(parents=True)
    for name, text in DOCUMENTED.items():
        (folder / f"{name}.yaml").write_text(f"_target_: {LIGHTNING}{text}\n", "utf-8")
    for name in ("Logs", "Media", "Direct"):
        (folder / f"{name.lower()}.yaml").write_text(f"_target_: {module}.{name}\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda *overrides, **options: train_in(tmp_path / "run", *overrides, **options)
    sys.modules.pop(module, None)


def logged(run, *, condition=None):
    """Return the logged values by (step, name), in order."""
    found = {}
    for event in read_events(run.telemetry):
        payload = event["payload"]
        if event["event"] == "logged" and payload.get("condition") == condition:
            for name, value in payload["values"].items():
                found.setdefault((payload["step"], name), []).append(value)
    return found


def test_metrics_of_callbacks_are_in_the_scorecard(lab):
    """Their values equal those in the manifest and those that follow from the telemetry."""
    run = lab("callbacks=[default,logs]", "suite=heldout_syntax", "suite.items=1")
    found = Scorecard.read(run.scorecard).metrics
    assert (found["my_metric"], found["probe/recall"]) == (4.0, 1.0)
    assert found == Manifest.read(run.manifest).results["metrics"]
    assert [one.trial.manifest.run_id for one in read_study([str(run.path)]).runs] == [
        run.path.name
    ]


def test_what_documented_callbacks_log_is_in_telemetry_report_and_wandb(lab, mirrored, monkeypatch):
    """Each value is logged under its step, whatever counter Lightning uses."""
    summaries = []
    show = staticmethod(lambda rows, *_, **__: summaries.append(dict(rows)))
    monkeypatch.setattr(ModelSummary, "summarize", show)
    names = ["default", *DOCUMENTED, "logs", "media"]
    run = lab(f"callbacks=[{','.join(names)}]", "logger=wandb", "trainer.val_check_interval=4")
    found, steps = logged(run), [1, 2, 3, 4]
    assert [step for step, name in found if name == "lr-AdamW"] == steps
    assert set(found[2, "lr-AdamW"]) == {1e-3}
    stats = "DeviceStatsMonitor.on_train_batch_start/cpu_percent"
    assert [step for step, name in found if name == stats] == steps
    assert [found[step, "my_metric"] for step in steps] == [[1.0], [2.0], [3.0], [4.0]]
    assert {step for step, name in found if name == "val_acc"} == {2, 4}
    assert logged(run, condition="base")[0, "val_acc"] == [0.25]
    assert (found[4, "key"], found[4, "nested.value"]) == ([7.0], [8.0])
    assert all("Params" in one for one in summaries)
    assert len(summaries) == 1
    assert len([*(run.path / "lightning").rglob("*.ckpt")]) == 1  # of Lightning's ModelCheckpoint

    manifest = Manifest.read(run.manifest)
    assert manifest.results["metrics"]["probe/recall"] == 1.0
    about = manifest.facts["metrics"]
    assert about["probe/recall"] == {
        "unit": "share",
        "direction": "max",
        "reduction": "max",
        "note": "",
    }
    assert about["my_metric"]["note"] == "declared by its first use"

    page = run.report.read_text("utf-8")
    for name in ("lr-AdamW", stats, "my_metric", "acc", "val_acc", "key", "probe/recall"):
        assert f"<code>{name}</code>" in page
    assert "samples (Image), texts (Table)" in page
    pairs = {pair.label: pair for pair in summary.pairs(summary.load(run))}
    assert (pairs["probe/recall"].tuned.text, pairs["probe/recall"].unit) == ("1", "share")
    assert "my_metric" not in pairs  # no direction is declared

    rows = mirrored(run)
    history = [row["history"]["item"] for row in rows if row["type"] == "history"]
    for name in ("lr-AdamW", stats, "acc", "probe/recall", "train/loss"):
        assert [row["step"] for row in history if name in row] == steps, name
    assert [row["my_metric"] for row in history if "my_metric" in row] == [1, 2, 3, 4]
    assert [row["step"] for row in history if "val_acc" in row] == [0, 2, 4]
    assert history[-1]["samples._type"] == "images/separated"
    told = {"summary": {}, "config": {}}
    for row in rows:
        if row["type"] in told:
            told[row["type"]] |= row[row["type"]].get("update", {})
    assert told["summary"]["probe/recall"] == 1.0
    assert told["config"]["mine"] == 3


def test_without_a_logger_telemetry_has_what_callbacks_log(lab):
    """`trainer.logger` is then the record itself."""
    run = lab("callbacks=[default,lr_monitor,device_stats,logs]", "trainer.log_every_n_steps=2")
    found = logged(run)
    assert sorted(step for step, name in found if name == "lr-AdamW") == [2, 4]
    assert sorted(step for step, name in found if name == "my_metric") == [2, 4]
    assert found[4, "key"] == [7.0]
    steps = [e["payload"] for e in read_events(run.telemetry) if e["event"] == "step"]
    assert [payload["probe/recall"] for payload in steps] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("loggers", ["none", "wandb", "[wandb,csv]"])
def test_what_a_logger_is_called_with_is_in_telemetry_and_in_all_loggers(lab, mirrored, loggers):
    """Calls of `self.logger` as in Lightning's docs log each number once."""
    run = lab("callbacks=[default,direct]", f"logger={loggers}")
    found = logged(run)
    assert (found[4, "direct"], found[4, "said"]) == ([3.5], [2.5])
    assert Manifest.read(run.manifest).facts["hyperparameters"]["tried"] == 7
    if "wandb" in loggers:
        rows = mirrored(run, "history")
        values = [row["item"] for row in rows if "item" in row]
        assert [row["direct"] for row in values if "direct" in row] == [3.5]
        assert [row["said"] for row in values if "said" in row] == [2.5]
    if "csv" in loggers:
        (file,) = run.csv.rglob("metrics.csv")
        with file.open(encoding="utf-8", newline="") as opened:
            lines = list(csv.DictReader(opened))
        for name, value in (("direct", "3.5"), ("said", "2.5")):
            assert [line[name] for line in lines if line.get(name)] == [value]
        assert "tried: 7" in (file.parent / "hparams.yaml").read_text("utf-8")


# Lightning's callbacks that change what a run promises: the promise and the alternative.
REFUSED = {
    "BatchSizeFinder": ("It plans before it spends", "data.micro_batch_size"),
    "LearningRateFinder": ("What ran is what you asked for", "-m optim.lr"),
    "GradientAccumulationScheduler\nscheduling: {0: 2}": (
        "A comparison is a comparison",
        "trainer.accumulate_grad_batches",
    ),
    "StochasticWeightAveraging\nswa_lrs: 1e-2": ("The artifact is the model", "the adapter"),
    "EMAWeightAveraging": ("The artifact is the model", "the adapter alone"),
    "ModelPruning\npruning_fn: l1_unstructured": ("The artifact is the model", "exported"),
    "BackboneFinetuning": ("The artifact is the model", "lora.targets"),
}


def test_a_callback_that_would_break_a_promise_is_refused_by_its_name(tmp_path, monkeypatch):
    """The error, before a weight is read, says what to use instead."""
    folder = tmp_path / "conf" / "callbacks"
    folder.mkdir(parents=True)
    for number, text in enumerate(REFUSED):
        (folder / f"no_{number}.yaml").write_text(f"_target_: {LIGHTNING}{text}\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    names = [f"no_{number}" for number in range(len(REFUSED))]
    (cell,) = check([f"callbacks=[default,{','.join(names)}]", "model=tiny_llama"]).cells
    problems = list(classes.check(cell.config))
    for name, problem, (promise, instead) in zip(names, problems, REFUSED.values(), strict=True):
        assert problem.where == f"callbacks.{name}._target_"
        assert f"the promise “{promise}”" in str(problem)
        assert instead in problem.remedy


def test_a_misspelled_metric_is_answered_with_the_near_name(lab, tmp_path, capsys):
    """For `self.log` and `module.record`, the run ends and says how to log it anyway."""
    file = next(tmp_path.glob("lab_*.py"))
    file.write_text(CODE.replace('"my_metric"', '"train/los"'), "utf-8")
    run = lab("callbacks=[default,logs]", code=2)
    told = capsys.readouterr().err
    assert re.search(r"nearest is\s+train/loss", told)
    assert "@declares" in told
    assert Manifest.read(run.manifest).status == "failed"


MONITORS = f"_target_: {LIGHTNING}{{}}\nmonitor: {{}}\n"


def problems_of(folder, *callbacks):
    """Return the problems of options with these texts, beside the default callbacks."""
    for number, text in enumerate(callbacks):
        (folder / f"watching_{number}.yaml").write_text(text, "utf-8")
    names = [f"watching_{number}" for number in range(len(callbacks))]
    (cell,) = check([f"callbacks=[default,{','.join(names)}]", "model=tiny_llama"]).cells
    return list(classes.check(cell.config))


@pytest.mark.parametrize("callback", ["EarlyStopping", "ModelCheckpoint"])
@pytest.mark.parametrize(
    ("monitor", "near"),
    [
        ("val_loss", "val/loss"),  # written as in Lightning's docs
        ("val/los", "val/loss"),
        ("eval_loss", "val/loss"),
        ("train/loss", None),  # logged per step; Lightning monitors validations
        ("nothing", None),
    ],
)
def test_a_metric_to_monitor_that_no_run_has_is_told_before_training(
    own_conf, callback, monitor, near
):
    """Lightning itself would report it only at the first validation."""
    (problem,) = problems_of(own_conf, MONITORS.format(callback, monitor))
    assert problem.where == "callbacks.watching_0.monitor"
    assert "val/loss" in str(problem)
    assert (f"the nearest is {near}" in str(problem)) == (near is not None)


@pytest.mark.parametrize(
    "texts",
    [
        (MONITORS.format("EarlyStopping", "val/loss"),),
        (MONITORS.format("EarlyStopping", "val/bits_per_byte"),),
        (MONITORS.format("EarlyStopping", "val_loss") + "strict: false\n",),
        (MONITORS.format("ModelCheckpoint", "null"),),
        (MONITORS.format("ModelCheckpoint", "step"),),
        (
            MONITORS.format("ModelCheckpoint", "lr-AdamW"),
            f"_target_: {LIGHTNING}LearningRateMonitor",
        ),
        # A user's callback may log any name that is not ours, as Lightning's docs do.
        (MONITORS.format("EarlyStopping", "val_loss"), "_target_: seen_{module}.Mine\n"),
        (MONITORS.format("EarlyStopping", "recall"), "_target_: seen_{module}.Mine\n"),
        (MONITORS.format("EarlyStopping", "probe/seen"), "_target_: seen_{module}.Mine\n"),
    ],
)
def test_a_metric_that_may_be_logged_is_monitored(own_conf, texts):
    """Only a metric that is known to be absent is refused."""
    module = own_conf.parents[1].name.replace("-", "_")
    assert problems_of(own_conf, *(text.replace("{module}", module) for text in texts)) == []


def test_beside_callbacks_of_ones_own_a_misspelling_is_still_told(own_conf):
    """Both our metrics and those that a callback declares are known."""
    module = own_conf.parents[1].name.replace("-", "_")
    found = problems_of(
        own_conf,
        MONITORS.format("EarlyStopping", "val/los"),
        MONITORS.format("ModelCheckpoint", "probe/sen"),
        f"_target_: seen_{module}.Mine\n",
    )
    assert [
        name in str(one) for one, name in zip(found, ("is val/loss", "is probe/seen"), strict=True)
    ] == [
        True,
        True,
    ]


@pytest.fixture
def own_conf(tmp_path, monkeypatch):
    """Write ./conf callbacks, and a module with a callback that logs."""
    module = f"seen_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{module}.py").write_text(
        "from lightning import Callback\n"
        "from mens_exp.artifacts.metrics import declares\n\n"
        "@declares('probe/seen')\nclass Mine(Callback):\n    pass\n",
        "utf-8",
    )
    folder = tmp_path / "conf" / "callbacks"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield folder
    sys.modules.pop(module, None)


def test_every_figure_of_a_validation_can_be_monitored(lab, tmp_path):
    """Selecting by bits per byte gives the same step as the telemetry."""
    folder = tmp_path / "conf" / "callbacks"
    text = MONITORS.format("ModelCheckpoint", "val/bits_per_byte") + "save_weights_only: true\n"
    (folder / "model_checkpoint.yaml").write_text(text, "utf-8")
    run = lab("callbacks=[default,model_checkpoint]", "trainer.val_check_interval=2")
    assert len([*(run.path / "lightning").rglob("*.ckpt")]) == 1


def test_lightning_s_refusal_is_no_bug_of_ours(lab, tmp_path, capsys):
    """An early stopping on a metric that was never logged, for example."""
    file = tmp_path / "conf" / "callbacks" / "early_stopping_theirs.yaml"
    file.write_text(f"_target_: {LIGHTNING}EarlyStopping\nmonitor: nothing\n", "utf-8")
    lab("callbacks=[default,logs,early_stopping_theirs]", code=2)
    told = " ".join(capsys.readouterr().err.split())
    assert "Lightning" in told
    assert "`nothing`" in told


def test_a_bug_in_code_of_the_users_is_said_to_be_there(lab, tmp_path, capsys):
    """The message names the user's file; an error in our code is reported as ours."""
    file = next(tmp_path.glob("lab_*.py"))
    file.write_text(CODE.replace('self.log("val_acc", 0.25)', "1 / 0"), "utf-8")
    lab("callbacks=[default,logs]", code=1)
    assert f"A bug in {file.name}; the record" in capsys.readouterr().err
