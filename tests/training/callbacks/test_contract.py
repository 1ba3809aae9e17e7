"""The contract of every callback, run on all callbacks found in the package."""

from __future__ import annotations

import importlib
import inspect
import io
import os
import pkgutil
import random
import threading

import numpy as np
import pytest
import torch
from lightning import Callback

from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.logger import WandbLogger
from mens_exp.evals.attempts import Measured
from mens_exp.training import callbacks as package


def discovered():
    """Return every callback class that a module of the package defines."""
    found = []
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        loaded = importlib.import_module(module.name)
        found += [
            value
            for value in vars(loaded).values()
            if inspect.isclass(value)
            and issubclass(value, Callback)
            and value.__module__ == module.name
        ]
    return found


EVERY = pytest.mark.parametrize("kind", discovered(), ids=lambda kind: kind.__name__)


class PlannedError(Exception):
    """The error that the failing fit raises."""


class FailsAfterOneStep(Callback):
    """Raises in the middle of the second optimizer step."""

    def on_train_batch_end(self, trainer, *_):
        if trainer.fit_loop.total_batch_idx == 2:
            raise PlannedError


def drawn_score(items):
    """Return a score after drawing from every global generator."""
    value = (random.random() + np.random.random() + float(torch.rand(()))) / 3
    return Measured(items=items, values={"eval/parse_rate": value}, unknown={}, events=[])


def made(kind, record):
    offered = {
        "run": record,
        "logger": WandbLogger(),
        "settings": {"seed": 1},
        "score": drawn_score,
        "every_n_steps": 1,
    }
    taken = inspect.signature(kind).parameters
    return kind(**{name: value for name, value in offered.items() if name in taken})


def fit_threads():
    return {thread for thread in threading.enumerate() if thread.name != "MainThread"}


def bytes_of(state):
    """Serialize as a checkpoint does, and check that it can be read without pickle."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)
    return buffer.getvalue()


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("WANDB")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _same_random_state():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()
    yield
    torch.set_rng_state(torch_state)
    np.random.set_state(numpy_state)


def test_every_module_of_the_package_holds_one_callback():
    """Each module defines exactly one callback."""
    modules = [module.name for module in pkgutil.iter_modules(package.__path__)]
    assert sorted(kind.__module__.rpartition(".")[2] for kind in discovered()) == sorted(modules)


@EVERY
def test_two_step_fit_ends_and_leaves_a_readable_record(kind, fit):
    """Each callback works alone: the fit ends and the record can be read."""
    before = fit_threads()
    trainer = fit.trainer(made(kind, fit.record))
    fit.run(trainer)
    fit.record.close()
    assert trainer.global_step == 2
    assert fit_threads() <= before
    assert "sink_failed" not in [e["event"] for e in read_events(fit.record.dir.telemetry)]


@EVERY
def test_fit_is_the_same_with_and_without_it(kind, fit, reference):
    """A callback draws no random number and changes no weight."""
    fit.run(fit.trainer(made(kind, fit.record)))
    after = fit.module.backend.trainable()
    assert all(torch.equal(after[name], value) for name, value in reference.items())


@EVERY
def test_failing_fit_passes_the_error_on_and_writes_no_result(kind, fit):
    """The original error propagates, the record stays open, and no adapter is written."""
    before = fit_threads()
    with pytest.raises(PlannedError):
        fit.run(fit.trainer(made(kind, fit.record), FailsAfterOneStep()))
    fit.record.telemetry.emit("warning", {"text": "still open"})
    assert not fit.record.dir.adapter.exists()
    assert "tokens_per_s" not in fit.record.manifest.results
    fit.record.close()
    assert fit_threads() <= before


@EVERY
def test_teardown_may_come_twice_and_without_a_fit(kind, fit):
    """Lightning calls teardown after fit, after validate, and after an error in either."""
    callback = made(kind, fit.record)
    trainer = fit.trainer(callback)
    for _ in range(2):
        callback.teardown(trainer, fit.module, "fit")
    fit.run(trainer)
    for _ in range(2):
        callback.on_exception(trainer, fit.module, PlannedError())
        callback.teardown(trainer, fit.module, "fit")


@EVERY
def test_state_survives_a_checkpoint(kind, fit):
    """An instance that loads the state returns the same state."""
    callback = made(kind, fit.record)
    fit.run(fit.trainer(callback))
    state = callback.state_dict()
    stored = torch.load(io.BytesIO(bytes_of(state)), weights_only=True)
    other = made(kind, fit.record)
    other.load_state_dict(stored)
    assert bytes_of(other.state_dict()) == bytes_of(state)


@pytest.fixture
def reference(fit, tiny_backend):
    """Return the adapter of the two-step fit without callbacks; the graph is restored."""
    from mens_exp.training.build import build_module

    fit.run(fit.trainer())
    trained = {n: p.detach().clone() for n, p in fit.module.backend.trainable().items()}
    fit.module = build_module(fit.config, tiny_backend(), fit.data)
    fit.data.train_dataloader().position = 0
    return trained
