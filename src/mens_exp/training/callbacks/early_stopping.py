"""Early stopping of a run that no longer improves."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning.pytorch.callbacks import EarlyStopping as LightningEarlyStopping

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule


class EarlyStopping(LightningEarlyStopping):
    """Stops a run after ``patience`` validations without a lower loss, and records it.

    The rule is Lightning's. Three behaviours differ. Before ``trainer.min_steps`` the rule only
    counts: the run ends at the first later validation at which it holds, and goes on if the loss
    has improved since; Lightning's callback would end it at that step all the same. A run that
    is resumed from the step at which it stopped stops there again; Lightning's callback restores
    its count and continues training. And a loss that is not finite is a validation without
    improvement; Lightning's callback would end the run as if it had converged.
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
            "val/loss",
            min_delta=min_delta,
            patience=patience,
            check_finite=False,
            check_on_train_epoch_end=False,
        )
        self.run = run
        self._has_ended_it = False

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Stop immediately if the checkpoint comes from a run that had stopped early."""
        del pl_module
        if self.wait_count >= self.patience and _may_end(trainer):
            trainer.should_stop = self._has_ended_it = True

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Count a validation during training; other validations do not count."""
        is_asked = trainer.should_stop  # by another callback
        super().on_validation_end(trainer, pl_module)
        if is_asked or not trainer.should_stop:
            return
        trainer.should_stop = _may_end(trainer)
        if trainer.should_stop and not self._has_ended_it:
            self._has_ended_it = True
            self.run.telemetry.emit(
                "early_stop",
                {"step": trainer.global_step, "validations_without_improvement": self.wait_count},
            )

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record in the manifest whether the rule ended training before its last step."""
        del trainer, pl_module
        self.run.manifest.results["stopped_early"] = self._has_ended_it


def _may_end(trainer: Trainer) -> bool:
    """Return whether the rule may end the run at this step: from min_steps, before the last."""
    return (trainer.min_steps or 0) <= trainer.global_step < trainer.max_steps
