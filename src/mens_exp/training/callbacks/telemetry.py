"""Telemetry: one line per event."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning import Callback

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule


class TelemetryWriter(Callback):
    """Writes validations, and the metrics and digests of every step, to telemetry.jsonl."""

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``."""
        self.run = run

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record that training begins."""
        self.run.telemetry.emit(
            "train_start",
            {
                "step": trainer.global_step,
                "max_steps": trainer.max_steps,
                "device": str(pl_module.device),
            },
        )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the metrics of a finished step."""
        del outputs, batch, batch_idx
        if pl_module.at_step_boundary:
            payload = {"step": trainer.global_step, **pl_module.step_metrics}
            self.run.telemetry.emit("step", {**payload, **pl_module.step_digests})

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Write the validation loss."""
        if trainer.sanity_checking:
            return
        self.run.telemetry.emit(
            "validation",
            {"step": trainer.global_step, "condition": pl_module.condition, **pl_module.validation},
        )

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record the end of training, also for a resumed run that had no steps left."""
        self.run.telemetry.emit(
            "train_complete",
            {
                "step": trainer.global_step,
                "data/tokens": pl_module.tokens,
                "data/supervised_tokens": pl_module.supervised_tokens,
            },
        )
