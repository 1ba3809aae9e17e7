"""The first steps of a training, each handed to whoever wants to look at it."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning import Callback

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning import Trainer

    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.training.module import TrainingModule

    Look = Callable[[int, dict[str, Any], dict[int, dict[str, Any]]], bool]

__all__ = ["fit_first_steps"]


class _Watch(Callback):
    """Shows every finished step, and ends training as soon as there is nothing more to see."""

    def __init__(self, look: Look) -> None:
        self.look = look

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the figures of the step, and the optimizer's state after it."""
        del outputs, batch, batch_idx
        if pl_module.at_step_boundary:
            figures = {**pl_module.step_metrics, **pl_module.step_digests}
            state = trainer.optimizers[0].state_dict()["state"]
            trainer.should_stop = not self.look(trainer.global_step, figures, state)


def fit_first_steps(
    trainer: Trainer, module: TrainingModule, data: RowsDataModule, look: Look
) -> None:
    """Train without validating, under the whole run's schedule, until told to stop.

    Args:
        trainer: built for the whole run.
        module: likewise.
        data: its rows.
        look: called after each optimizer step with its number, its figures by their names in
            telemetry, and the optimizer's state by number of the parameter and name; returns
            whether to go on.
    """
    trainer.limit_val_batches = 0
    trainer.callbacks.append(_Watch(look))  # type: ignore[attr-defined]  # Lightning adds it
    trainer.fit(module, data)
