"""Probe part of the data contract: tests packing, labels and accumulation on the run's model.

A few short documents from the first batches are enough for most errors, which affect all documents.
Others depend on the lengths of documents and batch, so the first micro-batch is also compared as a
whole with its documents processed separately. The losses are those of training and the gradients
those that the optimizer would get, but no step is taken, and the model and the random generators
are left unchanged. The accumulation check compares one batch with the same documents as
micro-batches, using the training loop itself.
"""

from __future__ import annotations

import dataclasses
import random
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from lightning import Trainer
from torch.optim.lr_scheduler import LambdaLR

from mens_exp.backends.qlora import QloraBackend
from mens_exp.backends.reference import agreement, f32_bytes
from mens_exp.data.batch import Batch, packed_batch, padded_batch
from mens_exp.data.batch_documents import short_documents, units_of, whole_documents
from mens_exp.data.stream import MicroBatches
from mens_exp.lora.keyed import EmbeddingNoise, KeyedDropout
from mens_exp.planning.machine import ALONE, look
from mens_exp.quant.layers import quantizes_inputs
from mens_exp.rows.documents import Encoded, share_prompts
from mens_exp.training.distributed import StartedProcesses, keep_signals
from mens_exp.training.module import TrainingModule

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mens_exp.artifacts.data_contract import ProbePart, ReferencePart
    from mens_exp.config.root import RunConfig
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.objective.causal import LossSum

# Modules that are random in training; torch's base class of dropout has no public name.
_RANDOM = (EmbeddingNoise, KeyedDropout, torch.nn.modules.dropout._DropoutNd)  # noqa: SLF001


@contextmanager
def preserve_state(model: torch.nn.Module) -> Iterator[None]:
    """Disable dropout and noise inside the block, and restore the state of the model afterwards.

    The mode of every module, the gradients, and the generators of torch, NumPy and Python are
    restored. Modules other than dropout keep their mode, so that passes match training: with
    AVX512-BF16, a pass in evaluation mode without gradients would corrupt 4-bit layers (DESIGN.md).
    """
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    deterministic = torch.are_deterministic_algorithms_enabled()
    drawn, shuffled = random.getstate(), np.random.get_state()  # noqa: NPY002  # kept, not used
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            for parameter in gradients:
                parameter.grad = None  # or passes would add to the saved ones
            for module in modes:
                if isinstance(module, _RANDOM):
                    module.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            torch.use_deterministic_algorithms(deterministic)
            random.setstate(drawn)
            np.random.set_state(shuffled)  # noqa: NPY002


Reference: TypeAlias = "tuple[ReferencePart | None, str | None]"


# Relative differences caused by rounding; see `_tolerance`.
_TOLERANCES = {"f32": 1e-3, "bf16": 0.05, "f16": 0.05}
# For loss and gradient against plain transformers, in f32. Measured: at most 1e-6 each in every
# family that trains (docs/measured/families.md); logits off by 2 % move SmolLM2's by 3e-3 and 4e-2.
_REFERENCE, _REFERENCE_INT8 = (1e-5, 1e-4), (0.05, 0.2)
_BATCHES = 8  # micro-batches that documents are taken from
_REFERENCE_TOKENS = 256  # of a micro-batch compared with transformers; as many as those have
_MULTIPLE = 32  # tokens; gives shapes like those of training


def probe(
    config: RunConfig,
    module: TrainingModule,
    data: RowsDataModule,
    reference: Reference | None = None,
) -> ProbePart:
    """Probe a run's model with documents of its first batches.

    Args:
        config: the whole configuration.
        module: the module to be trained; it is left unchanged.
        data: the rows.
        reference: the result of `compare` for the same model; None compares now.

    Raises:
        TrainingError: the model gives numbers that are not finite.
    """
    began = time.monotonic()
    batches = _first_batches(data)
    first = batches[0]
    targets_follow = all(map(_targets_follow, batches))
    with preserve_state(module), module.as_probed():
        trial = _trial(module, data, batches)
        together_loss, together_hidden = trial.together()
        whole_hidden, whole_gradient = None, None
        if targets_follow:  # otherwise, supervised tokens do not tell where a document ends
            documents = whole_documents(first, trial.documents.together)
            whole_hidden, whole_gradient = trial.whole(first, _sharing(data, documents))
        peek = trial.peek()
        uneven = accumulated(config, module, trial.documents, data.tokenizer.pad_id)
        module.zero_grad(set_to_none=True)
        compared, why_not = _reference(module, trial, first) if reference is None else reference
    module.refuse_unfinite(
        together_loss,
        together_hidden,
        whole_hidden,
        whole_gradient,
        peek,
        *((uneven.loss, uneven.gradient) if uneven else ()),
        *((compared["loss"], compared["gradient"]) if compared else ()),
    )
    apart = [one for one in (together_hidden, whole_hidden) if one is not None]
    return {
        "documents": len(trial.documents),
        "tokens": len(trial.documents.ids),
        "packed": config.data.packing,
        "dropout": "off while probing",
        "tolerance": _tolerance(config),
        "targets_follow": targets_follow,
        "as_asked": _otherwise(config, first, trial.documents.together),
        "together_loss": together_loss,
        "together_hidden": max(apart, default=None),
        "together_gradient": whole_gradient,
        "peek": peek,
        "accumulation_documents": uneven.documents if uneven else None,
        "accumulation_loss": uneven.loss if uneven else None,
        "accumulation_gradient": uneven.gradient if uneven else None,
        "parameters_compared": uneven.parameters if uneven else None,
        "reference": compared,
        "reference_unknown": why_not,
        "seconds": round(time.monotonic() - began, 3),
    }


