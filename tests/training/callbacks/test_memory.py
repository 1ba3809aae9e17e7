from __future__ import annotations

import psutil

from mens_exp.artifacts import host
from mens_exp.training.callbacks.memory import MemoryWatch


def test_resident_memory_is_plausible(fit):
    """With torch loaded, it is between 100 MB and the machine's memory."""
    fit.run(fit.trainer(MemoryWatch(fit.record)))
    rss = fit.module.step_metrics["mem/rss_bytes"]
    assert 1e8 < rss <= psutil.virtual_memory().total
    assert fit.module.step_metrics["mem/peak_rss_bytes"] >= rss * 0.9


def test_what_is_unknown_is_left_out(fit, monkeypatch):
    """Without a GPU, or a system that reports a peak, the metric is left out."""
    monkeypatch.setattr(host, "peak_rss_bytes", lambda: None)
    monkeypatch.setattr(host, "peak_cuda_bytes", lambda: None)
    fit.run(fit.trainer(MemoryWatch(fit.record), max_steps=1))
    assert "mem/rss_bytes" in fit.module.step_metrics
    assert not {"mem/peak_rss_bytes", "mem/peak_cuda_bytes"} & fit.module.step_metrics.keys()


def test_free_pages_are_given_back_every_so_many_steps(fit, monkeypatch):
    """Of five steps this happens at the second and fourth, whatever the micro-batches."""
    trimmed = []
    trainer = fit.trainer(MemoryWatch(fit.record, trim_every_n_steps=2), max_steps=5)
    monkeypatch.setattr(host, "release_free", lambda: trimmed.append(trainer.global_step))
    fit.run(trainer)
    assert trimmed == [2, 4]


def test_the_run_s_peak_is_the_highest_of_its_processes(fit, monkeypatch):
    """A resumed process starts from the peaks in the checkpoint."""
    monkeypatch.setattr(host, "peak_rss_bytes", lambda: 300)
    monkeypatch.setattr(host, "peak_cuda_bytes", lambda: None)
    callback = MemoryWatch(fit.record)
    callback.load_state_dict({"mem/peak_rss_bytes": 500, "mem/peak_cuda_bytes": 7})
    fit.run(fit.trainer(callback, max_steps=1))
    results = fit.record.manifest.results
    assert (results["peak_rss_bytes"], results["peak_cuda_bytes"]) == (500, 7)
    assert fit.module.step_metrics["mem/peak_rss_bytes"] == 300  # the step's own peak
