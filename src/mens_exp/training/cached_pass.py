"""Values of documents under a frozen model, computed once before training and kept in the cache.

Training does not change them, so each document passes through the model once; later runs on the
same model and rows read the cache.

Each training block passes through the model alone. If a micro-batch is one block, the values equal
those of a training step bit for bit. If it has several, its composition changes with each epoch,
and the values agree within rounding. Validation always has the same micro-batches.

The key of a cache entry covers everything that changes a value: weights and definition of the
model, the encoded documents and their blocks, the device and its kernels, packages and code, and
what the caller adds. An entry has NaN for documents that no run has needed. Its digest is checked
when it is read.

Shapes: D documents of a side, P values of all of them, W columns of a value.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mens_exp.artifacts.digest import digest, sha256_bytes, sha256_file
from mens_exp.artifacts.host import file_lock
from mens_exp.artifacts.provenance import code_digest
from mens_exp.objective.preference import documents_of
from mens_exp.planning.preflight import writable_cache
from mens_exp.report import terminal
from mens_exp.rows.files import open_arrays, store_arrays
from mens_exp.training.distributed import all_gather

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mens_exp.data.batch import Batch
    from mens_exp.data.stream import MicroBatches
    from mens_exp.model.sources import BaseModel
    from mens_exp.planning.machine import Rank
    from mens_exp.training.module import RunRecord

# Micro-batches per process between two writes of the cache; a killed run loses at most as many.
# Writing a million values takes 0.02 s. Unverified guess.
_KEPT_EVERY = 64

_code = functools.cache(code_digest)  # of the code that this process has loaded


def environment_key(run: RunRecord, model: BaseModel, device: torch.device) -> dict[str, Any]:
    """Return the part of a cache key that covers model, device and software.

    Args:
        run: the open run.
        model: the model on disk.
        device: where it computes.
    """
    graph = sorted([*model.directory.glob("*.py"), model.directory / "config.json"])
    on_gpu = device.type == "cuda"
    return {
        "weights": model.weights_sha256,
        "graph": {file.name: sha256_file(file) for file in graph},
        "device": torch.cuda.get_device_name(device)
        if on_gpu
        else [torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "packages": run.manifest.provenance["packages"],
        "code": _code(),
    }


class CachedPass:
    """The documents of one side, their micro-batches, and their entry of the cache.

    Attributes:
        values: of all documents in order, f32 ``[P, W]``; NaN if not known.
    """

    def __init__(
        self,
        name: str,
        common: dict[str, Any],
        stream: MicroBatches,
        needed: np.ndarray,
        documents_sha256: str,
        *,
        counts_D: np.ndarray | None = None,
        width: int = 1,
    ) -> None:
        """Compute the key of the entry; :meth:`read` reads it.

        Args:
            name: the kind of values, a directory of the cache.
            common: the part of the key that covers all but documents and micro-batches.
            stream: the micro-batches.
            needed: the numbers of the micro-batches that the run reads.
            documents_sha256: content hash of the encoded documents.
            counts_D: values of each document; None is one.
            width: W.
        """
        self.name, self.stream, self.needed = name, stream, needed
        blocks = [np.asarray(stream.blocks[i], np.int64) for i in range(len(stream.blocks))]
        lengths = np.array([len(block) for block in blocks], np.int64)
        self.key = {
            **common,
            "documents": documents_sha256,
            "blocks": sha256_bytes(np.concatenate([lengths, *blocks]).tobytes()),
            "micro_batch_size": stream.micro_batch_size,
            "pad_id": stream.pad_id,
        }
        self.directory = writable_cache() / name / digest(self.key)[:32]
        counts = np.ones(len(stream.documents), np.int64) if counts_D is None else counts_D
        self._bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.values = np.full((int(self._bounds[-1]), width), np.nan, np.float32)
        size = stream.micro_batch_size
        self._documents = [np.concatenate(blocks[i * size : (i + 1) * size]) for i in needed]

    def of(self, documents: np.ndarray) -> np.ndarray:
        """Return the indices of documents' values, int64."""
        return np.concatenate(
            [np.arange(self._bounds[one], self._bounds[one + 1]) for one in documents]
        )

    @property
    def needed_values(self) -> np.ndarray:
        """The values of the documents that the run needs, f32; NaN if not known."""
        found: np.ndarray = self.values[self.of(np.concatenate(self._documents))]
        return found

    @property
    def known(self) -> int:
        """The number of needed values that are known."""
        return int(np.isfinite(self.values[self.of(np.concatenate(self._documents)), 0]).sum())

    @property
    def missing(self) -> list[int]:
        """The numbers of the needed micro-batches whose values are not known."""
        return [
            int(number)
            for number, documents in zip(self.needed, self._documents, strict=True)
            if np.isnan(self.values[self.of(documents), 0]).any()
        ]

    def read(self, run: RunRecord, rank: Rank) -> None:
        """Load the first process's entry in every process; report an entry that is damaged."""
        found = self._stored() if rank.is_first else None
        if found is None and rank.is_first and self.directory.exists():
            note = f"{self.directory} was damaged; its {self._what} are computed again"
            run.manifest.notes.append(note)
            terminal.say(note, on=terminal.console(stderr=True))
        if not rank.is_alone:
            found = all_gather(found, rank)[0]
        if found is not None:
            self.values = found

    def mapped(self) -> np.ndarray:
        """Return the values, memory-mapped from the cache file if this machine has it.

        Its pages are read on demand, and the system can reclaim them.
        """
        found = self._opened()
        if found is None or not np.array_equal(found, self.values, equal_nan=True):
            return self.values
        return found

    @property
    def _what(self) -> str:
        return self.name.replace("_", " ")

    def _stored(self) -> np.ndarray | None:
        found = self._opened()
        return None if found is None else np.array(found, np.float32)

    def _opened(self) -> np.ndarray | None:
        found = open_arrays(self.directory)
        values = None if found is None else found[0].get("values")
        if values is None or values.size != self.values.size:
            return None
        shaped: np.ndarray = values.reshape(self.values.shape)
        return shaped

    def complete(self, passed: Callable[[Batch], np.ndarray], rank: Rank) -> None:
        """Compute the missing values, and write the cache periodically and at the end.

        Args:
            passed: returns the values of a micro-batch's documents, in its order.
            rank: the rank of this process.
        """
        missing = self.missing
        if missing and rank.is_first:
            terminal.say(
                f"computing {self._what} of {len(missing)} micro-batches",
                on=terminal.console(stderr=True),
            )
        at_once = _KEPT_EVERY * rank.world_size
        for start in range(0, len(missing), at_once):
            self._compute(passed, missing[start : start + at_once], rank)
            if rank.is_first:
                self._keep()

    def _compute(
        self, passed: Callable[[Batch], np.ndarray], numbers: Sequence[int], rank: Rank
    ) -> None:
        """Compute micro-batches, with the same number of passes in every process.

        A sharded base needs all processes in each pass.
        """
        found: list[tuple[np.ndarray, np.ndarray]] = []
        for turn in range(-(-len(numbers) // rank.world_size)):
            place = min(turn * rank.world_size + rank.rank, len(numbers) - 1)
            batch = self.stream.batch(numbers[place])
            found.append((documents_of(batch).numpy(), passed(batch)))
        shares = [found] if rank.is_alone else all_gather(found, rank)
        for documents, values in (one for share in shares for one in share):
            self.values[self.of(documents)] = values.reshape(-1, self.values.shape[1])

    def _keep(self) -> None:
        """Write the cache, merged with the values that another run has added."""
        with file_lock(self.directory.parent / f".{self.directory.name}.lock"):
            stored = self._stored()
            if stored is not None:
                self.values = np.where(np.isnan(self.values), stored, self.values)
            flat = self.values.reshape(-1)
            store_arrays(self.directory, {"values": [flat]}, lambda _: {"key": self.key})
