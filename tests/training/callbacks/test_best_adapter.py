from __future__ import annotations

import pytest
import torch
from lightning import Callback

from mens_exp.training.callbacks.best_adapter import BestAdapter


class Losses(Callback):
    """Takes each validation loss from a list, and keeps the adapter it belongs to."""

    def __init__(self, losses):
        self.losses = iter(losses)
        self.adapters = []

    def on_validation_end(self, trainer, pl_module):
        del trainer
        pl_module.validation["val/loss"] = next(self.losses)
        self.adapters.append(adapter_of(pl_module))


def adapter_of(module):
    return {name: p.detach().clone() for name, p in module.backend.trainable().items()}


def same(first, second):
    return all(torch.equal(first[name], value) for name, value in second.items())


@pytest.mark.parametrize(
    ("losses", "best"),
    [
        ([3.0, 1.0, 2.0], 1),
        ([3.0, 2.0, 1.0], 2),
        ([1.0, 2.0, 3.0], 0),
        ([2.0, 1.0, 1.0], 1),
    ],
)
def test_the_graph_ends_with_the_adapter_of_the_lowest_loss(fit, losses, best):
    """Validation runs after each of three steps; ties go to the earliest."""
    told, callback = Losses(losses), BestAdapter(fit.record)
    fit.run(fit.trainer(told, callback, max_steps=3, val_check_interval=2))
    assert not same(told.adapters[0], told.adapters[1])
    assert same(adapter_of(fit.module), told.adapters[best])
    assert fit.module.selected == (best + 1, losses[best])


def test_a_validation_outside_of_training_does_not_count(fit):
    """The base model's own loss may be the lowest and must not be selected."""
    callback = BestAdapter(fit.record)
    fit.validate(fit.trainer(callback))
    assert (callback.step, callback.loss, callback.state_dict()["adapter"]) == (None, None, {})


def test_without_a_validation_the_graph_is_left_alone(fit):
    """If training ends before the first validation, nothing is selected."""
    before = adapter_of(fit.module)
    BestAdapter(fit.record).on_fit_end(fit.trainer(), fit.module)
    assert same(adapter_of(fit.module), before)
    assert fit.module.selected is None


def test_the_kept_adapter_does_not_move_with_training(fit):
    """The kept adapter is a copy, also on the CPU, where `.cpu()` does not copy."""
    callback = BestAdapter(fit.record)
    fit.run(fit.trainer(Losses([1.0, 2.0]), callback, val_check_interval=2))
    kept = callback.state_dict()["adapter"]
    parameters = fit.module.backend.trainable()
    assert all(kept[name].data_ptr() != p.data_ptr() for name, p in parameters.items())
