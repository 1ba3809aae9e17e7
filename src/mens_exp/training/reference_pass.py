"""Log-likelihoods under the base, computed once before training and kept in the cache.

An objective that compares with the base needs one number of each answer, which training does not
change. With `objective.precompute_ref_log_probs` the base passes over the documents of the run
once, and over none at later runs of the same base and rows.

A training block passes through the base by itself. Its values are those of a step to the bit where
a micro-batch is one block. Of several blocks the composition changes with each epoch, and the
values are equal within the rounding of other shapes. Validation always has the same micro-batches.

The key of a cache entry covers everything that changes a value: weights and definition of the base,
its quantization and compute format, the places and the kind of the adapter, whose layers compute
the base too, the encoded documents and their blocks, the device and its kernels, packages and code.
An entry has NaN for documents that no run needed yet. Its digest is checked when it is read.

Shapes: D documents of a side, S documents of a micro-batch.
"""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mens_exp.artifacts.digest import digest, sha256_bytes, sha256_file
from mens_exp.artifacts.host import file_lock
from mens_exp.artifacts.provenance import code_digest
from mens_exp.config.objective_spec import PRECOMPUTED
from mens_exp.errors import ConfigError
from mens_exp.objective.preference import KnownReference, OfAnswers, documents_of
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal
from mens_exp.rows.files import open_arrays, store_arrays
from mens_exp.training.contract_probe import preserve_state
from mens_exp.training.distributed import all_gather

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.config.root import RunConfig
    from mens_exp.data.batch import Batch
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.data.stream import MicroBatches
    from mens_exp.model.sources import BaseModel
    from mens_exp.planning.machine import Rank
    from mens_exp.training.module import RunRecord, TrainingModule

_FACT = "reference_log_probs"
# Micro-batches of each process between two writings of the cache, which is what a stop loses.
# Writing a million values takes 0.02 s. Unverified guess.
_KEPT_EVERY = 64
# Settings of `lora` that change the adapter's own values alone, which are off in this pass.
_OFF = {"r": 1, "alpha": 1, "dropout": 0.0, "rank_pattern": {}, "alpha_pattern": {}}


def known_reference(
    config: RunConfig,
    run: RunRecord,
    base: BaseModel,
    module: TrainingModule,
    data: RowsDataModule,
    rank: Rank,
) -> KnownReference:
    """Read the log-likelihoods that a run needs from the cache, and compute what is missing.

    All processes of a run execute this together; each computes its share.

    Args:
        config: the whole configuration.
        run: the open run, whose manifest records it.
        base: the base model.
        module: the module to be trained; it is left unchanged.
        data: the rows.
        rank: the rank of this process.

    Raises:
        ConfigError: the objective is of a class that compares in another way.
    """
    if not isinstance(module.objective, OfAnswers):
        raise ConfigError(
            "the objective's class may compare with the base in another way",
            where=f"objective.{PRECOMPUTED}",
            found=type(module.objective).__qualname__,
            expected="a class that extends mens_exp.objective.preference.OfAnswers",
            remedy=f"set objective.{PRECOMPUTED}=false",
        )
    began = time.monotonic()
    common = _key(config, run, base, module)
    val = data.val_dataloader()
    sides = {
        "train": _Side(common, data.in_blocks(), data.trained_blocks(), data.train_counts.sha256),
        "val": _Side(common, val, np.arange(val.total), data.val_counts.sha256),
    }
    cached = 0
    with preserve_state(module):
        for name, side in sides.items():
            module.train(name == "train")  # as the passes that it takes the place of
            side.read(run, rank)
            cached += int(np.isfinite(side.needed_values).sum())
            side.complete(module, rank)
    documents = {f"{name}_documents": len(side.needed_values) for name, side in sides.items()}
    values = b"".join(side.needed_values.tobytes() for side in sides.values())
    run.manifest.facts[_FACT] = {
        **documents,
        "from_cache": cached,
        "sha256": sha256_bytes(values),
        "seconds": round(time.monotonic() - began, 3),
    }
    run.save()
    train_D, val_D = (torch.from_numpy(side.values_D) for side in sides.values())
    return KnownReference(train_D, val_D)


_code = functools.cache(code_digest)  # of the code that this process has loaded


