"""The learning-rate range test: its end, and the rate that it proposes.

Source: Smith 2015, arXiv:1506.01186, section 3.3. Like fastai's and Lightning's finders, it smooths
the steps by an exponential moving average; like fastai, it proposes a tenth of the rate at which
the average is lowest. It smooths the loss minus that of the frozen base on the same tokens, because
batches differ more from each other than a model does over a few steps.
"""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

import torch
from lightning import Callback

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lightning import Trainer

    from mens_exp.data.batch import Batch
    from mens_exp.training.module import RunRecord, TrainingModule

_KEEP = 0.9  # decay of the moving average per step
_SHARE = 10.0  # the rate with the lowest loss over the proposed one
_FEWEST = 5  # steps of a test that can propose a rate


class LrRangeResult(TypedDict):
    """The outcome of a range test, ``results.lr_range`` of the manifest.

    Attributes:
        proposed: the rate to train with; None if the test shows none.
        lowest_at: the rate at which the smoothed change was lowest; None before any step.
        from_rate: the rate of the first step.
        to_rate: the rate of the last step.
        smoothed: the smoothed change of each step: loss less that of the base, in nats a token.
        diverged: whether the test ended because the loss diverged.
        why_none: the reason why no rate is proposed; None if one is.
    """

    proposed: float | None
    lowest_at: float | None
    from_rate: float | None
    to_rate: float | None
    smoothed: list[float]
    diverged: bool
    why_none: str | None


class LrRange(Callback):
    """Ends a range test when the loss diverges, and records what it shows."""

    def __init__(self, run: RunRecord, divergence: float = 4.0) -> None:
        """Attach to ``run``.

        Args:
            run: the record.
            divergence: multiple of the lowest smoothed loss above which the test ends.
        """
        self.run, self.divergence = run, divergence
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.base_losses: list[float] = []
        self._sums = torch.zeros(2, dtype=torch.float64)  # of the base's losses, and their count

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Stop at once if a resumed test had diverged."""
        del pl_module
        trainer.should_stop = trainer.should_stop or self._has_diverged

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Batch, batch_idx: int
    ) -> None:
        """Compute the base's loss on a micro-batch, before the model trains on it."""
        del trainer, batch_idx
        if batch.is_filler:
            return
        # Without gradients, objectives would return the plain loss of validation.
        with torch.enable_grad(), pl_module.as_base():
            loss = pl_module.passed(batch)[1]
        total = loss.total.detach()
        count = torch.full_like(total, loss.count)
        self._sums = self._sums.to(total.device) + torch.stack([total, count]).double()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, *_: Any, **__: Any
    ) -> None:
        """Add a step, and request a stop if the loss diverges."""
        if not pl_module.at_step_boundary:
            return
        self.rates.append(pl_module.step_metrics["optim/lr"])
        self.losses.append(pl_module.step_metrics["train/loss"])
        total, count = trainer.strategy.reduce(self._sums, reduce_op="sum").tolist()
        self._sums = torch.zeros(2, dtype=torch.float64)
        self.base_losses.append(total / count)
        pl_module.record("train/base_loss", self.base_losses[-1])
        trainer.should_stop = trainer.should_stop or self._has_diverged

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record the proposal."""
        del trainer, pl_module
        steps = self.rates, self.losses, self.base_losses
        found = proposal(*steps, diverged=self._has_diverged)
        self.run.manifest.results["lr_range"] = found

    def state_dict(self) -> dict[str, Any]:
        """Return the steps so far, for checkpoints."""
        return {"rates": self.rates, "losses": self.losses, "base_losses": self.base_losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the steps before a checkpoint."""
        self.rates, self.losses = [*state_dict["rates"]], [*state_dict["losses"]]
        self.base_losses = [*state_dict["base_losses"]]

    @property
    def _has_diverged(self) -> bool:
        smoothed = _smoothed(self.losses)
        return bool(smoothed) and smoothed[-1] > self.divergence * min(smoothed)


def proposal(
    rates: Sequence[float],
    losses: Sequence[float],
    base_losses: Sequence[float],
    *,
    diverged: bool,
) -> LrRangeResult:
    """Propose a learning rate from the steps of a range test.

    Args:
        rates: the rate of each step, ascending.
        losses: the loss of each step, in nats a token.
        base_losses: the base's loss on the same tokens.
        diverged: whether the test ended because the loss diverged.
    """
    smoothed = _smoothed([one - base for one, base in zip(losses, base_losses, strict=True)])
    lowest = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
    why_none = None
    if len(smoothed) < _FEWEST:
        why_none = f"it has {len(smoothed)} steps; {_FEWEST} are the fewest"
    elif smoothed[lowest] >= 0:
        why_none = "no rate made the loss lower than the base's; take more steps"
    elif lowest == len(smoothed) - 1:
        why_none = "the loss still fell at the highest rate: raise schedule.highest"
    return {
        "proposed": None if why_none else rates[lowest] / _SHARE,
        "lowest_at": rates[lowest] if smoothed else None,
        "from_rate": rates[0] if rates else None,
        "to_rate": rates[-1] if rates else None,
        "smoothed": smoothed,
        "diverged": diverged,
        "why_none": why_none,
    }


def _smoothed(losses: Sequence[float]) -> list[float]:
    """Return the exponential moving average, corrected for its start."""
    found, total, weight = [], 0.0, 0.0
    for loss in losses:
        total, weight = _KEEP * total + loss, _KEEP * weight + 1
        found.append(total / weight)
    return found
