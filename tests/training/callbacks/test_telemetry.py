from __future__ import annotations

from mens_exp.artifacts.telemetry import read_events
from mens_exp.training.callbacks.adapter_writer import AdapterWriter
from mens_exp.training.callbacks.telemetry import TelemetryWriter


def test_each_step_is_one_event_with_the_declared_metrics(fit):
    """Two micro-batches give one event."""
    fit.run(fit.trainer(TelemetryWriter(fit.record)))
    read = [(e["event"], e["payload"]) for e in read_events(fit.record.dir.telemetry)]
    assert [name for name, _ in read] == [
        *("train_start", "step", "step"),
        *("validation", "train_complete"),  # validation runs after the last step
    ]
    step = read[1][1]
    assert step["step"] == 1
    assert {"train/loss", "train/grad_norm", "optim/lr"} <= step.keys()
    stream = fit.data.train_dataloader()
    assert step["data/tokens"] == sum(stream.batch(i).tokens for i in (0, 1))
    learned = sum(len(stream.batch(i).targets_M) for i in range(4))
    assert read[-1][1]["data/supervised_tokens"] == learned


def test_a_validation_names_its_condition(fit):
    """Events of base and tuned validations differ in their condition."""
    trainer = fit.trainer(TelemetryWriter(fit.record))
    with fit.module.as_base():
        fit.validate(trainer)
    fit.validate(trainer)
    read = [e["payload"] for e in read_events(fit.record.dir.telemetry)]
    assert [(p["step"], p["condition"]) for p in read] == [(0, "base"), (0, "tuned")]
    assert read[0]["val/loss"] == read[1]["val/loss"]  # B is zero before training


def test_a_run_without_a_step_left_still_writes_its_results(fit):
    """A run killed after its last checkpoint has no step left and no adapter yet."""
    from mens_exp.training.callbacks.checkpoint import Checkpoint

    fit.run(fit.trainer(Checkpoint(fit.record)))
    last = fit.record.dir.checkpoint(2)
    again = fit.trainer(
        Checkpoint(fit.record), TelemetryWriter(fit.record), AdapterWriter(fit.record)
    )
    fit.run(again, ckpt_path=last, weights_only=True)
    assert (fit.record.dir.adapter / "adapter.safetensors").is_file()
    assert read_events(fit.record.dir.telemetry)[-1]["event"] == "train_complete"