def compare(module: TrainingModule, data: RowsDataModule) -> Reference:
    """Compare a model with plain transformers, before its base is sharded.

    Args:
        module: the model with its complete base; it is left unchanged.
        data: the rows.

    Returns:
        The result, or None and the reason why no comparison is possible.
    """
    with preserve_state(module):
        batches = _first_batches(data)
        found = _reference(module, _trial(module, data, batches), batches[0])
        module.zero_grad(set_to_none=True)
    return found


def _first_batches(data: RowsDataModule) -> list[Batch]:
    stream = data.train_dataloader()
    return [stream.batch(number) for number in range(min(_BATCHES, stream.total))]


def _trial(module: TrainingModule, data: RowsDataModule, batches: Sequence[Batch]) -> _Trial:
    packed, pad_id = data.config.data.packing, data.tokenizer.pad_id
    documents = _short_of(data, batches)
    return _Trial(module, documents, packed=packed, pad_id=pad_id)


def _short_of(data: RowsDataModule, batches: Sequence[Batch]) -> Encoded:
    return _sharing(data, short_documents(batches, together=data.train_documents.together))


def _sharing(data: RowsDataModule, found: Encoded) -> Encoded:
    """Mark the prompts that documents share, if training computes them once."""
    return found if data.train_documents.shared is None else share_prompts(found)


def probed_stream(data: RowsDataModule) -> MicroBatches:
    """Return the documents that `probe` passes through a model, one by one."""
    documents = _short_of(data, _first_batches(data))
    return _stream(data.config, documents, 1, data.tokenizer.pad_id)


def _reference(module: TrainingModule, trial: _Trial, first: Batch) -> Reference:
    """Compare with plain transformers, or return the reason why that is impossible.

    The first micro-batch is compared if it is small enough and has several documents; otherwise,
    the short documents are.
    """
    backend = module.backend
    if not isinstance(backend, QloraBackend):
        return None, "the graph is not one of transformers"
    if any(map(is_in_parts, backend.parameters())):
        return None, "the base is in parts; the first process compares it before"
    if backend.offloaded_bytes:
        return None, "the base is in host memory, and is compared before it is offloaded"
    wanted, free = f32_bytes(backend), free_bytes(next(backend.parameters()).device)
    if free is not None and wanted > free:
        gib = f"{wanted / 2**30:.1f} GiB of f32 weights, {free / 2**30:.1f} GiB free"
        return None, f"not enough memory: {gib}"
    began = time.monotonic()
    documents = trial.documents
    batch = trial.batch(range(len(documents)))
    if first.input_ids_BT.numel() <= _REFERENCE_TOKENS and _targets_follow(first):
        whole = whole_documents(first, documents.together)
        batch, documents = (first, whole) if len(whole) > 1 else (batch, documents)
    found = agreement(backend, batch, documents)
    limits = _REFERENCE_INT8 if quantizes_inputs(backend.model) else _REFERENCE
    part: ReferencePart = {
        "loss": found.loss,
        "gradient": found.gradient,
        "parameters": found.parameters,
        "loss_tolerance": limits[0],
        "gradient_tolerance": limits[1],
        "seconds": round(time.monotonic() - began, 3),
        "from_cache": False,
    }
    return part, None


