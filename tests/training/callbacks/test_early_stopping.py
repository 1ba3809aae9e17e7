from __future__ import annotations

import math

import pytest
from lightning import Callback

from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.trainer import CheckpointConfig
from mens_exp.training.build import build_module
from mens_exp.training.callbacks.checkpoint import Checkpoint
from mens_exp.training.callbacks.early_stopping import EarlyStopping


class Losses(Callback):
    """Takes each validation loss from a list."""

    def __init__(self, losses):
        self.losses = iter(losses)

    def on_validation_end(self, trainer, pl_module):
        del pl_module
        trainer.callback_metrics["val/loss"].fill_(next(self.losses))


def steps_taken(fit, losses, min_steps=None, **settings):
    """Train up to six steps, with a validation after each."""
    callbacks = Losses(losses), EarlyStopping(fit.record, **settings)
    limits = {"max_steps": 6, "min_steps": min_steps, "min_epochs": 0}
    trainer = fit.trainer(*callbacks, val_check_interval=2, **limits)
    fit.run(trainer)
    return int(trainer.global_step)


@pytest.mark.parametrize(
    ("losses", "settings", "steps"),
    [
        ([5, 4, 3, 2, 1, 0], {"patience": 1}, 6),
        ([5, 4, 4, 3, 2, 1], {"patience": 1}, 3),
        ([5, 4, 4, 3, 3, 2], {"patience": 2}, 6),
        ([5, 4, 4, 4, 3, 2], {"patience": 2}, 4),
        ([5, 4.9, 4.8, 4.7, 4.6, 4.5], {"patience": 3, "min_delta": 0.5}, 4),
        ([5, 4.4, 3.8, 3.2, 2.6, 2.0], {"patience": 3, "min_delta": 0.5}, 6),
        ([5, 4, 3, 2, 1, 1], {"patience": 1}, 6),
        ([5, 6, 4, 4, 3, 2], {"patience": 1, "min_steps": 2}, 2),
        ([5, 6, 4, 3, 3, 2], {"patience": 1, "min_steps": 3}, 5),
        ([5, 6, 6, 6, 6, 2], {"patience": 2, "min_steps": 5}, 5),
        ([5, 6, 6, 6, 6, 6], {"patience": 2, "min_steps": 6}, 6),
        ([5, math.nan, 4, math.inf, math.nan, 3], {"patience": 2}, 5),
    ],
)
def test_a_run_ends_after_so_many_validations_without_a_lower_loss(fit, losses, settings, steps):
    """Steps are counted by hand; an improvement below min_delta does not count.

    Before min_steps validations are only counted, and nothing ends early at the last step.
    """
    assert steps_taken(fit, losses, **settings) == steps
    stopped = steps < 6
    assert fit.record.manifest.results["stopped_early"] is stopped
    events = [e for e in read_events(fit.record.dir.telemetry) if e["event"] == "early_stop"]
    assert [e["payload"]["step"] for e in events] == ([steps] if stopped else [])


def test_the_step_it_ends_at_is_saved_and_resuming_from_it_ends_there_too(fit, tiny_backend):
    """The final step is saved whatever the interval; Lightning's own callback would train on."""
    fit.config.checkpoint = CheckpointConfig(every_n_steps=50)
    steps = steps_taken_saving(fit, [5, 6, 4, 3, 2, 1])
    assert steps == 2
    fit.module = build_module(fit.config, tiny_backend(), fit.data)
    again = EarlyStopping(fit.record, patience=1)
    trainer = fit.trainer(again, Checkpoint(fit.record), max_steps=6, val_check_interval=2)
    fit.run(trainer, ckpt_path=fit.record.dir.checkpoint(2), weights_only=True)
    assert trainer.global_step == 2
    assert fit.record.manifest.results["stopped_early"] is True
    assert fit.module.selected[0] == 2


@pytest.mark.parametrize(("min_steps", "steps"), [(2, 2), (3, 6)])
def test_a_resumed_run_does_not_end_before_its_fewest_steps(fit, tiny_backend, min_steps, steps):
    """The rule holds at step 2; with min_steps=3 the losses improve before it may end the run."""
    fit.config.checkpoint = CheckpointConfig(every_n_steps=50)
    assert steps_taken_saving(fit, [5, 6]) == 2
    fit.module = build_module(fit.config, tiny_backend(), fit.data)
    stopping = EarlyStopping(fit.record, patience=1)
    callbacks = Losses([4, 3, 2, 1]), stopping, Checkpoint(fit.record)
    limits = {"max_steps": 6, "min_steps": min_steps, "min_epochs": 0}
    trainer = fit.trainer(*callbacks, val_check_interval=2, **limits)
    fit.run(trainer, ckpt_path=fit.record.dir.checkpoint(2), weights_only=True)
    assert trainer.global_step == steps
    assert fit.record.manifest.results["stopped_early"] is (steps == 2)


def steps_taken_saving(fit, losses):
    callbacks = Losses(losses), EarlyStopping(fit.record, patience=1), Checkpoint(fit.record)
    trainer = fit.trainer(*callbacks, max_steps=6, val_check_interval=2)
    fit.run(trainer)
    return int(trainer.global_step)
