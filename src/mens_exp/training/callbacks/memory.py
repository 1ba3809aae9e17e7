"""How much memory training takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning import Callback

from mens_exp.training import memory_probe

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import TrainingModule
    from mens_exp.training.record import RunRecord

__all__ = ["MemoryWatch"]


class MemoryWatch(Callback):
    """Records resident memory at each step, and peaks on host and GPU."""

    def __init__(self, run: RunRecord) -> None:
        """Listen for ``run``."""
        self.run = run

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the memory of a finished step."""
        del trainer, outputs, batch, batch_idx
        if not pl_module.at_step_boundary:
            return
        pl_module.record("mem/rss_bytes", memory_probe.rss_bytes())
        for name, value in (
            ("mem/peak_rss_bytes", memory_probe.peak_rss_bytes()),
            ("mem/peak_cuda_bytes", memory_probe.peak_cuda_bytes()),
        ):
            if value is not None:
                pl_module.record(name, value)
