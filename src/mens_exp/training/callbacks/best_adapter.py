"""The adapter of the lowest validation loss."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback
from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import TrainingModule
    from mens_exp.training.record import RunRecord

__all__ = ["BestAdapter"]


class BestAdapter(Callback):
    """Keeps the adapter of the lowest validation loss, and puts it back when training has ended.

    It lies in every checkpoint, so that a killed run loses nothing: a file beside them could
    already hold what the resumed attempt has yet to see.
    """

    def __init__(self, run: RunRecord) -> None:
        """Listen for ``run``."""
        self.run = run
        self.step: int | None = None
        self.loss: float | None = None
        self._adapter: dict[str, torch.Tensor] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Keep the adapter when its loss is the lowest so far; of equals, the earliest stays."""
        if trainer.state.fn is not TrainerFn.FITTING:
            return
        loss = pl_module.validation["val/loss"]
        if self.loss is None or loss < self.loss:
            self.step, self.loss = trainer.global_step, loss
            self._adapter = {
                name: parameter.detach().to("cpu", copy=True)
                for name, parameter in pl_module.backend.trainable().items()
            }

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Put the best adapter into the graph; whoever writes the adapter comes after this."""
        del trainer
        if self.step is None or self.loss is None:
            return
        with torch.no_grad():
            for name, parameter in pl_module.backend.trainable().items():
                parameter.copy_(self._adapter[name])
        pl_module.selected = (self.step, self.loss)

    def state_dict(self) -> dict[str, Any]:
        """Return the best adapter and what is known of it."""
        return {"step": self.step, "loss": self.loss, "adapter": self._adapter}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from what another process found."""
        self.step, self.loss = state_dict["step"], state_dict["loss"]
        self._adapter = state_dict["adapter"]
