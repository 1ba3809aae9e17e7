"""Guard against non-finite losses and gradients."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
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

        A norm that is finite proves that its gradient is, so that one number is read from the
        device, whatever the number of gradients.

        Raises:
            TrainingError: one of them is not finite.
        """
        del optimizer
        step = trainer.global_step
        if step % self.check_every_n_steps:
            return
        loss = torch.as_tensor(pl_module.pending_loss)
        named = pl_module.backend.trainable().items()
        gradients = {name: p.grad for name, p in named if p.grad is not None}
        every = list(gradients.values())
        norms = torch._foreach_norm(every) if every else ()  # noqa: SLF001  # as clipping does
        if torch.stack([loss, *(norm.to(loss) for norm in norms)]).isfinite().all():
            return
        for what, value in {"the loss": loss, **gradients}.items():
            if not value.isfinite().all():
                pl_module.refuse_unfinite_base()
                raise _not_finite(what if value is loss else f"the gradient of {what}", step)


def _not_finite(what: str, step: int) -> TrainingError:
    return TrainingError(
        f"{what} is not finite",
        where=f"step {step}",
        expected="finite numbers",
        remedy="lower optim.lr, or resume from the last checkpoint with other settings",
    )
