"""The end of a run that no longer improves."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule


class EarlyStopping(LightningEarlyStopping):
    """Ends a run after so many validations without a lower loss, and says so in the record.

    Lightning's own rule. What is ours: a run that is resumed from the very step it ended at ends
    there again; Lightning's keeps its count in the checkpoint, and trains on all the same.
    """

    def __init__(self, run: RunRecord, patience: int = 3, min_delta: float = 0.0) -> None:
        """Listen for ``run``.

        Args:
            run: the record.
            patience: validations without improvement before the run ends.
            min_delta: nats a token by which the loss must fall to count as lower.
        """
        super().__init__(
            "val/loss", min_delta=min_delta, patience=patience, check_on_train_epoch_end=False
        )
        self.run = run

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """End at once where the checkpoint was saved by a run that had ended."""
        del pl_module
        trainer.should_stop = trainer.should_stop or self._is_over

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Count a validation of training; others leave the count alone."""
        super().on_validation_end(trainer, pl_module)
        if trainer.state.fn is TrainerFn.FITTING and self._is_over:
            self.run.telemetry.emit(
                "early_stop",
                {"step": trainer.global_step, "validations_without_improvement": self.wait_count},
            )

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Say in the manifest why training ended."""
        del trainer, pl_module
        self.run.manifest.results["stopped_early"] = self._is_over

    @property
    def _is_over(self) -> bool:
        return bool(self.wait_count >= self.patience)
