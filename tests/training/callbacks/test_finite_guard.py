from __future__ import annotations

import math

import pytest
import torch
from device_reads import Reads
from lightning import Callback

from mens_exp.errors import TrainingError
from mens_exp.training.callbacks.finite_guard import FiniteGuard


class Spoil(Callback):
    """Makes something of the second step not finite."""

    def __init__(self, what):
        self.what = what

    def on_after_backward(self, trainer, pl_module):
        if trainer.global_step != 1:
            return
        if self.what == "loss":
            pl_module._step.loss = math.nan
        else:
            next(iter(pl_module.backend.trainable().values())).grad[0, 0] = math.inf


@pytest.mark.parametrize(
    ("what", "named"), [("loss", "the loss"), ("gradient", "the gradient of l0.q.lora_a")]
)
def test_a_number_that_is_not_finite_stops_the_step(fit, what, named):
    """The error names it and its step, and the adapter is as it was after the first one."""
    before = {}

    class Remember(Callback):
        def on_train_batch_start(self, trainer, *_):
            if trainer.global_step == 1:
                now = fit.module.backend.trainable().items()
                before.update({name: p.detach().clone() for name, p in now})

    guarded = fit.trainer(Spoil(what), Remember(), FiniteGuard(fit.record))
    with pytest.raises(TrainingError, match=f"step 1: {named} is not finite"):
        fit.run(guarded)
    after = fit.module.backend.trainable()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_norm_beyond_f32_stops_nothing_while_each_number_is_finite(fit):
    """The square of 1e30 is no f32; the gradient is one all the same."""

    class Enlarge(Callback):
        def on_after_backward(self, trainer, pl_module):
            next(iter(pl_module.backend.trainable().values())).grad[0, 0] = 1e30

        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            for parameter in pl_module.backend.trainable().values():
                parameter.grad.zero_()  # after the guard

    fit.run(fit.trainer(FiniteGuard(fit.record), Enlarge()))
    assert fit.module.global_step == 2


def test_one_number_is_read_however_many_gradients_there_are(fit):
    """Reading each of 28 would wait for a GPU 28 times."""
    counts = []

    class Counted(FiniteGuard):
        def on_before_optimizer_step(self, *arguments):
            with Reads() as reads:
                super().on_before_optimizer_step(*arguments)
            counts.append(reads.count)

    fit.run(fit.trainer(Counted(fit.record)))
    assert counts == [1, 1]


def test_steps_between_checks_are_not_looked_at(fit):
    """With a check every second step, the second step is not one of them."""
    fit.run(fit.trainer(Spoil("loss"), FiniteGuard(fit.record, check_every_n_steps=2)))
    assert fit.module.global_step == 2


def test_a_base_that_is_not_finite_is_named_as_the_cause(fit):
    """A lower learning rate does not mend a damaged file."""

    class Damage(Callback):
        def on_train_start(self, trainer, pl_module):
            base = dict(pl_module.named_parameters())
            name = next(n for n, p in base.items() if not p.requires_grad and p.dim() == 2)
            base[name].data[0, 0] = math.nan

    with pytest.raises(TrainingError, match="the base model's weights are not finite") as caught:
        fit.run(fit.trainer(Damage(), FiniteGuard(fit.record)))
    assert caught.value.where in dict(fit.module.named_parameters())
    assert "learning" not in str(caught.value)


def test_losses_that_are_not_finite_before_a_step_name_the_base(fit):
    """The record has no place for NaN: the weight is named before anything is written."""
    fit.module.refuse_unfinite(1.0, None)
    with pytest.raises(TrainingError, match="before its first step"):
        fit.module.refuse_unfinite(1.0, math.inf)
    frozen = [(n, p) for n, p in fit.module.named_parameters() if not p.requires_grad]
    name, parameter = next((n, p) for n, p in frozen if p.dim() == 2)
    parameter.data[0, 0] = math.nan
    with pytest.raises(TrainingError, match="the base model's weights are not finite") as caught:
        fit.module.refuse_unfinite(math.nan)
    assert caught.value.where == name
