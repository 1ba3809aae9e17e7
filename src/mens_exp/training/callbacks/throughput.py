"""How fast training is."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning import Callback

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import TrainingModule
    from mens_exp.training.record import RunRecord

__all__ = ["Throughput"]


class Throughput(Callback):
    """Records step time, non-padding tokens and supervised tokens a second, and time left.

    Time spent validating or saving does not count. The run's own figures leave out the first
    step of a process, which pays for warm-up.
    """

    def __init__(self, run: RunRecord) -> None:
        """Listen for ``run``."""
        self.run = run
        self._mark = 0.0
        self._last = (0, 0)
        self._steps = 0
        self._seconds = 0.0
        self._tokens = 0
        self._supervised = 0

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Start the clock."""
        del trainer
        self._mark = time.perf_counter()
        self._last = (pl_module.tokens, pl_module.supervised_tokens)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Any, batch_idx: int
    ) -> None:
        """Start the clock of a step at its first micro-batch."""
        del trainer, batch, batch_idx
        if pl_module.at_step_boundary:
            self._mark = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the figures of a finished step."""
        del outputs, batch, batch_idx
        if not pl_module.at_step_boundary:
            return
        seconds = time.perf_counter() - self._mark
        tokens = pl_module.tokens - self._last[0]
        supervised = pl_module.supervised_tokens - self._last[1]
        self._last = (pl_module.tokens, pl_module.supervised_tokens)
        pl_module.record("perf/step_s", seconds)
        pl_module.record("perf/tokens_per_s", tokens / seconds)
        pl_module.record("perf/supervised_tokens_per_s", supervised / seconds)
        self._steps += 1
        if self._steps > 1:
            self._seconds += seconds
            self._tokens += tokens
            self._supervised += supervised
        mean = self._seconds / (self._steps - 1) if self._steps > 1 else seconds
        pl_module.record("perf/eta_s", mean * (trainer.max_steps - trainer.global_step))

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Put the run's figures into the manifest."""
        del trainer, pl_module
        results = self.run.manifest.results
        results["train_s"] = self._seconds
        for name, count in (
            ("tokens_per_s", self._tokens),
            ("supervised_tokens_per_s", self._supervised),
        ):
            results[name] = count / self._seconds if self._seconds else None
            if not self._seconds:
                self.run.manifest.unknown[f"results.{name}"] = "one step is all warm-up"
