"""The LightningModule: one loss over the whole optimizer step, whatever its micro-batches.

`RunRecord` is the interface of the open run to the callbacks.
"""

from __future__ import annotations

import math
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

import torch
from lightning import LightningModule
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim.lr_scheduler import LambdaLR

from mens_exp.artifacts.metrics import step_metric
from mens_exp.errors import DataError, TrainingError
from mens_exp.layout.modules import linear_weights
from mens_exp.layout.shape import shape_of
from mens_exp.objective.causal import Objective, OverTokens, Passed
from mens_exp.quant.binding import loaded_bindings
from mens_exp.tokenizer.load import bits_per_byte
from mens_exp.training.distributed import ShardedBase, averaged
from mens_exp.training.optimizer import build_optimizer, build_scheduler, switch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Telemetry
    from mens_exp.backends.frozen_base import Teacher
    from mens_exp.backends.protocol import Backend
    from mens_exp.backends.qlora import QloraBackend
    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.objective.causal import LossSum, TokenLoss
    from mens_exp.objective.distillation import KnownTeachers
    from mens_exp.objective.groups import SampledSide
    from mens_exp.objective.preference import KnownReference
    from mens_exp.training.adalora import RankAllocation


class RunRecord(Protocol):
    """The record of an open run."""

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
    """Convert a checkpoint's micro-batch counts to a number of processes, in place.

    Lightning counts the micro-batches of one process, and uses the count to decide where a step
    ends and when validation is due. The total over all processes is fixed: a step has the same
    number of micro-batches however many processes share them. A checkpoint that is saved while the
    last micro-batch is being ended does not count it as completed; Lightning recognizes that by a
    difference of one, which is one for any number of processes.

    Args:
        checkpoint: a checkpoint from the end of an optimizer step; if it records no number of
            processes, it is from one.
        world_size: number of processes that resume.
    """
    saved = checkpoint.get("world_size", 1)
    if saved == world_size:
        return
    progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
    for counts in (progress["current"], progress["total"]):
        taken = counts["ready"]
        for name, value in counts.items():
            counts[name] = taken * saved // world_size - (taken - value)


@dataclass(frozen=True, slots=True)
class _Read:
    """Sums over all processes, read from the device, and means of metrics; see `_Sums`."""

    loss: float
    count: float
    supervised: float
    tokens: float
    metrics: dict[str, float]
    grad_norm: float = math.nan


@dataclass(slots=True)
class _Sums:
    """The sums of an optimizer step, or of a validation.

    ``count`` is the number of units that the loss sums over, ``supervised`` that of tokens with a
    label, ``tokens`` that of all tokens without padding. Values computed on a device stay there,
    because reading them would wait for the device.
    """

    loss: float | torch.Tensor = 0.0
    count: float = 0
    supervised: float = 0
    tokens: float = 0
    metrics: dict[str, float | torch.Tensor] = field(default_factory=dict)
    counts: dict[str, float | torch.Tensor] = field(default_factory=dict)

    def add(self, batch: Batch, loss: LossSum) -> None:
        """Add a micro-batch."""
        self.loss += loss.total.detach().double()
        self.count += loss.count
        self.supervised += batch.targets_M.numel()
        self.tokens += batch.tokens
        for name, value in loss.metrics.items():
            self.metrics[name] = self.metrics.get(name, 0.0) + value.detach().double()
            self.counts[name] = self.counts.get(name, 0.0) + loss.counts.get(name, loss.count)

    def figures(self, names: Sequence[str]) -> torch.Tensor:
        """Return the sums in a fixed order, f64 ``[4 + 2 · names]``, on the device of the loss."""
        metrics, counts = (
            [sums.get(name, 0.0) for name in names] for sums in (self.metrics, self.counts)
        )
        device = self.loss.device if isinstance(self.loss, torch.Tensor) else None
        every = [self.loss, self.count, self.supervised, self.tokens, *metrics, *counts]
        return torch.stack(
            [
                one.to(device, torch.float64)
                if isinstance(one, torch.Tensor)
                else torch.full((), one, dtype=torch.float64, device=device)
                for one in every
            ]
        )