def is_in_parts(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is sharded over several processes."""
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of a device, if known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return look("cpu").free_bytes


def _tolerance(config: RunConfig) -> float:
    own = config.quant.spec.tolerance
    return _TOLERANCES[config.quant.compute_dtype.value] if own is None else own


def _targets_follow(batch: Batch) -> bool:
    """Return whether every target is the token after the one that it is predicted from."""
    ids, places_M = batch.input_ids_BT.flatten(), batch.target_places
    inside = places_M < len(ids)
    if not bool(inside.all()) or not torch.equal(ids[places_M], batch.targets_M):
        return False
    positions = batch.position_ids_BT.flatten()
    return torch.equal(positions[batch.predict_M] + 1, positions[places_M])


def _otherwise(config: RunConfig, first: Batch, together: int) -> list[str]:
    """List the ways in which the first batch differs from the configuration."""
    data = config.data
    packed = first.documents is not None
    longest = int(first.position_ids_BT.max()) + 1
    rows, width = first.input_ids_BT.shape
    room = data.seq_len * data.micro_batch_size + _MULTIPLE
    found = []
    if packed is not data.packing:
        found.append(f"packed: {packed}, data.packing={data.packing}")
    if longest > data.seq_len:
        found.append(f"a document of {longest} tokens, data.seq_len={data.seq_len}")
    if (packed and width > room) or (not packed and rows > data.micro_batch_size * together):
        found.append(f"{rows} × {width} tokens, data.micro_batch_size={data.micro_batch_size}")
    return found


class _Trial:
    """Forward passes over a few documents."""

    def __init__(
        self, module: TrainingModule, documents: Encoded, *, packed: bool, pad_id: int
    ) -> None:
        self.module, self.documents = module, documents
        self.packed, self.pad_id = packed, pad_id

    def together(self) -> tuple[float | None, float | None]:
        """Compare a batch with its single units: loss sum, and maximum difference of states."""
        units = units_of(self.documents)
        if len(units) < 2:  # noqa: PLR2004  # needs at least a pair
            return None, None
        joined, hidden_MD = self._pass(self.batch(range(len(self.documents))))
        losses, states = zip(*(self._pass(self.batch(unit)) for unit in units), strict=True)
        apart = _furthest(hidden_MD, states)
        objective = self.module.config.objective
        if not objective.spec.is_sum(objective):
            return None, apart
        alone = sum(float(loss.total.detach()) for loss in losses)
        return abs(float(joined.total.detach()) - alone) / max(abs(alone), 1e-12), apart

    def whole(self, batch: Batch, documents: Encoded) -> tuple[float | None, float | None]:
        """Compare a micro-batch of training with its own units.

        Args:
            batch: the micro-batch.
            documents: its documents.

        Returns:
            The maximum difference of hidden states, and that of the gradients of a fixed linear
            function of them. The loss is left out, since what it needs (a teacher's numbers, rated
            answers) may be known for the micro-batch alone.
        """
        units = units_of(documents)
        if len(units) < 2:  # noqa: PLR2004  # needs at least a pair
            return None, None
        joined, whole = self._linear([batch])
        states, parts = self._linear(self.batch(unit, documents) for unit in units)
        return _furthest(joined[0], states), _relative(whole, parts) if whole else None

    def peek(self) -> float | None:
        """Change the last token of a document, and measure whether other positions change."""
        batch = self.batch(units_of(self.documents)[0])
        place = int(batch.target_places[-1])
        ids = batch.input_ids_BT.clone()
        flat = ids.view(-1)
        others = flat[flat != flat[place]]
        if not len(others):
            return None
        flat[place] = others[0]
        before, states_MD = self._pass(batch)
        after, moved_MD = self._pass(dataclasses.replace(batch, input_ids_BT=ids))
        loss = float(before.total.detach())
        furthest = max(map(_difference, moved_MD, states_MD))
        return max(abs(float(after.total.detach()) - loss) / max(abs(loss), 1e-12), furthest)

    def batch(self, chosen: Sequence[int], documents: Encoded | None = None) -> Batch:
        """Build a batch of documents, by default of the short ones, as training does."""
        documents = self.documents if documents is None else documents
        if self.packed:
            return packed_batch(documents, [chosen], 0, multiple=_MULTIPLE, pad_id=self.pad_id)
        return padded_batch(documents, [[one] for one in chosen], 0, pad_id=self.pad_id)

    def _pass(self, batch: Batch) -> tuple[LossSum, torch.Tensor]:
        module = self.module
        there = batch.to(next(module.parameters()).device)
        passed, loss = module.passed(there)
        return loss, passed.hidden_MD.detach().float()

    def _linear(self, batches: Iterable[Batch]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the states of batches, and the gradients of one linear function of all states."""
        backend, device = self.module.backend, next(self.module.parameters()).device
        self.module.zero_grad(set_to_none=True)
        states = []
        for batch in batches:
            backend.begin(batch.index)
            hidden_MD = backend(batch.to(device)).float()
            states.append(hidden_MD.detach())
            if hidden_MD.requires_grad:  # not if only the head is trained
                direction_D = torch.linspace(-1, 1, hidden_MD.shape[1], device=device)
                torch.autograd.backward((hidden_MD @ direction_D).sum())
        gradients = _gradients(backend.trainable().values())
        self.module.zero_grad(set_to_none=True)
        return states, gradients


def _furthest(together_MD: torch.Tensor, alone: Iterable[torch.Tensor]) -> float:
    """Return the maximum difference between states of a batch and those of its single units."""
    differences, at = [], 0
    for own_MD in alone:
        differences.append(_difference(together_MD[at : at + len(own_MD)], own_MD))
        at += len(own_MD)
    return float(torch.tensor(differences).max())  # max() would lose a NaN


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp_min(1e-12))


