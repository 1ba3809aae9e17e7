"""Digests of the micro-batches and of the initial adapter, for comparing two runs."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from lightning import Callback

from mens_exp.artifacts.digest import digest, sha256_bytes
from mens_exp.rows.rewards import PROMPT

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from lightning import Trainer
    from torch.optim import Optimizer

    from mens_exp.data.batch import Batch
    from mens_exp.training.module import RunRecord, TrainingModule

_BATCHES = "batches_sha256"
_INIT, _INIT_LAYERS = "lora_init_sha256", "lora_init_layers_sha256"
_START = sha256_bytes(b"")  # chain before the first micro-batch


class Digests(Callback):
    """Chains a SHA-256 over all trained micro-batches, and hashes the initial adapter.

    Several processes chain their micro-batches in the order of the stream, so the result equals
    that of a single process. The event of each step has ``batches_sha256``, the chain up to its
    last micro-batch. The manifest has the final chain in `results`; its `facts` have
    ``lora_init_sha256`` over all initial matrices and ``lora_init_layers_sha256`` per layer.
    """

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``."""
        self.run = run
        self._chain: str | None = None
        self._layers: dict[str, str] = {}
        self._waiting: dict[int, Batch] = {}  # of the current step, by stream index

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Hash the adapter as it was built, before a checkpoint is loaded."""
        del trainer
        if stage == "fit":
            self._chain = None
            self._layers = layer_digests(pl_module.backend.trainable())

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record the initial digests, and start the chain if this is the run's first step."""
        del pl_module
        if trainer.global_step == 0:
            self._chain = _START
        facts, unknown = self.run.manifest.facts, self.run.manifest.unknown
        facts[_INIT] = digest(self._layers) if self._layers else None
        facts[_INIT_LAYERS] = self._layers or None
        if not self._layers:
            unknown |= {f"facts.{name}": "no LoRA matrix" for name in (_INIT, _INIT_LAYERS)}
        self.run.save()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: TrainingModule, batch: Batch, batch_idx: int
    ) -> None:
        """Add a micro-batch to the chain; several processes do this at the end of the step."""
        del batch_idx
        if self._chain is None:
            return
        if trainer.world_size > 1:
            self._waiting[batch.index] = batch
            return
        self._chain = _chained(self._chain, batch)
        pl_module.step_digests[_BATCHES] = self._chain

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: TrainingModule, optimizer: Optimizer
    ) -> None:
        """Chain the step's micro-batches of all processes; each adds its own in turn."""
        del optimizer
        if self._chain is None or trainer.world_size == 1:
            return
        first, many = min(self._waiting) - trainer.global_rank, trainer.world_size
        for index in range(first, first + many * len(self._waiting)):
            batch = self._waiting.get(index)
            if batch is not None and not batch.is_filler:
                self._chain = _chained(self._chain, batch)
            # Every link is passed on; a process with a filler batch passes on what it received.
            self._chain = trainer.strategy.broadcast(self._chain, src=index % many)
        self._waiting.clear()
        pl_module.step_digests[_BATCHES] = self._chain

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record the chain of the whole run."""
        del trainer, pl_module
        self.run.manifest.results[_BATCHES] = self._chain
        if self._chain is None:
            reason = "the checkpoint that the run continues from has no digest of its batches"
            self.run.manifest.unknown[f"results.{_BATCHES}"] = reason

    def state_dict(self) -> dict[str, Any]:
        """Return the chain and the initial adapter's digests."""
        return {"chain": self._chain, "layers": dict(self._layers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the chain and the digests of the run's initial adapter."""
        self._chain = state_dict["chain"]
        self._layers = dict(state_dict["layers"])


def _chained(chain: str, batch: Batch) -> str:
    """Extend the chain by a micro-batch: ids, positions, bounds, labels, and further values."""
    batch = batch.host
    sha256 = hashlib.sha256(chain.encode())
    sha256.update(repr(batch.documents).encode())
    if batch.prefixes is not None:
        sha256.update(repr(batch.prefixes).encode())
    for part in (
        batch.input_ids_BT,
        batch.position_ids_BT,
        batch.attention_mask_BT,
        batch.predict_M,
        batch.targets_M,
        *(batch.extra[name] for name in sorted(batch.extra.keys() - PROMPT)),
    ):
        for piece in _pieces(part):
            sha256.update(piece)
    return sha256.hexdigest()


def layer_digests(trainable: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of A and B (f32) per logical layer; other trained tensors are omitted."""
    found: dict[str, str] = {}
    for name in trainable:
        layer, _, which = name.rpartition(".")
        if which == "lora_a":
            sha256 = hashlib.sha256()
            for matrix in (trainable[name], trainable[f"{layer}.lora_b"]):
                for piece in _pieces(matrix.detach().float()):
                    sha256.update(piece)
            found[layer] = sha256.hexdigest()
    return found


def _pieces(tensor: torch.Tensor | None) -> Iterator[Any]:
    """Yield shape and bytes of a tensor; the shape distinguishes tensors of equal size."""
    if tensor is None:
        yield b"none"
        return
    yield repr(tuple(tensor.shape)).encode()
    yield tensor.cpu().contiguous().numpy().data
