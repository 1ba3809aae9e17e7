"""The proxy stack's speed compared with the machine's own bf16 GEMM rate, in one process.

    python benchmarks/proxy.py [overrides …]

Supervised positions a second over whole training steps (forward, backward, optimizer), with the
GEMM rate between them. Their arithmetic is forward and the gradient of the input over the frozen
weights; LoRA's own and the softmax are not counted.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import record
from throughput import GEMM_WIDTH, SMALLEST_GEMM_WIDTH, gemm_gflops

from mens_exp.artifacts.host import peak_rss_bytes
from mens_exp.config.objective import CrossEntropyConfig
from mens_exp.config.overrides import check
from mens_exp.data.batch import packed_batch
from mens_exp.errors import Problems
from mens_exp.model.sources import resolve
from mens_exp.objective.causal import CrossEntropy
from mens_exp.planning.preflight import writable_cache
from mens_exp.rows.documents import Encoded
from mens_exp.training.build import build_backend, lightning_quiet
from mens_exp.training.optimizer import build_optimizer

QUESTION = "How much of the machine's GEMM rate does training the proxy stack reach?"
ROUNDS, STEPS, ROWS, K, ROW_TOKENS = 5, 2, 16, 64, 128
USUAL = ("backend=proxy", f"objective.k={K}", "objective.chunk_tokens=256", "trainer=cpu")


def main() -> None:
    """Measure training steps in turns with the GEMM."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", help="of a run with backend=proxy")
    given = record.begin(parser)
    small = given.smallest
    rounds, width = (1, SMALLEST_GEMM_WIDTH) if small else (ROUNDS, GEMM_WIDTH)
    training = Training([*USUAL, *(["model=tiny_llama"] if small else []), *given.overrides])
    training.step()
    rates, gemm = [], []
    for _ in range(rounds):
        rates.append(training.rate())
        gemm.append(gemm_gflops(width))
    weights = sum(part.weight_OI.numel() for part in training.backend.projections.values())
    flops = 4 * weights  # per position
    arithmetic = [rate * flops / 1e9 for rate in rates]
    higher, beside = record.Better.HIGHER, ("bf16 GEMM", gemm)
    figures = [
        record.figure("arithmetic", arithmetic, "GFLOP/s", higher, beside),
        record.figure("positions", rates, "positions/s", higher, ("bf16 GEMM, GFLOP/s", gemm)),
        record.figure("a position", flops / 1e6, "MFLOP"),
        record.figure("frozen weights", weights / 1e6, "M weights"),
        record.figure(
            "peak resident memory", (peak_rss_bytes() or 0) / 1e9, "GB", record.Better.LOWER
        ),
    ]
    record.finish(QUESTION, figures, given)


class Training:
    """The proxy stack in a manual training loop on one batch of random ids."""

    def __init__(self, overrides: list[str]) -> None:
        """Build backend, objective and optimizer."""
        checked = check(overrides)
        Problems.raise_if(checked.problems)
        config = checked.cells[0].config
        base = resolve(config.model, writable_cache())
        with lightning_quiet():
            backend: Any = build_backend(config, base)
        self.backend = backend.train()
        assert isinstance(config.objective, CrossEntropyConfig), "backend=proxy takes no other"
        assert config.objective.chunk_tokens is not None, "the overrides set it"
        self.objective = CrossEntropy(config.objective.name, config.objective.chunk_tokens)
        self.optimizer = build_optimizer(config.optim, self.backend.trainable())
        rows = documents(self.backend.shape.vocab_size)
        self.batch = packed_batch(rows, [list(range(ROWS))], index=0)

    def step(self) -> None:
        """Take one optimizer step."""
        self.backend.begin(0)
        hidden = self.backend(self.batch)
        loss = self.objective(hidden, self.batch.targets_M, self.backend.head)
        loss.total.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def rate(self) -> float:
        """Return supervised positions per second over a few steps."""
        start = time.perf_counter()
        for _ in range(STEPS):
            self.step()
        return STEPS * ROWS * K / (time.perf_counter() - start)


def documents(vocabulary: int) -> Encoded:
    """Draw rows of random ids whose last K are supervised."""
    ids = np.random.default_rng(0).integers(0, vocabulary, ROWS * ROW_TOKENS)
    learned = np.tile(np.arange(ROW_TOKENS) >= ROW_TOKENS - K, ROWS)
    return Encoded(
        ids=ids.astype(np.int32),
        supervised=learned,
        offsets=np.arange(0, ROWS * ROW_TOKENS + 1, ROW_TOKENS, dtype=np.int64),
        truncated=0,
        dropped=0,
    )


if __name__ == "__main__":
    main()