_MOST_PARAMETERS = 20_000_000  # compared; all of any adapter, some of a full model


def _gradients(parameters: Iterable[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return the gradients of as many parameters as are compared, the smallest first."""
    found, left = [], _MOST_PARAMETERS
    for parameter in sorted(parameters, key=lambda one: one.numel()):
        left -= parameter.numel()
        if left >= 0 and parameter.grad is not None:
            found.append(parameter.grad.detach().float().cpu())
    return found


def _relative(wholes: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> float:
    """Return the norm of the differences of two sides, relative to that of the first."""
    differences = [(a - b).norm() for a, b in zip(wholes, parts, strict=True)]
    length = torch.stack([one.norm() for one in wholes]).norm()
    return float(torch.stack(differences).norm() / length.clamp_min(1e-12))


@dataclass(frozen=True, kw_only=True, slots=True)
class Unevenness:
    """Relative difference between micro-batches and the batch, and the size of the comparison."""

    documents: int
    loss: float
    gradient: float
    parameters: int


def accumulated(
    config: RunConfig, module: TrainingModule, documents: Encoded, pad_id: int
) -> Unevenness | None:
    """Compute the gradients of one optimizer step twice: as one batch, and per document.

    Args:
        config: the whole configuration.
        module: the training module; only its backend and objective are used.
        documents: the documents to use.
        pad_id: the padding id.

    Returns:
        None if there is only one document, or one unit of documents that stay together, or if the
        loss of a batch is not the sum of theirs.
    """
    many = len(units_of(documents))
    if many < 2 or not config.objective.spec.is_sum(config.objective):  # noqa: PLR2004  # one is the batch itself
        return None
    whole, parts = (
        _step(config, module, _stream(config, documents, size, pad_id)) for size in (many, 1)
    )
    return Unevenness(
        documents=len(documents),
        loss=abs(parts.loss - whole.loss) / max(abs(whole.loss), 1e-12),
        gradient=_relative(whole.gradients, parts.gradients),
        parameters=sum(one.numel() for one in whole.gradients),
    )


def _stream(config: RunConfig, documents: Encoded, size: int, pad_id: int) -> MicroBatches:
    units = units_of(documents)
    return MicroBatches(
        documents,
        units,
        micro_batch_size=size,
        total=len(units) // size,
        seed=None,
        packing=config.data.packing,
        pad_id=pad_id,
    )


@dataclass(frozen=True, slots=True)
class _Step:
    loss: float
    gradients: list[torch.Tensor]


class _Observed(torch.optim.SGD):
    """Calls an observer with the gradients instead of taking a step."""

    def __init__(self, parameters: list[Any], look: Callable[[], None]) -> None:
        super().__init__(parameters, lr=0.0)
        self.look = look

    def step(self, closure: Any = None) -> Any:
        """Run the closure and the observer; change nothing."""
        loss = closure() if closure is not None else None
        self.look()
        return loss


class _Observing(TrainingModule):
    """The training module with an optimizer that changes nothing."""

    loss = float("nan")

    def configure_optimizers(self) -> Any:
        """Use an optimizer that keeps as many of the step's gradients as are compared."""
        parameters = [*self.backend.trainable().values()]
        self.gradients: list[torch.Tensor] = []

        def look() -> None:
            self.gradients = _gradients(parameters)
            self.loss = self.step_metrics["train/loss"]

        optimizer = _Observed(parameters, look)
        return {"optimizer": optimizer, "lr_scheduler": LambdaLR(optimizer, lambda _: 1.0)}


def _step(config: RunConfig, module: TrainingModule, stream: MicroBatches) -> _Step:
    """Run one optimizer step over a stream."""
    observing = _Observing(config, module.backend, module.objective, total_steps=1)
    observing.teacher, observing.known_teachers = module.teacher, module.known_teachers
    observing.is_probed = module.is_probed
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
    trainer.fit(observing, stream, stream)  # the validation stream is never read
    return _Step(observing.loss, observing.gradients)
