"""Guard against non-finite losses and gradients."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

import functools
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
        """Register a check of the step's loss sum and gradient, run once the module has read them.

        A user's class that overrides this hook may read neither; they are checked here then.
        """
        del optimizer
        if trainer.global_step % self.check_every_n_steps:
            return
        check = functools.partial(_check, pl_module, trainer.global_step)
        if type(pl_module).on_before_optimizer_step.__module__.startswith("mens_exp."):
            pl_module.before_update.append(check)
        else:
            check(float(pl_module.pending_loss), math.nan)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Stop if the last step left weights with which the loss is not finite.

        Raises:
            TrainingError: the validation loss of a trained model is not finite.
        """
        loss = pl_module.validation["val/loss"]
        if trainer.global_step and not trainer.sanity_checking and not math.isfinite(loss):
            raise _not_finite("the validation loss", trainer.global_step)


def _check(module: TrainingModule, step: int, loss: float, grad_norm: float) -> None:
    """Check a step's loss sum and every gradient.

    A finite norm proves that the gradient is finite. A non-finite norm proves nothing, because the
    squares of a finite gradient may overflow.

    Raises:
        TrainingError: one of them is not finite.
    """
    if math.isfinite(loss) and math.isfinite(grad_norm):
        return
    named = module.backend.trainable().items()
    gradients = {name: p.grad for name, p in named if p.grad is not None}
    bad = next((name for name, one in gradients.items() if not one.isfinite().all()), None)
    if math.isfinite(loss) and bad is None:
        return
    module.refuse_unfinite_base()
    raise _not_finite(f"the gradient of {bad}" if math.isfinite(loss) else "the loss", step)


def _not_finite(what: str, step: int) -> TrainingError:
    return TrainingError(
        f"{what} is not finite",
        where=f"step {step}",
        expected="finite numbers",
        remedy="lower optim.lr, or resume from the last checkpoint with other settings",
    )
