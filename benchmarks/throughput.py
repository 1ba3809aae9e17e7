"""Training speed beside the machine's own bf16 GEMM rate, in one process and one run.

    python benchmarks/throughput.py [overrides …]

Prints non-padding tokens a second over whole optimizer steps, with and without LoRA dropout,
measured in turns, the GEMM rate between them, their ratio, and the peak resident memory.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
from hydra.utils import instantiate

from mens_exp.config.overrides import check
from mens_exp.corpus.source import load_rows
from mens_exp.data.datamodule import RowsDataModule
from mens_exp.errors import Problems
from mens_exp.model.resolve import resolve
from mens_exp.plan.preflight import writable_cache
from mens_exp.tokenizer.hf import HfTokenizer
from mens_exp.training.build import build_backend, lightning_quiet
from mens_exp.training.memory_probe import peak_rss_bytes

ROUNDS = 4
STEPS = 2  # optimizer steps timed in each round
DROPOUTS = (0.0, 0.05)
GEMM_WIDTH = 2048


class Arm:
    """One configuration, stepped by hand: forward, backward, optimizer."""

    def __init__(self, dropout: float, overrides: list[str]) -> None:
        """Build model, data and optimizer."""
        checked = check([*overrides, f"lora.dropout={dropout}"])
        Problems.raise_if(checked.problems)
        self.config = checked.cells[0].config
        cache = writable_cache()
        base = resolve(self.config.model, cache)
        tokenizer = HfTokenizer.from_directory(base.directory)
        data = RowsDataModule(self.config, load_rows(self.config.data, cache), tokenizer, cache)
        with lightning_quiet():
            self.backend = build_backend(self.config, base)
        self.backend.train()
        self.stream = data.train_dataloader()
        self.objective = instantiate(self.config.objective)
        parameters = list(self.backend.trainable().values())
        self.optimizer = instantiate(self.config.optim, params=parameters)
        self.position = 0

    def step(self) -> int:
        """Take one optimizer step and return its tokens."""
        tokens = 0
        for _ in range(self.config.trainer.accumulate_grad_batches):
            batch = self.stream.batch(self.position)
            self.position += 1
            self.backend.begin(batch.index)
            loss = self.objective(self.backend(batch), batch.targets_M, self.backend.head)
            loss.total.backward()
            tokens += batch.tokens
        self.optimizer.step()
        self.optimizer.zero_grad()
        return tokens

    def rate(self) -> float:
        """Return tokens a second over a few steps."""
        start = time.perf_counter()
        tokens = sum(self.step() for _ in range(STEPS))
        return tokens / (time.perf_counter() - start)


def gemm_gflops() -> float:
    """Return the bf16 GEMM rate of the CPU, in GFLOP/s."""
    a = torch.randn(GEMM_WIDTH, GEMM_WIDTH, dtype=torch.bfloat16)
    _ = a @ a
    start = time.perf_counter()
    for _ in range(10):
        _ = a @ a
    return 10 * 2 * GEMM_WIDTH**3 / (time.perf_counter() - start) / 1e9


def main(overrides: list[str]) -> None:
    """Measure the arms in turns and print the medians."""
    arms = {dropout: Arm(dropout, overrides) for dropout in DROPOUTS}
    for arm in arms.values():
        arm.step()
    rates: dict[float, list[float]] = {dropout: [] for dropout in DROPOUTS}
    gemm = []
    for _ in range(ROUNDS):
        for dropout, arm in arms.items():
            rates[dropout].append(arm.rate())
            gemm.append(gemm_gflops())
    machine = statistics.median(gemm)
    print(f"bf16 GEMM          {machine:8.0f} GFLOP/s  ({min(gemm):.0f} to {max(gemm):.0f})")
    for dropout, found in rates.items():
        median = statistics.median(found)
        print(
            f"dropout {dropout:<5}      {median:8.0f} tokens/s   ({min(found):.0f} to "
            f"{max(found):.0f})   {1000 * median / machine:.0f} per 1,000 GFLOP/s"
        )
    print(f"peak resident      {(peak_rss_bytes() or 0) / 1e9:8.2f} GB (both arms in one process)")


if __name__ == "__main__":
    main(sys.argv[1:])