def _key(
    config: RunConfig, run: RunRecord, base: BaseModel, module: TrainingModule
) -> dict[str, Any]:
    """Return what changes the values besides documents and micro-batches."""
    graph = sorted([*base.directory.glob("*.py"), base.directory / "config.json"])
    device = next(module.parameters()).device
    on_gpu = device.type == "cuda"
    off: dict[str, Any] = {name: one for name, one in _OFF.items() if hasattr(config.lora, name)}
    assert isinstance(module.objective, OfAnswers), "known_reference refuses others"
    return {
        "base": base.weights_sha256,
        "graph": {file.name: sha256_file(file) for file in graph},
        "backend": repr(config.backend),
        "quant": repr(config.quant),
        "lora": repr(replace(config.lora, **off)),
        "chunk_tokens": module.objective.chunk_tokens,
        "packing": config.data.packing,
        "device": torch.cuda.get_device_name(device)
        if on_gpu
        else [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "packages": run.manifest.provenance["packages"],
        "code": _code(),
    }


class _Side:
    """The documents of one side, their micro-batches, and their entry of the cache."""

    def __init__(
        self,
        common: dict[str, Any],
        stream: MicroBatches,
        needed: np.ndarray,
        documents_sha256: str,
    ) -> None:
        """Combine them; ``needed`` are the numbers of micro-batches."""
        self.stream, self.needed = stream, needed
        blocks = [np.asarray(stream.blocks[i], np.int64) for i in range(len(stream.blocks))]
        lengths = np.array([len(block) for block in blocks], np.int64)
        key = {
            **common,
            "documents": documents_sha256,
            "blocks": sha256_bytes(np.concatenate([lengths, *blocks]).tobytes()),
            "micro_batch_size": stream.micro_batch_size,
            "pad_id": stream.pad_id,
        }
        self.directory = writable_cache() / "reference_log_probs" / digest(key)[:32]
        self.key = key
        self.values_D = np.full(len(stream.documents), np.nan, np.float32)
        size = stream.micro_batch_size
        self.documents = [np.concatenate(blocks[i * size : (i + 1) * size]) for i in needed]

    @property
    def needed_values(self) -> np.ndarray:
        """The values of the documents that the run needs, f32; NaN where they are not known."""
        found: np.ndarray = self.values_D[np.concatenate(self.documents)]
        return found

    def read(self, run: RunRecord, rank: Rank) -> None:
        """Take over what the first process finds in the cache; say so if that is damaged."""
        found = self._stored() if rank.is_first else None
        if found is None and rank.is_first and self.directory.exists():
            note = f"{self.directory} was damaged; its log-likelihoods are computed again"
            run.manifest.notes.append(note)
            terminal.say(note, on=terminal.console(stderr=True))
        if not rank.is_alone:
            found = all_gather(found, rank)[0]
        if found is not None:
            self.values_D = found

    def _stored(self) -> np.ndarray | None:
        found = open_arrays(self.directory)
        values_D = None if found is None else found[0].get("values")
        if values_D is None or values_D.shape != self.values_D.shape:
            return None
        return np.array(values_D, np.float32)

    def complete(self, module: TrainingModule, rank: Rank) -> None:
        """Compute what is missing, and write the cache every so often and at the end."""
        missing = [
            int(number)
            for number, documents in zip(self.needed, self.documents, strict=True)
            if np.isnan(self.values_D[documents]).any()
        ]
        if missing and rank.is_first:
            terminal.say(
                f"computing the base's log-likelihoods of {len(missing)} micro-batches",
                on=terminal.console(stderr=True),
            )
        at_once = _KEPT_EVERY * rank.world_size
        for start in range(0, len(missing), at_once):
            self._compute(module, missing[start : start + at_once], rank)
            if rank.is_first:
                self._keep()

    def _compute(self, module: TrainingModule, numbers: Sequence[int], rank: Rank) -> None:
        """Compute micro-batches; processes take turns, and as many passes each.

        A base that is sharded needs all processes in each pass.
        """
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for turn in range(-(-len(numbers) // rank.world_size)):
            place = min(turn * rank.world_size + rank.rank, len(numbers) - 1)
            found.append(_passed(module, self.stream.batch(numbers[place])))
        shares = [found] if rank.is_alone else all_gather(found, rank)
        for documents, values in (one for share in shares for one in share):
            self.values_D[documents] = values

    def _keep(self) -> None:
        """Write the cache, with what another run has added to it."""
        with file_lock(self.directory.parent / f".{self.directory.name}.lock"):
            stored_D = self._stored()
            if stored_D is not None:
                self.values_D = np.where(np.isnan(self.values_D), stored_D, self.values_D)
            store_arrays(self.directory, {"values": [self.values_D]}, lambda _: {"key": self.key})


def _passed(module: TrainingModule, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents of a micro-batch, and their log-likelihoods under the base."""
    there = batch.to(next(module.parameters()).device)
    module.backend.begin(batch.index)
    assert isinstance(module.objective, OfAnswers), "known_reference refuses others"
    values_S = module.objective.reference_logp(module.of_base(there))
    return documents_of(batch).numpy(), values_S.cpu().numpy()
