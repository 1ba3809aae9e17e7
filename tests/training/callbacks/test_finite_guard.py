from __future__ import annotations

import math

import bitsandbytes as bnb
import pytest
import torch
from lightning import Callback

from mens_exp.errors import TrainingError
from mens_exp.training.callbacks.finite_guard import FiniteGuard


class Spoil(Callback):
    """Makes a value of the second step non-finite."""

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
    """The error names the value and the step; the adapter is that after the first step."""
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


def test_weights_that_the_last_step_made_infinite_are_named_by_the_validation(fit):
    """After the last step, only the final validation loss can reveal such weights."""

    class Overflow(Callback):
        def on_train_batch_end(self, trainer, pl_module, *_):
            if trainer.global_step:
                next(iter(pl_module.backend.trainable().values())).detach().fill_(math.inf)

    guarded = fit.trainer(Overflow(), FiniteGuard(fit.record), max_steps=1)
    with pytest.raises(TrainingError, match="step 1: the validation loss is not finite"):
        fit.run(guarded)


def test_a_norm_beyond_f32_stops_nothing_while_each_number_is_finite(fit):
    """The square of 1e30 overflows float32, but the gradient is finite."""
    norms = []

    class Enlarge(Callback):
        def on_after_backward(self, trainer, pl_module):
            next(iter(pl_module.backend.trainable().values())).grad[0, 0] = 1e30

        def on_train_batch_end(self, trainer, pl_module, *_):
            norms.append(pl_module.step_metrics.get("train/grad_norm"))

    fit.run(fit.trainer(FiniteGuard(fit.record), Enlarge(), gradient_clip_val=1.0))
    assert fit.module.global_step == 2
    assert norms[1] == norms[3] == math.inf


def test_a_gradient_that_another_callback_spoils_stops_the_step(fit):
    """The check runs after all callbacks, immediately before the update."""

    class Spoils(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            pl_module.backend.trainable()["l1.q.lora_b"].grad.fill_(math.nan)

    with pytest.raises(TrainingError, match=r"step 0: the gradient of l1.q.lora_b is not finite"):
        fit.run(fit.trainer(FiniteGuard(fit.record), Spoils()))
    assert not fit.module.backend.trainable()["l1.q.lora_b"].any()


def test_a_module_that_reads_no_figures_is_guarded_too(fit):
    """If the user replaces our hook, the guard checks the gradients itself."""

    class Own(type(fit.module)):
        def on_before_optimizer_step(self, optimizer):
            pass

    fit.module.__class__ = Own
    with pytest.raises(TrainingError, match=r"step 1: the gradient of l0.q.lora_a is not finite"):
        fit.run(fit.trainer(Spoil("gradient"), FiniteGuard(fit.record)))


def test_steps_between_checks_are_not_looked_at(fit):
    """With check_every_n_steps=2 the bad second step is not checked."""
    fit.run(fit.trainer(Spoil("loss"), FiniteGuard(fit.record, check_every_n_steps=2)))
    assert fit.module.global_step == 2


def test_a_base_that_is_not_finite_is_named_as_the_cause(fit):
    """The message does not advise a lower learning rate, as the file is damaged."""

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
    """The weight is named before NaN would be written into the record."""
    fit.module.refuse_unfinite(1.0, None)
    with pytest.raises(TrainingError, match="before its first step"):
        fit.module.refuse_unfinite(1.0, math.inf)
    frozen = [(n, p) for n, p in fit.module.named_parameters() if not p.requires_grad]
    name, parameter = next((n, p) for n, p in frozen if p.dim() == 2)
    parameter.data[0, 0] = math.nan
    with pytest.raises(TrainingError, match="the base model's weights are not finite") as caught:
        fit.module.refuse_unfinite(math.nan)
    assert caught.value.where == name


def test_a_quantized_weight_whose_scale_is_not_finite_is_named(fit):
    """4-bit codes are always finite; their scale may not be."""
    layers = fit.module.named_modules()
    name, layer = next((n, one) for n, one in layers if isinstance(one, bnb.nn.Linear4bit))
    state = layer.weight.quant_state
    (state.state2 if state.nested else state).absmax[0] = math.nan
    with pytest.raises(TrainingError, match="the base model's weights are not finite") as caught:
        fit.module.refuse_unfinite(math.nan)
    assert caught.value.where == f"{name}.weight"
