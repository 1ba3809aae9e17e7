"""How much memory training takes."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

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
    """Records memory and peaks at each step, and gives freed pages back now and then."""

    def __init__(self, run: RunRecord, trim_every_n_steps: int = 2) -> None:
        """Listen for ``run``; trim the host's heap every so many optimizer steps."""
        self.run = run
        self.trim_every_n_steps = trim_every_n_steps

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the memory of a finished step."""
        del outputs, batch, batch_idx
        if not pl_module.at_step_boundary:
            return
        if trainer.global_step % self.trim_every_n_steps == 0:
            memory_probe.release_free()
        pl_module.record("mem/rss_bytes", memory_probe.rss_bytes())
        for name, value in (
            ("mem/peak_rss_bytes", memory_probe.peak_rss_bytes()),
            ("mem/peak_cuda_bytes", memory_probe.peak_cuda_bytes()),
        ):
            if value is not None:
                pl_module.record(name, value)
