"""The order of micro-batches: a pure function of seed and position.

Training sees one endless stream: a permutation of all blocks for each epoch, drawn from the
seed and the epoch's number, cut into micro-batches. A position in the stream is therefore all
the state there is, and a run resumes by asking for the next position.

Several ranks share that one stream: of every ``world_size`` micro-batches in it each rank takes
one, so that an optimizer step holds the same micro-batches however many ranks take it. A position
counts micro-batches of all ranks, and any number of ranks can go on from it. There are no loader
workers: a micro-batch is cut out of a memory map, in less time than another process would take to
hand it over.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.data.batch import Batch, packed_batch, padded_batch
from mens_exp.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.data.packing import Blocks
    from mens_exp.rows.encode import Encoded

__all__ = ["MicroBatches", "permutation"]


# Tokens. Each length a kernel has not met costs it a variant that is built and kept, so few lengths
# keep steps fast and memory level (measured: experiments/LOG.md).
_SHAPE_MULTIPLE = 32


class MicroBatches:
    """Iterate over micro-batches from a position; stateful, as Lightning wants it for resuming."""

    def __init__(
        self,
        documents: Encoded,
        blocks: Sequence[Sequence[int]] | Blocks,
        *,
        micro_batch_size: int,
        total: int,
        seed: int | None,
        packing: bool,
        pad_id: int,
        places: int | None = None,
    ) -> None:
        """Lay out a stream.

        Args:
            documents: the encoded documents.
            blocks: document indices of each block.
            micro_batch_size: blocks in a micro-batch.
            total: micro-batches in the stream.
            seed: seed of the order; None keeps the blocks' own order.
            packing: join documents into one sequence, or pad each.
            pad_id: id that fills padding.
            places: blocks in the stream, repetitions counted, where the last micro-batch is not to
                be filled up from the next epoch; None fills it up.
        """
        self.documents = documents
        self.blocks = blocks
        self.micro_batch_size = micro_batch_size
        self.total = total
        self.seed = seed
        self.packing = packing
        self.pad_id = pad_id
        self.places = len(blocks) if seed is None else places  # a pass in order is never filled up
        self.rank, self.world_size = 0, 1
        self._position = 0

    def share(self, rank: int, world_size: int) -> None:
        """Take one rank's part of the stream from now on.

        Args:
            rank: which of the ranks this is, from 0.
            world_size: ranks that share the stream. An optimizer step must hold a multiple of so
                many micro-batches; where the stream's end leaves some ranks one less, they get a
                filler, because all of them take each step together.
        """
        assert 0 <= rank < world_size, "a rank is one of the ranks"
        self.rank, self.world_size = rank, world_size

    @property
    def position(self) -> int:
        """Micro-batches that all ranks together have taken."""
        return self._position

    @position.setter
    def position(self, taken: int) -> None:
        """Say that this rank has taken its last one before ``taken``; so have the others theirs."""
        self._position = -(-taken // self.world_size) * self.world_size

    def __len__(self) -> int:
        """Count this rank's micro-batches in the whole stream, those already taken included."""
        return math.ceil(self.total / self.world_size)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches from the current position on."""
        end = len(self) * self.world_size
        for index in range(self.position + self.rank, end, self.world_size):
            if index < self.total:
                yield self.batch(index)
            else:
                yield replace(self.batch(self.total - 1), index=index, is_filler=True)

    def batch(self, index: int) -> Batch:
        """Build micro-batch ``index`` of the stream."""
        first = index * self.micro_batch_size
        last = first + self.micro_batch_size
        if self.places is not None:
            last = min(last, self.places)
        blocks = [self.blocks[self._block_at(place)] for place in range(first, last)]
        return self._joined(self.documents, blocks, index)

    def _joined(
        self, documents: Encoded, blocks: Sequence[Sequence[int] | np.ndarray], index: int
    ) -> Batch:
        if self.packing:
            return packed_batch(
                documents, blocks, index, multiple=_SHAPE_MULTIPLE, pad_id=self.pad_id
            )
        return padded_batch(documents, blocks, index, pad_id=self.pad_id)

    def _block_at(self, place: int) -> int:
        if self.seed is None:
            return place
        epoch, offset = divmod(place, len(self.blocks))
        return int(permutation(self.seed, epoch, len(self.blocks))[offset])

    def state_dict(self) -> dict[str, Any]:
        """Return the position that iteration starts from."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration from a saved position.

        Raises:
            RequestError: it lies inside what these ranks take together.
        """
        position = int(state["position"])
        if position % self.world_size and position < self.total:
            raise RequestError(
                "the ranks cannot share the micro-batches that are left",
                where="data",
                found=f"position {position} for {self.world_size} ranks",
                expected="a position that is a multiple of the number of ranks",
                remedy="go on with a number of ranks that divides the micro-batches of a step",
            )
        self.position = position


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int, *, window: int = 0) -> np.ndarray:
    """Return the order of so many blocks in an epoch, or in one window of it."""
    entropy = [seed, epoch, window] if window else [seed, epoch]
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
    return generator.permutation(size)
