"""Digests of the micro-batches and of the adapter's first values, to compare two runs by."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
# mypy: disable-error-code="override"

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from lightning import Callback

from mens_exp.artifacts.digest import digest, sha256_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from lightning import Trainer
    from torch.optim import Optimizer

    from mens_exp.data.batch import Batch
    from mens_exp.training.module import RunRecord, TrainingModule

_BATCHES = "batches_sha256"
_INIT, _INIT_LAYERS = "lora_init_sha256", "lora_init_layers_sha256"
_START = sha256_bytes(b"")  # of a stream of which nothing has been trained on


class Digests(Callback):
    """Chains a SHA-256 over every micro-batch trained on, and takes one of the first adapter.

    Several processes chain their micro-batches in the stream's order, which is that of one process.
    Every step's event has ``batches_sha256``: the chain up to its last micro-batch. The manifest
    has the last of them in `results`, and in `facts` ``lora_init_sha256`` over all matrices that
    training started from and ``lora_init_layers_sha256`` layer by layer.
    """

    def __init__(self, run: RunRecord) -> None:
        """Listen for ``run``."""
        self.run = run
        self._chain: str | None = None
        self._layers: dict[str, str] = {}
        self._waiting: dict[int, Batch] = {}  # of the step under way, by place in the stream

    def setup(self, trainer: Trainer, pl_module: TrainingModule, stage: str) -> None:
        """Take the digests of the adapter as it was built, before a checkpoint is put into it."""
        del trainer
        if stage == "fit":
            self._chain = None
            self._layers = layer_digests(pl_module.backend.trainable())

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Write down what training starts from, and start the chain of a run's first step."""
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
        """Add a micro-batch to the chain; several processes do so at the end of the step."""
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
        """Chain what all processes have taken in this step, each adding its own in its turn."""
        del optimizer
        if self._chain is None or trainer.world_size == 1:
            return
        first, many = min(self._waiting) - trainer.global_rank, trainer.world_size
        for index in range(first, first + many * len(self._waiting)):
            batch = self._waiting.get(index)
            if batch is not None and not batch.is_filler:
                self._chain = _chained(self._chain, batch)
            # Every link is handed on; a filler's process hands on what it was given.
            self._chain = trainer.strategy.broadcast(self._chain, src=index % many)
        self._waiting.clear()
        pl_module.step_digests[_BATCHES] = self._chain

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Write the chain of the whole run."""
        del trainer, pl_module
        self.run.manifest.results[_BATCHES] = self._chain
        if self._chain is None:
            reason = "the checkpoint that the run goes on from has no digest of its batches"
            self.run.manifest.unknown[f"results.{_BATCHES}"] = reason

    def state_dict(self) -> dict[str, Any]:
        """Return the chain and the first adapter's digests."""
        return {"chain": self._chain, "layers": dict(self._layers)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with the chain, and with the adapter that the run began with."""
        self._chain = state_dict["chain"]
        self._layers = dict(state_dict["layers"])


def _chained(chain: str, batch: Batch) -> str:
    """Add everything of a micro-batch that a graph sees: ids, positions, bounds, labels."""
    sha256 = hashlib.sha256(chain.encode())
    sha256.update(repr(batch.documents).encode())
    for part in (
        batch.input_ids_BT,
        batch.position_ids_BT,
        batch.attention_mask_BT,
        batch.predict_M,
        batch.targets_M,
    ):
        for piece in _pieces(part):
            sha256.update(piece)
    return sha256.hexdigest()


def layer_digests(trainable: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return a digest of A and B, f32, by logical layer; what else learns is left out."""
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
    """Yield the shape and the bytes of a tensor; its shape keeps two of one length apart."""
    if tensor is None:
        yield b"none"
        return
    yield repr(tuple(tensor.shape)).encode()
    yield tensor.cpu().contiguous().numpy().data
