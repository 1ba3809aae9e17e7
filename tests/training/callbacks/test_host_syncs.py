"""Host synchronizations of an optimizer step, counted on a device without values."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from device_reads import DEVICE, HostSyncs, move_to_device
from lightning import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

from mens_exp.training import build
from mens_exp.training.build import build_module, build_trainer

STEPS, MICRO_BATCHES = 3, 4
# Lightning reads the length of the stream from the device before training.
pytestmark = pytest.mark.filterwarnings("ignore:Total length of")
QLORA = ("quant.compute_dtype=f32",)
FULL = ("backend=full", "quant=none", "quant.compute_dtype=f32")


class Phases(Callback):
    """Splits the syncs into those of micro-batches and those that an optimizer step adds."""

    def __init__(self, syncs):
        self.syncs = syncs
        self.micro_batches = []
        self.steps = []

    def _taken(self):
        found, self.syncs.found = self.syncs.found, []
        return found

    def on_train_start(self, *_):
        self._taken()

    def on_after_backward(self, *_):
        self.micro_batches.append(self._taken())

    def on_train_batch_end(self, trainer, pl_module, *_):
        """Record the syncs since the backward pass; it runs after all callbacks that read."""
        self.steps.append(self._taken())


class OnDevice(SingleDeviceStrategy):
    """A strategy of one process whose root device is the stand-in for a GPU."""

    def __init__(self, *_):
        super().__init__(DEVICE)

    def setup_environment(self):
        """Do nothing, since the accelerator of the trainer is a CPU."""

    def model_to_device(self):
        """Do nothing, since the model already exists."""


@pytest.fixture
def phases(fit, tiny_backend, tiny_config, monkeypatch):
    """Fit a model with all callbacks of a run; return the syncs of micro-batches and steps."""

    def run(*overrides, packing=True, spoil=None):
        module = build_module(fit.config, tiny_backend(*overrides), fit.data)
        move_to_device(module)
        if spoil is not None:
            monkeypatch.setattr(module, "training_loss", spoil(module.training_loss))
        monkeypatch.setattr(build, "strategy_of", OnDevice)
        stands_in_for_torch(monkeypatch)
        config = tiny_config(*overrides, f"trainer.accumulate_grad_batches={MICRO_BATCHES}")
        fit.data._train.total = STEPS * MICRO_BATCHES
        fit.data._train.places, fit.data._train.packing = None, packing
        trainer = build_trainer(config, fit.record, max_steps=STEPS)
        trainer.limit_val_batches = 0
        fit.module = module
        with HostSyncs() as syncs:
            found = Phases(syncs)
            trainer.callbacks.append(found)
            fit.run(trainer)
        assert len(found.micro_batches) == STEPS * MICRO_BATCHES
        return found

    return run


def stands_in_for_torch(monkeypatch):
    """Give the stand-in the features that torch has only for GPUs: autocast and generators."""
    autocast, is_on, generator = torch.autocast, torch.is_autocast_enabled, torch.Generator
    monkeypatch.setattr(torch, "autocast", lambda _, **options: autocast("cpu", **options))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: is_on("cpu"))
    monkeypatch.setattr(torch, "Generator", lambda *_, **__: generator())


def files_of(groups):
    """Count the syncs of each group by the file that caused them."""
    return [Counter(Path(one.file).name for one in group) for group in groups]


ONCE = ([{}] * (MICRO_BATCHES - 1) + [{"module.py": 1}]) * STEPS


@pytest.mark.parametrize("overrides", [QLORA, FULL], ids=["qlora", "full"])
def test_a_step_waits_once_and_its_micro_batches_never(phases, overrides):
    """Loss, metrics and gradient norm are read together once per optimizer step."""
    found = phases(*overrides)
    assert not any(found.micro_batches), [
        str(one) for group in found.micro_batches for one in group
    ]
    assert files_of(found.steps) == ONCE


def test_a_padded_micro_batch_waits_for_transformers_alone(phases):
    """The library checks whether the mask is all ones; a packed batch has no mask."""
    found = phases(*QLORA, packing=False)
    assert files_of(found.micro_batches) == [{"masking_utils.py": 1}] * STEPS * MICRO_BATCHES
    assert files_of(found.steps) == ONCE


def test_a_number_that_a_micro_batch_reads_is_found(phases):
    """A loss that is logged in every micro-batch is found and named with its line."""

    def logged(training_loss):
        def reads(*arguments):
            loss = training_loss(*arguments)
            loss.total.item()
            return loss

        return reads

    found = phases(*QLORA, spoil=logged)
    mine = [[one for one in group if one.file == __file__] for group in found.micro_batches]
    assert [len(one) for one in mine] == [1] * STEPS * MICRO_BATCHES
    assert mine[0][0].code == "loss.total.item()"


WAITING = {
    "item": lambda x: x[0].item(),
    "float": lambda x: float(x.sum()),
    "a condition": lambda x: bool(x.isfinite().all()),
    "a list": lambda x: x[:1].tolist(),
    "a copy": lambda x: x.cpu(),
    "a copy into a host tensor": lambda x: torch.zeros(4).copy_(x),
    "places": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "an assignment by a mask": lambda x: x.index_put_((x > 0,), x.sum()),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "repeats": lambda x: x.repeat_interleave(x.long()),
    "a copy from a host tensor": lambda x: x.copy_(torch.zeros(4)),
    "a tensor of numbers": lambda _: torch.zeros(4).to(DEVICE),
}


@pytest.mark.parametrize("reads", WAITING.values(), ids=WAITING.keys())
def test_what_waits_for_a_device_is_counted(reads):
    """Each sync has one entry, with the line of this file."""
    x = torch.ones(4, device=DEVICE)
    with HostSyncs() as syncs:
        reads(x)
    assert [one.file for one in syncs.found] == [__file__]


def test_what_waits_for_nothing_is_not_counted():
    """Arithmetic, fills, integer indices and values on the host do not synchronize."""
    x, host = torch.ones(4, device=DEVICE), torch.ones(4)
    with HostSyncs() as syncs:
        x[1:].mul_(2.0).add_(x[torch.zeros(3, dtype=torch.long, device=DEVICE)])
        torch.where(x > 0, x, torch.full((), 3.0, device=DEVICE)).masked_fill_(x > 0, 0.0)
        x.copy_(host, non_blocking=True)
        host.to(DEVICE, non_blocking=True)
        host[host > 0].sum().item()
    assert syncs.found == []
