from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from mens_exp.training.callbacks import throughput
from mens_exp.training.callbacks.throughput import Throughput


class Clock:
    """A clock that moves only when told."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now


class Module:
    """Counters of a module in training with two micro-batches per step."""

    def __init__(self):
        self.tokens = self.supervised_tokens = self.micro_batches = 0
        self.step_metrics = {}

    @property
    def at_step_boundary(self):
        return self.micro_batches % 2 == 0

    def record(self, name, value):
        self.step_metrics[name] = value


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(throughput, "time", made)
    return made


@pytest.fixture
def take(clock):
    """Take an optimizer step of two micro-batches with the given duration."""

    def taken(callback, module, seconds, pause_s=0.0):
        at = module.micro_batches // 2 + 1
        trainer = SimpleNamespace(max_steps=10, global_step=at, datamodule=None)
        for _ in range(2):
            callback.on_train_batch_start(trainer, module, None, 0)
            clock.now += seconds / 2
            module.micro_batches += 1
            module.tokens += 100
            module.supervised_tokens += 40
            callback.on_train_batch_end(trainer, module, None, None, 0)
        clock.now += pause_s

    return taken


def figures(record):
    results = record.manifest.results
    return results["train_s"], results["tokens_per_s"], results["supervised_tokens_per_s"]


def test_a_step_has_its_own_rates(record, take):
    """200 tokens, 80 of them supervised, take four seconds; nine such steps remain."""
    callback, module = Throughput(record), Module()
    callback.on_train_start(None, module)
    take(callback, module, 4.0)
    assert module.step_metrics == {
        "perf/step_s": 4.0,
        "perf/tokens_per_s": 50.0,
        "perf/supervised_tokens_per_s": 20.0,
        "perf/eta_s": 36.0,
    }


def test_the_run_leaves_out_its_first_step_and_its_pauses(record, take):
    """Two steps of two seconds count; the first step and a minute of validation do not."""
    callback, module = Throughput(record), Module()
    callback.on_train_start(None, module)
    take(callback, module, 30.0)
    take(callback, module, 2.0, pause_s=60.0)
    take(callback, module, 2.0)
    assert module.step_metrics["perf/eta_s"] == 14.0
    callback.on_fit_end(None, module)
    assert figures(record) == (4.0, 100.0, 40.0)


def test_a_resumed_run_counts_on(record, take):
    """One step of two seconds before and one of six after; each process warms up once."""
    first, module = Throughput(record), Module()
    first.on_train_start(None, module)
    take(first, module, 30.0)
    take(first, module, 2.0)
    second = Throughput(record)
    second.load_state_dict(first.state_dict())
    second.on_train_start(None, module)
    take(second, module, 30.0)
    take(second, module, 6.0)
    second.on_fit_end(None, module)
    assert figures(record) == (8.0, 50.0, 20.0)


def test_one_step_says_why_there_is_no_rate(record, take):
    """The rate is null with a reason, since the first step is warm-up."""
    callback, module = Throughput(record), Module()
    callback.on_train_start(None, module)
    take(callback, module, 30.0)
    callback.on_fit_end(None, module)
    assert record.manifest.results["tokens_per_s"] is None
    assert record.manifest.unknown["results.tokens_per_s"] == "one step is all warm-up"


def test_real_steps_take_time(fit):
    """A real fit has positive durations."""
    began = time.perf_counter()
    fit.run(fit.trainer(Throughput(fit.record)))
    spent = time.perf_counter() - began
    assert 0 < fit.record.manifest.results["train_s"] < spent
    assert fit.module.step_metrics["perf/step_s"] < spent
