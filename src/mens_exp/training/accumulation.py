"""One batch against the same documents as micro-batches, through the loop that trains."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning import Trainer
from torch.optim.lr_scheduler import LambdaLR

from mens_exp.data.stream import MicroBatches
from mens_exp.plan.ranks import ALONE
from mens_exp.training.module import TrainingModule
from mens_exp.training.own_signals import keep_signals
from mens_exp.training.started_processes import StartedProcesses

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.config.root import RunConfig
    from mens_exp.rows.encode import Encoded

__all__ = ["Unevenness", "accumulated"]

_MOST_PARAMETERS = 20_000_000  # kept of two gradients; all of any adapter, a part of a whole model


@dataclass(frozen=True, kw_only=True, slots=True)
class Unevenness:
    """The relative difference of micro-batches from the batch, and the size of the comparison."""

    documents: int
    loss: float
    gradient: float
    parameters: int


def accumulated(
    config: RunConfig, module: TrainingModule, documents: Encoded, pad_id: int
) -> Unevenness | None:
    """Take one optimizer step's gradients twice: in one batch, and document by document.

    Args:
        config: the whole configuration.
        module: what trains; it is left alone, its backend and objective are used.
        documents: those to take.
        pad_id: id that fills padding.

    Returns:
        None where there is only one document.
    """
    many = len(documents)
    if many < 2:  # noqa: PLR2004  # one is its own batch
        return None
    whole, parts = (
        _step(config, module, _stream(config, documents, many, size, pad_id)) for size in (many, 1)
    )
    difference = torch.stack(
        [(a - b).norm() for a, b in zip(whole.gradients, parts.gradients, strict=True)]
    ).norm()
    length = torch.stack([one.norm() for one in whole.gradients]).norm()
    return Unevenness(
        documents=many,
        loss=abs(parts.loss - whole.loss) / max(abs(whole.loss), 1e-12),
        gradient=float(difference / length.clamp_min(1e-12)),
        parameters=sum(one.numel() for one in whole.gradients),
    )


def _stream(
    config: RunConfig, documents: Encoded, many: int, size: int, pad_id: int
) -> MicroBatches:
    return MicroBatches(
        documents,
        [[number] for number in range(many)],
        micro_batch_size=size,
        total=many // size,
        seed=None,
        packing=config.data.packing,
        pad_id=pad_id,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    loss: float
    gradients: list[torch.Tensor]


class _Observed(torch.optim.SGD):
    """Lets a look be had at the gradients where others would step."""

    def __init__(self, parameters: list[Any], look: Callable[[], None]) -> None:
        super().__init__(parameters, lr=0.0)
        self.look = look

    def step(self, closure: Any = None) -> Any:
        """Run the passes, look, and change nothing."""
        loss = closure() if closure is not None else None
        self.look()
        return loss


class _Observing(TrainingModule):
    """The training module with an optimizer that changes nothing."""

    loss = float("nan")

    def configure_optimizers(self) -> Any:
        """Keep the gradients of the step, as many as are compared."""
        parameters = [*self.backend.trainable().values()]
        self.gradients: list[torch.Tensor] = []

        def look() -> None:
            left = _MOST_PARAMETERS
            for parameter in sorted(parameters, key=lambda one: one.numel()):
                left -= parameter.numel()
                if left >= 0 and parameter.grad is not None:
                    self.gradients.append(parameter.grad.detach().float().cpu())
            self.loss = self.step_metrics["train/loss"]

        optimizer = _Observed(parameters, look)
        return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, lambda _: 1.0)}


def _step(config: RunConfig, module: TrainingModule, stream: MicroBatches) -> _Step:
    """Take one optimizer step over a stream."""
    observing = _Observing(config, module.backend, module.objective, total_steps=1)
    trainer = Trainer(
        accelerator="cpu" if next(module.parameters()).device.type == "cpu" else "gpu",
        devices=1,
        plugins=[StartedProcesses(ALONE)],
        max_steps=1,
        max_epochs=-1,
        accumulate_grad_batches=stream.total,
        limit_val_batches=0,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
    )
    keep_signals(trainer)
    trainer.fit(observing, stream, stream)  # the second is never read: no batch of it is to be
    return _Step(observing.loss, observing.gradients)