def _unfinite_base(weight: str) -> TrainingError:
    return TrainingError(
        "the base model's weights are not finite",
        where=weight,
        expected="finite numbers",
        remedy="download or convert the base model again: its file is damaged or wrong",
    )


class TrainingModule(LightningModule):
    """Train a backend's adapter under an objective.

    The loss of an optimizer step is the sum of token losses over all its micro-batches, divided by
    their supervised tokens: gradients are summed, and scaled once before clipping. Sums run over
    all processes, so that metrics and counters are the same on each. Training always validates
    after its last step, whatever the interval, so that the final adapter has a loss.

    Attributes:
        selected: step and validation loss of the adapter in the model at the end of training.
        step_metrics: declared metrics of the current step; callbacks add to it with :meth:`record`,
            and the telemetry callback writes it together with ``step_digests``.
        before_update: checks of the step's loss sum and gradient norm, called before the update.
        known_reference: log-likelihoods under the base, if computed before training.
        known_answers: values of sampled training and validation answers, for group objectives.
        teacher: the teacher model; ``known_teachers`` has its top tokens, if precomputed.
        scored: step of the latest scorecard of this process (-1 before the first), and its metrics.
        validated_bytes: size of the text that validation predicts, if known and the objective is a
            likelihood; the loss is then also reported in bits per byte.
        validated: summed loss (nats) and supervised tokens of each of the ``validation_documents``
            documents at the latest validation, f64 ``[documents, 2]``, 0 for documents left out;
            None if the objective gives no per-token loss. ``selected_validated``: for ``selected``.
    """

    strict_loading = False  # a checkpoint holds only the adapter; the frozen base is rebuilt

    def __init__(
        self,
        config: RunConfig,
        backend: Backend,
        objective: Objective | TokenLoss,
        *,
        total_steps: int,
    ) -> None:
        """Combine the parts; ``total_steps`` is the length of the schedule."""
        super().__init__()
        self.begin(config, backend, objective, total_steps=total_steps)

    def begin(
        self,
        config: RunConfig,
        backend: Backend,
        objective: Objective | TokenLoss,
        *,
        total_steps: int,
    ) -> None:
        """Set the parts and the counters, apart from Lightning's own."""
        self.config = config
        self.backend = backend
        self.objective = objective if isinstance(objective, Objective) else OverTokens(objective)
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
        self.before_update: list[Callable[[float, float], None]] = []
        self.known_reference: KnownReference | None = None
        self.known_answers: tuple[SampledSide, SampledSide] | None = None
        self.teacher: Teacher | None = None
        self.known_teachers: KnownTeachers | None = None
        self.is_probed = False
        self.ranks: RankAllocation | None = None
        self._step = _Sums()
        self._val = _Sums()

    def cpu(self) -> Self:
        """Do nothing: a finished trainer would move the model off its GPU.

        The model is used there again, by the next trainer or by scoring.
        """
        return self

    def configure_model(self) -> None:
        """Do nothing: the model is complete, or sharded, before the trainer receives it."""

    def record(self, name: str, value: float) -> None:
        """Set a metric of the current step: one of ours, or one of the user's own.

        Raises:
            RequestError: a user's metric has no area in its name, or is a misspelling of ours.
        """
        self.step_metrics[step_metric(name).name] = float(value)

    def on_train_start(self) -> None:
        """Set the learning rate of the next step; it changes after a resume with more steps."""
        optimizer, scheduler = self.trainer.optimizers[0], self.lr_schedulers()
        if not isinstance(scheduler, LambdaLR):
            return  # a user's class, whose own state was restored
        step = self.trainer.global_step
        rates = zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
        for group, (peak, multiple) in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * multiple(step)

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        """Return the micro-batch's loss sum, scaled to cancel the divisions that follow.

        Lightning divides by the number of micro-batches of a step, and gradients are averaged over
        processes.
        """
        switch(self.trainer.optimizers, learns=True)
        loss = self.training_loss(batch, batch_idx)
        if not batch.is_filler:
            self._step.add(batch, loss)
        stream = self.trainer.train_dataloader
        assert stream is not None, "Lightning is training from it"
        stream.position = batch.index + 1  # a checkpoint resumes from here
        weight = 0 if batch.is_filler else self.trainer.world_size
        return loss.total * (self.trainer.accumulate_grad_batches * weight)

    def on_after_backward(self) -> None:
        """Restore averaged weights, if the optimizer computes gradients at another point."""
        switch(self.trainer.optimizers, learns=False)

    def training_loss(self, batch: Batch, batch_idx: int) -> LossSum:
        """Return the loss of a micro-batch that is trained on."""
        del batch_idx
        return self.passed(batch)[1]

    def passed(self, batch: Batch) -> tuple[Passed, LossSum]:
        """Pass a micro-batch through the model, and return its loss."""
        self.backend.begin(batch.index)
        reference, logp_S, sampled = None, None, None
        if self.known_answers is not None:
            sampled = self.known_answers[not self.training].of(batch)
        elif self.config.objective.spec.needs_reference:
            logp_S = self._precomputed(batch)
            reference = self.of_base(batch) if logp_S is None else None
        top_tokens = None
        if self.teacher is not None:
            reference = self.teacher.passed(batch)
        elif self.known_teachers is not None:
            top_tokens = self.known_teachers.side(
                is_probed=self.is_probed, trains=self.training
            ).of(batch)
        hidden_MD, layers = self._hidden(batch)
        passed = Passed(
            batch,
            hidden_MD,
            self.backend.head,
            reference=reference,
            reference_logp_S=logp_S,
            sampled=sampled,
            top_tokens=top_tokens,
            layers=layers,
            fused_head=getattr(self.backend, "fused_head", None),
        )
        return passed, self.objective.loss(passed)

    def _hidden(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Return the model's states, and those after the layers compared with the teacher's."""
        if self.teacher is None or not self.teacher.matched:
            return self.backend(batch), ()
        backend = cast("QloraBackend", self.backend)  # others have no teacher
        return backend.layer_states(batch, [ours for ours, _ in self.teacher.matched])

    def _precomputed(self, batch: Batch) -> torch.Tensor | None:
        """Return the log-likelihood of each document under the base, if it is known.

        The PEFT view may compute the base differently, so it needs a pass.
        """
        if self.known_reference is None or self.condition == "peft_view":
            return None
        return self.known_reference.of(batch, trains=self.training)

    def of_base(self, batch: Batch) -> Passed:
        """Pass a micro-batch through the base alone; the returned head is the base's, too."""
        is_base = self.condition == "base"  # inside `as_base`, which a nested block would end

        def alone() -> AbstractContextManager[None]:
            return nullcontext() if is_base else self.backend.base_only()

        def head(hidden_CD: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), alone():
                return self.backend.head(hidden_CD)

        with torch.no_grad(), alone():
            return Passed(batch, self.backend(batch), head)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn gradient sums into the gradient of the mean, before clipping.

        All figures of the step are read from the device at once.

        Raises:
            DataError: the step has no supervised token.
        """
        if self.trainer.global_step + 1 == self.trainer.max_steps:
            self._validate_after_this_batch()
        checks, self.before_update = self.before_update, []
        figures = self._summed(self._step.figures(self._metric_names))
        gradients = [p.grad for p in self.trained() if p.grad is not None]
        if isinstance(self.trainer.strategy, ShardedBase):
            averaged(gradients)  # DDP has done this already
        # A Python number if known, because reading one would wait for the device.
        count = float(self._step.count) if self.trainer.world_size == 1 else figures[1]
        for gradient in gradients:
            gradient.div_(count)
        if self.ranks is not None:
            self.ranks.pull()
            gradients = [p.grad for p in self.trained() if p.grad is not None]
        norms = torch._foreach_norm(gradients)  # noqa: SLF001  # the fused form that clipping uses
        norm = torch.linalg.vector_norm(torch.stack(norms))
        step = self._read(torch.cat([figures, norm.to(figures)[None]]))
        if step.count == 0:
            raise DataError(
                "an optimizer step held no supervised token",
                where="data",
                found=f"step {self.global_step}",
                expected="at least one learned token",
                remedy="check data.seq_len and which tokens the objective learns",
            )
        for check in checks:
            check(step.loss, step.grad_norm)
        self.tokens += int(step.tokens)
        self.supervised_tokens += int(step.supervised)
        self.record("train/loss", step.loss / step.count)
        for name, value in step.metrics.items():
            self.record(f"train/{name}", value)
        self.record("train/grad_norm", step.grad_norm)
        group = optimizer.param_groups[0]
        self.record("optim/lr", group["lr"] * group.get("d", 1.0))  # Prodigy's estimate
        self.record("data/tokens", self.tokens)
        self.record("data/supervised_tokens", self.supervised_tokens)
        self._step = _Sums()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Take a step, then let AdaLoRA zero ranks, before anything reads the weights."""
        super().optimizer_step(*args, **kwargs)
        if self.ranks is not None:
            self.ranks.update(self.trainer.global_step)

    def trained(self) -> list[torch.nn.Parameter]:
        """Return the parameters that a step changes."""
        return [*self.backend.trainable().values()]

    def refuse_unfinite(self, *losses: float | None) -> None:
        """Refuse a model that gives losses that are not finite before it is trained.

        Raises:
            TrainingError: one of them is not finite.
        """
        if all(loss is None or math.isfinite(loss) for loss in losses):
            return
        self.refuse_unfinite_base()
        raise TrainingError(
            "a loss of the model is not finite before its first step",
            where="model",
            expected="finite numbers",
            remedy="set quant.compute_dtype=f32, or choose another base model",
        )

    def refuse_unfinite_base(self) -> None:
        """Refuse a base model whose frozen weights are not finite.

        Raises:
            TrainingError: one of them is not finite.
        """
        for name, parameter in self.named_parameters():
            is_wide = parameter.is_floating_point() and parameter.itemsize > 1  # no packed weights
            if is_wide and not parameter.requires_grad and not parameter.isfinite().all():
                raise _unfinite_base(name)
        for name, layer in self.named_modules():
            holder = next((one for one in loaded_bindings() if one.holds(layer)), None)
            if holder is not None and not holder.dequantized(layer).isfinite().all():
                raise _unfinite_base(f"{name}.weight")

    @property
    def _metric_names(self) -> list[str]:
        return [one.name for one in self.config.objective.spec.metrics]

    def _read(self, figures: torch.Tensor) -> _Read:
        """Read sums over all processes, and the norm that may follow them, from the device."""
        names = self._metric_names
        loss, count, supervised, tokens, *rest = figures.cpu().tolist()
        totals, numbers, norm = (
            rest[: len(names)],
            rest[len(names) : 2 * len(names)],
            rest[2 * len(names) :],
        )
        each = zip(names, totals, numbers, strict=True)
        means = {name: total / number for name, total, number in each if number}
        return _Read(loss, count, supervised, tokens, means, *norm)

    def _summed(self, figures: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all processes, on the device that they compute on."""
        if self.trainer.world_size == 1:
            return figures
        # Use the trainer's device: outside a fit, the module itself may be on another.
        device = self.trainer.strategy.root_device
        summed = self.trainer.strategy.reduce(figures.to(device), reduce_op="sum")
        assert isinstance(summed, torch.Tensor), "a tensor was given"
        return summed

    def _validate_after_this_batch(self) -> None:
        """Make Lightning's interval rule apply to the current micro-batch."""
        self.trainer.val_check_batch = self.trainer.fit_loop.total_batch_idx + 1

    @property
    def pending_loss(self) -> float | torch.Tensor:
        """Loss sum of the current optimizer step, on its device."""
        return self._step.loss

    @property
    def at_step_boundary(self) -> bool:
        """Whether the last micro-batch ended an optimizer step."""
        return self._step.count == 0

    def on_validation_epoch_start(self) -> None:
        """Reset the validation sums."""
        self._val = _Sums()
        self._val_documents = torch.zeros(self.validation_documents, 2, dtype=torch.float64)

    def validation_step(self, batch: Batch, _batch_idx: int) -> None:
        """Add a batch to the validation sum."""
        _, loss = self.passed(batch)
        if not batch.is_filler:
            self._val.add(batch, loss)
            self._add_to_documents(batch, loss)

    def _add_to_documents(self, batch: Batch, loss: LossSum) -> None:
        """Add a batch's token losses to the sums of their documents."""
        if not self.validation_documents:
            return
        if loss.losses_M is None or batch.document_M is None:
            self._val_documents.fill_(math.nan)  # the sum over all processes keeps it
            return
        losses_M = loss.losses_M.double().cpu()
        each_M2 = torch.stack([losses_M, torch.ones_like(losses_M)], dim=1)
        self._val_documents.index_add_(0, batch.document_M.cpu(), each_M2)

    def on_validation_epoch_end(self) -> None:
        """Set the validation loss: the mean over all that is counted, such as tokens, in nats."""
        found = self._read(self._summed(self._val.figures(self._metric_names)))
        of_documents = self._summed(self._val_documents).cpu()
        is_known = self.validation_documents and not of_documents.isnan().any()
        self.validated = of_documents if is_known else None
        self.validation = {
            "val/loss": found.loss / found.count,
            "val/supervised_tokens": int(found.supervised),
            **{f"val/{name}": value for name, value in found.metrics.items()},
        }
        if self.validated_bytes is not None:
            loss = self.validation["val/loss"]
            per_byte = bits_per_byte(loss, int(found.supervised), self.validated_bytes)
            self.validation["val/bits_per_byte"] = per_byte
        # For callbacks that monitor one; equal on all processes. Loggers get them from telemetry.
        counted = "val/supervised_tokens"
        shown = {name: value for name, value in self.validation.items() if name != counted}
        self.log_dict(shown, sync_dist=True, logger=False)
        if self.trainer.state.fn is TrainerFn.FITTING and not self.trainer.sanity_checking:
            self.selected = (self.trainer.global_step, self.validation["val/loss"])
            self.selected_validated = self.validated

    @contextmanager
    def as_probed(self) -> Iterator[None]:
        """Treat micro-batches inside the block as the probe's short documents."""
        self.is_probed = True
        try:
            yield
        finally:
            self.is_probed = False

    @contextmanager
    def as_base(self) -> Iterator[None]:
        """Disable the adapter inside the block, to validate the base model."""
        self.condition = "base"
        try:
            with self.backend.base_only():
                yield
        finally:
            self.condition = "tuned"

    @contextmanager
    def as_peft_view(self) -> Iterator[None]:
        """Behave, inside the block, like the PEFT directory loaded on the base."""
        self.condition = "peft_view"
        try:
            with self.backend.as_peft_view():
                yield
        finally:
            self.condition = "tuned"

    def configure_optimizers(self) -> Any:
        """Build the optimizer over the adapter, and its schedule per optimizer step."""
        names = {id(parameter): name for name, parameter in self.backend.trainable().items()}
        named = {names.get(id(one), f"added.{n}"): one for n, one in enumerate(self.trained())}
        optimizer = build_optimizer(
            self.config.optim,
            named,
            linear=linear_weights(shape_of(self.config.model)).keys() & named.keys(),
            seed=self.config.seed,
        )
        schedule = self.config.schedule
        scheduler = build_scheduler(schedule, optimizer, total_steps=self.total_steps)
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
        if self.ranks is not None:
            checkpoint["ranks"] = self.ranks.state_dict()
        checkpoint["selected"] = self.selected
        checkpoint["selected_validated"] = self.selected_validated
        checkpoint["world_size"] = self.trainer.world_size

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore adapter and counters; Lightning's loops count micro-batches per process."""
        for_processes(checkpoint, self.trainer.world_size)
        self.backend.load_start_state(checkpoint.get("start", {}))
        parameters = self.backend.trainable()
        with torch.no_grad():
            for name, value in checkpoint["adapter"].items():
                parameters[name].copy_(value)
        if self.ranks is not None:
            self.ranks.load_state_dict(checkpoint["ranks"])
        self.tokens = checkpoint["counters"]["tokens"]
        self.supervised_tokens = checkpoint["counters"]["supervised_tokens"]
        self.selected = checkpoint["selected"]
        self.selected_validated = checkpoint.get("selected_validated")  # absent from older ones
