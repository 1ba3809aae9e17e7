"""Early stopping of a run that no longer improves."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping
from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule


class EarlyStopping(LightningEarlyStopping):
    """Stops a run after ``patience`` validations without a lower loss, and records it.

    The rule is Lightning's. One behaviour differs: a run that is resumed from the step at which it
    stopped stops there again. Lightning's callback restores its count and continues training.
    """

    def __init__(self, run: RunRecord, patience: int = 3, min_delta: float = 0.0) -> None:
        """Attach to ``run``.

        Args:
            run: the record.
            patience: validations without improvement before the run ends.
            min_delta: minimum decrease of the loss, in nats per token, that counts as an
                improvement.
        """
        super().__init__(
            "val/loss", min_delta=min_delta, patience=patience, check_on_train_epoch_end=False
        )
        self.run = run

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Stop immediately if the checkpoint comes from a run that had stopped early."""
        del pl_module
        trainer.should_stop = trainer.should_stop or self._is_over

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Count a validation during training; other validations do not count."""
        super().on_validation_end(trainer, pl_module)
        trains = trainer.state.fn is TrainerFn.FITTING and not trainer.sanity_checking
        if trains and self._is_over:
            self.run.telemetry.emit(
                "early_stop",
                {"step": trainer.global_step, "validations_without_improvement": self.wait_count},
            )

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record in the manifest why training ended."""
        del trainer, pl_module
        self.run.manifest.results["stopped_early"] = self._is_over

    @property
    def _is_over(self) -> bool:
        return bool(self.wait_count >= self.patience)
