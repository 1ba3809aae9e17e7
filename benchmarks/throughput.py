"""Training speed compared with the machine's own bf16 GEMM rate, in one process and one run.

    python benchmarks/throughput.py [overrides …]

Non-padding tokens a second over whole optimizer steps, with and without LoRA dropout, measured in
turns, with the GEMM rate between them. Both arms train on the CPU in one process, so the peak of
resident memory is that of both.
"""

from __future__ import annotations

import time

import record
import torch

from mens_exp.artifacts.host import peak_rss_bytes
from mens_exp.config.overrides import check
from mens_exp.corpus.source import load_rows
from mens_exp.data.datamodule import RowsDataModule
from mens_exp.errors import Problems
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import Passed
from mens_exp.planning.preflight import writable_cache
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training.build import build_backend, build_module, lightning_quiet
from mens_exp.training.optimizer import build_optimizer

QUESTION = "How many tokens a second does the main job train on?"
ROUNDS = 4
STEPS = 2  # optimizer steps timed in each round
DROPOUTS = (0.0, 0.05)
GEMM_WIDTH = 2048
SMALLEST = (
    *("model=tiny_llama", "data=synthetic", "data.rows=40", "data.seq_len=1024"),
    "trainer.accumulate_grad_batches=1",
)
SMALLEST_GEMM_WIDTH = 256


def main() -> None:
    """Measure the arms in turns."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", help="of the main job")
    given = record.begin(parser)
    small = given.smallest
    rounds, width = (1, SMALLEST_GEMM_WIDTH) if small else (ROUNDS, GEMM_WIDTH)
    overrides = ["trainer=cpu", *(SMALLEST if small else ()), *given.overrides]
    arms = {dropout: Arm(dropout, overrides) for dropout in DROPOUTS}
    for arm in arms.values():
        arm.step()
    rates: dict[float, list[float]] = {dropout: [] for dropout in DROPOUTS}
    gemm: dict[float, list[float]] = {dropout: [] for dropout in DROPOUTS}
    for _ in range(rounds):
        for dropout, arm in arms.items():
            rates[dropout].append(arm.rate())
            gemm[dropout].append(gemm_gflops(width))
    higher = record.Better.HIGHER
    figures = [
        record.figure(
            f"dropout {dropout}", found, "tokens/s", higher, ("bf16 GEMM, GFLOP/s", gemm[dropout])
        )
        for dropout, found in rates.items()
    ]
    peak_gb = (peak_rss_bytes() or 0) / 1e9
    figures.append(record.figure("peak resident memory", peak_gb, "GB", record.Better.LOWER))
    record.finish(QUESTION, figures, given)


class Arm:
    """One configuration in a manual training loop: forward, backward, optimizer."""

    def __init__(self, dropout: float, overrides: list[str]) -> None:
        """Build model, data, objective and optimizer as training does."""
        checked = check([*overrides, f"lora.dropout={dropout}"])
        Problems.raise_if(checked.problems)
        self.config = checked.cells[0].config
        cache = writable_cache()
        base = resolve(self.config.model, cache)
        tokenizer = load_tokenizer(self.config.tokenizer, base.directory)
        data = RowsDataModule(self.config, load_rows(self.config.data, cache), tokenizer, cache)
        with lightning_quiet():
            self.backend = build_backend(self.config, base)
        self.objective = build_module(self.config, self.backend, data).objective
        self.stream = data.train_dataloader()
        self.optimizer = build_optimizer(self.config.optim, self.backend.trainable())
        self.position = 0

    def step(self) -> int:
        """Take one optimizer step and return its tokens."""
        tokens = 0
        for _ in range(self.config.trainer.accumulate_grad_batches):
            batch = self.stream.batch(self.position)
            self.position += 1
            self.backend.begin(batch.index)
            passed = Passed(batch, self.backend(batch), self.backend.head)
            loss = self.objective.loss(passed)
            loss.total.backward()  # type: ignore[no-untyped-call]
            tokens += batch.tokens
        self.optimizer.step()
        self.optimizer.zero_grad()
        return tokens

    def rate(self) -> float:
        """Return tokens per second over a few steps."""
        start = time.perf_counter()
        tokens = sum(self.step() for _ in range(STEPS))
        return tokens / (time.perf_counter() - start)


def gemm_gflops(width: int) -> float:
    """Return the bf16 GEMM rate of the CPU, in GFLOP/s."""
    a = torch.randn(width, width, dtype=torch.bfloat16)
    _ = a @ a
    start = time.perf_counter()
    for _ in range(10):
        _ = a @ a
    return 10 * 2 * width**3 / (time.perf_counter() - start) / 1e9


if __name__ == "__main__":
    main()
