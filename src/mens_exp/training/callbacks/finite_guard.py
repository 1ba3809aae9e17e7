"""Guard against non-finite losses and gradients."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from lightning import Callback

from mens_exp.errors import TrainingError

if TYPE_CHECKING:
    from lightning import Trainer
    from torch.optim import Optimizer

    from mens_exp.training.module import RunRecord, TrainingModule


class FiniteGuard(Callback):
    """Stops the run at a non-finite loss or gradient, before the step is taken."""

    def __init__(self, run: RunRecord, check_every_n_steps: int = 1) -> None:
        """Check every ``check_every_n_steps`` optimizer steps."""
        self.run = run
        self.check_every_n_steps = check_every_n_steps

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer
    ) -> None:
        """Check the step's loss sum and every gradient.

        Raises:
            TrainingError: one of them is not finite.
        """
        del optimizer
        step = trainer.global_step
        if step % self.check_every_n_steps:
            return
        if not math.isfinite(pl_module.pending_loss):
            pl_module.refuse_unfinite_base()
            raise _not_finite("the loss", step)
        for name, parameter in pl_module.backend.trainable().items():
            if parameter.grad is not None and not parameter.grad.isfinite().all():
                pl_module.refuse_unfinite_base()
                raise _not_finite(f"the gradient of {name}", step)


def _not_finite(what: str, step: int) -> TrainingError:
    return TrainingError(
        f"{what} is not finite",
        where=f"step {step}",
        expected="finite numbers",
        remedy="lower optim.lr, or resume from the last checkpoint with other settings",
    )
