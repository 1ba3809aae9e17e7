"""The LightningModule: one loss over the whole optimizer step, whatever its micro-batches.

`RunRecord` is what callbacks see of the open run.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LambdaLR

from mens_exp.artifacts.metrics import metric
from mens_exp.config.optim import warmup_steps
from mens_exp.errors import DataError
from mens_exp.tokenizer.load import bits_per_byte
from mens_exp.training.distributed import ShardedBase, averaged
from mens_exp.training.optimizer import build_optimizer, multiplier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Telemetry
    from mens_exp.backends.protocol import Backend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.objective.causal import LossSum, Objective


class RunRecord(Protocol):
    """The record of a run, as long as it is open."""

    @property
    def dir(self) -> RunDir:
        """The run directory."""

    @property
    def telemetry(self) -> Telemetry:
        """The event log."""

    @property
    def manifest(self) -> Manifest:
        """The manifest; changed in place and written by :meth:`save`."""

    def save(self) -> None:
        """Write the manifest."""

    def after_close(self, fn: Callable[[Manifest], None]) -> None:
        """Call ``fn`` with the closed manifest, once it is on disk; its errors are isolated."""


def for_processes(checkpoint: dict[str, Any], world_size: int) -> None:
    """Count a checkpoint's micro-batches as those of one of so many processes, in place.

    Lightning counts what one process has taken, and goes by it where a step ends and where
    validation is due. All processes together have taken the same: a step holds as many
    micro-batches however many processes share them.

    Args:
        checkpoint: saved at the end of an optimizer step; one that says nothing of processes is of
            one.
        world_size: processes that go on.
    """
    saved = checkpoint.get("world_size", 1)
    if saved == world_size:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        for name, value in counts.items():
            counts[name] = value * saved // world_size


class TrainingModule(LightningModule):
    """Train a backend's adapter under an objective.

    The loss of an optimizer step is the sum of token losses over all its micro-batches, divided
    by their supervised tokens: gradients are summed, and scaled once before clipping. Several
    processes sum over all of them, so that metrics and counters are the same on each.
    Training validates after its last step whatever the interval is, so that the adapter it ends
    with has a loss. ``selected`` is the step and validation loss of the adapter in the graph when
    training has ended.
    ``step_metrics`` holds the declared metrics of the current step; callbacks add to it with
    :meth:`record` and the telemetry callback writes it, ``step_digests`` beside it.
    ``scored`` is the step of the latest scorecard of this process, and its metrics; -1 before one.
    ``validated_bytes`` is the text that validation predicts, where that is known and the objective
    is a likelihood; the loss is then told in bits a byte too.
    ``validated`` has a row for each of the ``validation_documents`` documents, [documents, 2] f64:
    its loss (nats, summed) and supervised tokens at the latest validation, both 0 for a document
    that is not validated on. It is None where the objective gives no loss of each token.
    ``selected_validated`` is that of ``selected``.
    """

    strict_loading = False  # a checkpoint holds the adapter alone; the frozen base is rebuilt

    def __init__(
        self, config: RunConfig, backend: Backend, objective: Objective, *, total_steps: int
    ) -> None:
        """Put the pieces together; ``total_steps`` is what the schedule runs over."""
        super().__init__()
        self.config = config
        self.backend = backend
        self.objective = objective
        self.total_steps = total_steps
        self.step_metrics: dict[str, float] = {}
        self.step_digests: dict[str, str] = {}
        self.tokens = 0
        self.supervised_tokens = 0
        self.condition = "tuned"
        self.validation: dict[str, float] = {}
        self.validated_bytes: int | None = None
        self.validation_documents = 0
        self.validated: torch.Tensor | None = None
        self.selected: tuple[int, float] | None = None
        self.selected_validated: torch.Tensor | None = None
        self.scored: tuple[int, dict[str, float]] = (-1, {})
        self._val_documents = torch.zeros(0, 2, dtype=torch.float64)
        self._step_loss = 0.0
        self._step_count = 0
        self._step_tokens = 0

    def cpu(self) -> Self:
        """Stay where the graph is: a trainer that is done would move it off its GPU.

        It goes on there, with the next trainer or with scoring.
        """
        return self

    def configure_model(self) -> None:
        """Do nothing: the graph is whole, or in parts, before the trainer sees it."""

    def record(self, name: str, value: float) -> None:
        """Set a declared metric of the current step."""
        self.step_metrics[metric(name).name] = float(value)

    def on_train_start(self) -> None:
        """Set the rate of the step to come; after a resume to more steps it is another one."""
        optimizer, scheduler = self.trainer.optimizers[0], self.lr_schedulers()
        assert isinstance(scheduler, LambdaLR)
        rate = scheduler.base_lrs[0] * scheduler.lr_lambdas[0](self.trainer.global_step)
        for group in optimizer.param_groups:
            group["lr"] = rate

    def training_step(self, batch: Batch, _batch_idx: int) -> torch.Tensor:
        """Return the micro-batch's loss sum, undone from the divisions that follow.

        Lightning divides by the micro-batches of a step, and several processes' gradients are
        averaged.
        """
        self.backend.begin(batch.index)
        loss = self.objective(self.backend(batch), batch.targets_M, self.backend.head)
        if not batch.is_filler:
            self._step_loss += float(loss.total.detach())
            self._step_count += loss.count
            self._step_tokens += batch.tokens
        stream = self.trainer.train_dataloader
        assert stream is not None, "Lightning is training from it"
        stream.position = batch.index + 1  # what a checkpoint resumes from
        weight = 0 if batch.is_filler else self.trainer.world_size
        return loss.total * (self.trainer.accumulate_grad_batches * weight)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn gradient sums into the gradient of the mean, before clipping.

        Raises:
            DataError: the step held no supervised token.
        """
        if self.trainer.global_step + 1 == self.trainer.max_steps:
            self._validate_after_this_batch()
        step_loss, step_count, step_tokens = self._of_all_processes(
            self._step_loss, self._step_count, self._step_tokens
        )
        self.tokens += int(step_tokens)
        self.supervised_tokens += int(step_count)
        if step_count == 0:
            raise DataError(
                "an optimizer step held no supervised token",
                where="data",
                found=f"step {self.global_step}",
                expected="at least one learned token",
                remedy="look at data.seq_len and at what objective learns",
            )
        gradients = [p.grad for p in self.backend.trainable().values() if p.grad is not None]
        if isinstance(self.trainer.strategy, ShardedBase):
            averaged(gradients)  # which DDP has done by now
        for gradient in gradients:
            gradient.div_(step_count)
        norms = torch._foreach_norm(gradients)  # noqa: SLF001  # the fused form clipping uses
        self.record("train/loss", step_loss / step_count)
        self.record("train/grad_norm", float(torch.linalg.vector_norm(torch.stack(norms))))
        self.record("optim/lr", optimizer.param_groups[0]["lr"])
        self.record("data/tokens", self.tokens)
        self.record("data/supervised_tokens", self.supervised_tokens)
        self._step_loss, self._step_count, self._step_tokens = 0.0, 0, 0

    def _of_all_processes(self, *values: float) -> list[float]:
        """Sum figures over the processes that train together."""
        if self.trainer.world_size == 1:
            return list(values)
        summed = self._summed(torch.tensor(values, dtype=torch.float64))
        return [float(value) for value in summed]

    def _summed(self, figures: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over the processes that train together."""
        if self.trainer.world_size == 1:
            return figures
        # The trainer's device: outside of a fit the module itself may lie on another.
        device = self.trainer.strategy.root_device
        summed = self.trainer.strategy.reduce(figures.to(device), reduce_op="sum")
        assert isinstance(summed, torch.Tensor), "a tensor was given"
        return summed.cpu()

    def _validate_after_this_batch(self) -> None:
        """Make Lightning's rule, every so many micro-batches, hold for the one under way."""
        self.trainer.val_check_batch = self.trainer.fit_loop.total_batch_idx + 1

    @property
    def pending_loss(self) -> float:
        """Loss sum of the optimizer step under way."""
        return self._step_loss

    @property
    def at_step_boundary(self) -> bool:
        """Whether the last micro-batch ended an optimizer step."""
        return self._step_count == 0

    def on_validation_epoch_start(self) -> None:
        """Start a fresh sum."""
        self._val_loss, self._val_count = 0.0, 0
        self._val_documents = torch.zeros(self.validation_documents, 2, dtype=torch.float64)

    def validation_step(self, batch: Batch, _batch_idx: int) -> None:
        """Add a batch to the validation sum."""
        self.backend.begin(batch.index)
        loss = self.objective(self.backend(batch), batch.targets_M, self.backend.head)
        if not batch.is_filler:
            self._val_loss += float(loss.total)
            self._val_count += loss.count
            self._add_to_documents(batch, loss)

    def _add_to_documents(self, batch: Batch, loss: LossSum) -> None:
        """Add the losses of a batch's tokens to those of their documents."""
        if not self.validation_documents:
            return
        if loss.losses_M is None or batch.document_M is None:
            self._val_documents.fill_(math.nan)  # which the sum over all processes carries on
            return
        losses_M = loss.losses_M.double().cpu()
        each_M2 = torch.stack([losses_M, torch.ones_like(losses_M)], dim=1)
        self._val_documents.index_add_(0, batch.document_M.cpu(), each_M2)

    def on_validation_epoch_end(self) -> None:
        """Set the validation loss: the mean over all supervised tokens, in nats."""
        total, count = self._of_all_processes(self._val_loss, self._val_count)
        of_documents = self._summed(self._val_documents)
        is_known = self.validation_documents and not of_documents.isnan().any()
        self.validated = of_documents if is_known else None
        self.validation = {"val/loss": total / count, "val/supervised_tokens": int(count)}
        if self.validated_bytes is not None:
            loss = self.validation["val/loss"]
            per_byte = bits_per_byte(loss, int(count), self.validated_bytes)
            self.validation["val/bits_per_byte"] = per_byte
        self.log("val/loss", self.validation["val/loss"], sync_dist=True)  # equal on all
        if self.trainer.state.fn is TrainerFn.FITTING:
            self.selected = (self.trainer.global_step, self.validation["val/loss"])
            self.selected_validated = self.validated

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Validate the base model inside the block: the adapter is off."""
        self.condition = "base"
        try:
            with self.backend.base_only():
                yield
        finally:
            self.condition = "tuned"

    @contextmanager
    def as_peft_view(self) -> Iterator[None]:
        """Validate, inside the block, what loading the PEFT directory on the base gives."""
        self.condition = "peft_view"
        try:
            with self.backend.as_peft_view():
                yield
        finally:
            self.condition = "tuned"

    def configure_optimizers(self) -> Any:
        """Build the optimizer over the adapter, and its schedule by optimizer step."""
        optimizer = build_optimizer(self.config.optim, [*self.backend.trainable().values()])
        schedule = self.config.schedule
        warmup = warmup_steps(schedule, self.total_steps)
        scheduler = LambdaLR(
            optimizer,
            lambda step: multiplier(
                schedule.kind, step, warmup_steps=warmup, total_steps=self.total_steps
            ),
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the adapter and the counters; leave the frozen base out."""
        adapter = {name: p.detach() for name, p in self.backend.trainable().items()}
        checkpoint["state_dict"] = {}
        checkpoint["adapter"] = adapter
        checkpoint["start"] = self.backend.start_state()
        checkpoint["counters"] = {
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
        }
        checkpoint["selected"] = self.selected
        checkpoint["selected_validated"] = self.selected_validated
        checkpoint["world_size"] = self.trainer.world_size

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Put adapter and counters back; the loops count micro-batches of one process."""
        for_processes(checkpoint, self.trainer.world_size)
        self.backend.load_start_state(checkpoint.get("start", {}))
        parameters = self.backend.trainable()
        with torch.no_grad():
            for name, value in checkpoint["adapter"].items():
                parameters[name].copy_(value)
        self.tokens = checkpoint["counters"]["tokens"]
        self.supervised_tokens = checkpoint["counters"]["supervised_tokens"]
        self.selected = checkpoint["selected"]
        self.selected_validated = checkpoint.get("selected_validated")  # unknown to earlier ones
