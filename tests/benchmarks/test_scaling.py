"""The formulas of benchmarks/scaling.py by hand, and planned memory beside published peaks."""

from __future__ import annotations

import pytest
from scaling import PUBLISHED, Device, Job, calibrated, flops_per_token, times

from mens_exp.layout.shape import shape_of

# The plan has 1.5 times as much: the published peak grows by 0.23 GiB from 512 to 2,048 tokens.
OUTSIDE = {"Llama 2 7B, 2 GPUs, fsdp, 1 × 2048"}
PEAKS = [
    pytest.param(job, peak, id=f"{device}: {job.name}")
    for device, one in PUBLISHED.items()
    for job, peak in one.peaks
]


@pytest.mark.parametrize(("job", "peak"), PEAKS)
def test_the_planned_memory_of_a_gpu_is_that_of_published_runs(job, peak):
    planned = job.memory()
    is_inside = planned.low <= peak * 2**30 <= planned.high
    assert is_inside is (job.name not in OUTSIDE)


def test_a_token_takes_six_operations_a_frozen_weight():
    """For Llama 2 7B: 6.48e9 weights in layers, a head of 32,000 × 4,096, 2,048 tokens."""
    shape = shape_of(Job(model="Llama 2 7B", gpus=1, batch=1, tokens=2048).config().model)
    layers = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    attention = 32 * 4.5 * (2 * 2048 * 4096)
    by_hand = 6 * layers + 4 * 32000 * 4096 + attention
    assert flops_per_token(shape, 2048) == by_hand


@pytest.mark.parametrize(
    ("rate", "best", "worst"), [(1e14, 0.8720, 1.2067), (1e15, 0.3507, 0.4363)]
)
def test_time_is_between_overlapped_and_not(rate, best, worst):
    """By hand for 2,048 tokens at 10 GB/s; the slower device computes longer than it gathers.

    Products: 8.560e13 FLOPs, so 0.8560 or 0.0856 s. Weights of 4.127 bits, half of them from the
    other process, twice: 0.3341 s, and 64 starts of 10 µs. An adapter of 39,976,960 numbers in 4
    bytes, half from the other process, twice: 0.0160 s.
    """
    job = Job(model="Llama 2 7B", gpus=2, batch=1, tokens=2048, rank=16)
    found = times(job, Device(rate=rate, link=1e10), gathers_head=False)
    assert found.gather == pytest.approx(0.3341, abs=1e-4)
    assert found.latency == pytest.approx(0.00064)
    assert found.reduce == pytest.approx(0.0160, abs=1e-4)
    assert found.best == pytest.approx(best, abs=2e-4)
    assert found.worst == pytest.approx(worst, abs=2e-4)


@pytest.mark.parametrize("sharded", [True, False])
def test_one_process_waits_for_nobody(sharded):
    job = Job(model="8B", gpus=1, batch=1, tokens=512, sharded=sharded)
    found = times(job, calibrated(job, 0.25, link=1.0), gathers_head=True)
    assert found.best == found.worst == pytest.approx(0.25)
