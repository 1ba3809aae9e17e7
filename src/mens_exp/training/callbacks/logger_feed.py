"""Lightning's own loggers, fed."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lightning import Trainer

    from mens_exp.training.module import TrainingModule

__all__ = ["LoggerFeed"]


class LoggerFeed(Callback):
    """Hands the settings and the metrics of every step to the trainer's loggers."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Feed ``settings``, the whole configuration, as hyperparameters."""
        self.settings = dict(_flat(settings))

    def on_fit_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Log the hyperparameters by dotted path."""
        del pl_module
        for logger in trainer.loggers:
            logger.log_hyperparams(self.settings)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the metrics of a finished step."""
        del outputs, batch, batch_idx
        if pl_module.at_step_boundary:
            step, scores = pl_module.scored
            values = pl_module.step_metrics | (scores if step == trainer.global_step else {})
            for logger in trainer.loggers:
                logger.log_metrics(dict(values), step=trainer.global_step)


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Flatten to dotted paths; loggers take plain values, so the rest is spelled out."""
    entries: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict):
            entries += _flat(value, f"{prefix}{name}.")
        else:
            plain = value is None or isinstance(value, bool | int | float | str)
            entries.append(
                (f"{prefix}{name}", value if plain else str(getattr(value, "value", value)))
            )
    return entries
