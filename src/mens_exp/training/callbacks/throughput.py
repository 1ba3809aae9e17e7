"""Training throughput."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from lightning import Callback

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule

_TOKENS = ("tokens", "supervised_tokens")


class Throughput(Callback):
    """Records step time, non-padding and supervised tokens per second, passes, and time left.

    Time spent on validation or saving does not count. The run's totals exclude the first step of
    each process that worked on it, because it includes warm-up.
    """

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``."""
        self.run = run
        self._mark = 0.0
        self._last = (0, 0)
        self._is_warm = False
        self._total: dict[str, float] = dict.fromkeys(("steps", "s", *_TOKENS), 0)

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
        total = self._total
        if self._is_warm:
            total["steps"] += 1
            total["s"] += seconds
            total["tokens"] += tokens
            total["supervised_tokens"] += supervised
        self._is_warm = True
        data = trainer.datamodule  # type: ignore[attr-defined]  # Lightning adds it
        if data is not None and (epochs := data.epochs_after(trainer.global_step)) is not None:
            pl_module.record("data/epochs", epochs)
        mean = total["s"] / total["steps"] if total["steps"] else seconds
        pl_module.record("perf/eta_s", mean * (trainer.max_steps - trainer.global_step))

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record the run's figures in the manifest."""
        del trainer, pl_module
        manifest, seconds = self.run.manifest, self._total["s"]
        manifest.results["train_s"] = seconds
        for name in _TOKENS:
            manifest.results[f"{name}_per_s"] = self._total[name] / seconds if seconds else None
            if not seconds:
                manifest.unknown[f"results.{name}_per_s"] = "one step is all warm-up"

    def state_dict(self) -> dict[str, Any]:
        """Return the totals behind the run's figures."""
        return dict(self._total)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the totals of an earlier process."""
        self._total = dict(state_dict)
