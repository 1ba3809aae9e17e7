"""The proxy stack's speed beside the machine's own bf16 GEMM rate, in one process and one run.

    python benchmarks/proxy.py [overrides …]

Prints supervised positions a second over whole training steps (forward, backward, optimizer), the
GEMM rate between them, the arithmetic of a position, their ratio, and the peak resident memory.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from mens_exp.config.objective import CrossEntropyConfig
from mens_exp.config.overrides import check
from mens_exp.data.batch import packed_batch
from mens_exp.errors import Problems
from mens_exp.model.resolve import resolve
from mens_exp.objective.causal import CrossEntropy
from mens_exp.plan.preflight import writable_cache
from mens_exp.rows.encode import Encoded
from mens_exp.training.build import build_backend, lightning_quiet
from mens_exp.training.memory_probe import peak_rss_bytes

ROUNDS, STEPS, ROWS, K, ROW_TOKENS, GEMM_WIDTH = 5, 2, 16, 64, 128, 2048
USUAL = ["backend=proxy", f"objective.k={K}", "objective.chunk_tokens=256", "trainer=cpu"]


def documents(vocabulary: int) -> Encoded:
    """Draw rows of random ids whose last K are learned."""
    import numpy as np

    ids = np.random.default_rng(0).integers(0, vocabulary, ROWS * ROW_TOKENS)
    learned = np.tile(np.arange(ROW_TOKENS) >= ROW_TOKENS - K, ROWS)
    return Encoded(
        ids=ids.astype(np.int32),
        supervised=learned,
        offsets=np.arange(0, ROWS * ROW_TOKENS + 1, ROW_TOKENS, dtype=np.int64),
        truncated=0,
        dropped=0,
    )


def gemm_gflops() -> float:
    """Return the bf16 GEMM rate of the CPU, in GFLOP/s."""
    a = torch.randn(GEMM_WIDTH, GEMM_WIDTH, dtype=torch.bfloat16)
    _ = a @ a
    start = time.perf_counter()
    for _ in range(10):
        _ = a @ a
    return 10 * 2 * GEMM_WIDTH**3 / (time.perf_counter() - start) / 1e9


def main(overrides: list[str]) -> None:
    """Step by hand, in turns with the GEMM, and print the medians."""
    checked = check([*USUAL, *overrides])
    Problems.raise_if(checked.problems)
    config = checked.cells[0].config
    base = resolve(config.model, writable_cache())
    with lightning_quiet():
        backend: Any = build_backend(config, base)
    backend.train()
    assert isinstance(config.objective, CrossEntropyConfig)
    objective = CrossEntropy(config.objective.name, config.objective.chunk_tokens)
    optimizer = torch.optim.AdamW(backend.trainable().values(), lr=config.optim.lr)
    batch = packed_batch(documents(backend.shape.vocab_size), [list(range(ROWS))], index=0)

    def step() -> None:
        backend.begin(0)
        loss = objective(backend(batch), batch.targets_M, backend.head)
        loss.total.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    rates, gemm = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            step()
        rates.append(STEPS * ROWS * K / (time.perf_counter() - start))
        gemm.append(gemm_gflops())
    positions, machine = statistics.median(rates), statistics.median(gemm)
    weights = sum(part.weight_OI.numel() for part in backend.projections.values())
    flops = 4 * weights  # forward and the gradient of the input; LoRA's own is not counted
    print(f"bf16 GEMM          {machine:8.0f} GFLOP/s  ({min(gemm):.0f} to {max(gemm):.0f})")
    print(f"positions          {positions:8.0f} a second ({min(rates):.0f} to {max(rates):.0f})")
    print(f"a position         {flops / 1e6:8.1f} MFLOP over {weights / 1e6:.1f} M frozen weights")
    print(f"of the GEMM rate   {positions * flops / 1e9 / machine:8.2f}")
    print(f"peak resident      {(peak_rss_bytes() or 0) / 1e9:8.2f} GB")


if __name__ == "__main__":
    main(sys.argv[1:])
