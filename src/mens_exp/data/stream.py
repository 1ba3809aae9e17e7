"""The order of micro-batches: a pure function of seed and position.

Training reads one endless stream: for each epoch a permutation of all blocks, drawn from the seed
and the epoch number, cut into micro-batches. The only state is therefore the position in the
stream, and a run resumes from the next position.

All ranks share this stream: of every ``world_size`` consecutive micro-batches, each rank takes one,
so that an optimizer step contains the same micro-batches for any number of ranks. A position counts
the micro-batches of all ranks, and a run can resume with a different number of ranks. There are no
loader workers: slicing a micro-batch out of a memory map takes less time than receiving it from
another process.

Rows that are read during training (``data.streaming``) come in windows. Each window is encoded,
packed and shuffled separately: an epoch consists of its windows in order, and the blocks of each
window are permuted by seed, epoch and window. If all rows fit in one window, the order equals that
of a run without streaming. Micro-batches are cut without regard to window and epoch boundaries. The
state is the position and the location of its window: on resuming, the window is read and packed
again, and the blocks already taken are skipped. Every rank reads all rows and builds its own share
of the micro-batches, so that the order is the same for any number of ranks.
"""

from __future__ import annotations

import copy
import functools
import math
from collections import deque
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.corpus.split import Side
from mens_exp.data.batch import SHAPE_MULTIPLE, Batch, packed_batch, padded_batch
from mens_exp.errors import DataError, RequestError
from mens_exp.rows.documents import Encoded
from mens_exp.rows.packing import Blocks, blocks_of
from mens_exp.rows.readers import rows_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.config.data import DataConfig
    from mens_exp.corpus.mix import RowStream, Window
    from mens_exp.rows.schema import TrainingPair


class MicroBatches:
    """Iterator over micro-batches from a position; stateful, as Lightning requires for resuming."""

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
        """Configure a stream.

        Args:
            documents: the encoded documents.
            blocks: document indices of each block.
            micro_batch_size: blocks per micro-batch.
            total: micro-batches in the stream.
            seed: seed of the order; None keeps the order of the blocks.
            packing: whether to join documents into one sequence instead of padding each.
            pad_id: token id used for padding.
            places: blocks in the stream, including repetitions, if the last micro-batch must not be
                filled up from the next epoch; None fills it up.
        """
        self.documents = documents
        self.blocks = blocks
        self.micro_batch_size = micro_batch_size
        self.total = total
        self.seed = seed
        self.packing = packing
        self.pad_id = pad_id
        self.places = len(blocks) if seed is None else places  # an ordered pass is never filled up
        self.rank, self.world_size = 0, 1
        self._position = 0

    def share(self, rank: int, world_size: int) -> None:
        """Restrict iteration to one rank's share of the stream from now on.

        Args:
            rank: index of this rank, from 0.
            world_size: number of ranks that share the stream. It must divide the number of
                micro-batches in an optimizer step. If the end of the stream leaves some ranks one
                short, they get a filler, because all ranks take each step together.
        """
        assert 0 <= rank < world_size, "a rank is one of the ranks"
        self.rank, self.world_size = rank, world_size

    @property
    def position(self) -> int:
        """Number of micro-batches that all ranks together have taken."""
        return self._position

    @position.setter
    def position(self, taken: int) -> None:
        """Set the number taken by all ranks together, rounded up to a multiple of the ranks."""
        self._position = -(-taken // self.world_size) * self.world_size

    def __len__(self) -> int:
        """Return this rank's total number of micro-batches, including those already taken."""
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
                documents, blocks, index, multiple=SHAPE_MULTIPLE, pad_id=self.pad_id
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
            RequestError: it is not a multiple of the micro-batches that these ranks take together.
        """
        position = int(state["position"])
        if position % self.world_size and position < self.total:
            raise RequestError(
                "the remaining micro-batches cannot be divided among the ranks",
                where="data",
                found=f"position {position} for {self.world_size} ranks",
                expected="a position that is a multiple of the number of ranks",
                remedy="continue with a number of ranks that divides the micro-batches of a step",
            )
        self.position = position


@functools.lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, size: int, *, window: int = 0) -> np.ndarray:
    """Return the order of ``size`` blocks in an epoch, or in one of its windows."""
    entropy = [seed, epoch, window] if window else [seed, epoch]
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(entropy)))
    return generator.permutation(size)


_Picked = tuple[Encoded, np.ndarray]  # documents, and the indices of those in one block


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A window that was started: the index of its first block, and the location of its rows.

    ``before`` and ``counts`` cover all documents up to its start and up to its end; ``read``
    describes the rows read up to its end.
    """

    first: int
    rows: dict[str, Any]
    before: dict[str, int]
    counts: dict[str, int]
    read: dict[str, Any]


class StreamedMicroBatches(MicroBatches):
    """Iterator over micro-batches from a position that reads rows on demand."""

    def __init__(
        self,
        rows: Callable[[], RowStream],
        first: Sequence[TrainingPair],
        documents: Encoded,
        encode: Callable[[Sequence[TrainingPair]], Encoded],
        *,
        data: DataConfig,
        seed: int,
        total: int,
        pad_id: int,
    ) -> None:
        """Configure a stream.

        Args:
            rows: starts reading rows.
            first: the training rows of an epoch's first window.
            documents: the same rows, encoded.
            encode: encodes rows.
            data: settings of packing and micro-batches.
            seed: seed of the order.
            total: micro-batches in the stream.
            pad_id: token id used for padding.
        """
        super().__init__(
            documents,
            _blocks(documents, data),
            micro_batch_size=data.micro_batch_size,
            total=total,
            seed=seed,
            packing=data.packing,
            pad_id=pad_id,
        )
        self._open = rows
        self._first_sha256 = rows_digest(first)
        self._encode = encode
        self._data = data
        self._order_seed = seed
        self._begun: deque[_Begun] = deque()

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches from the current position on."""
        index, size = self.position, self.micro_batch_size
        blocks = self._blocks_from(index * size)
        picked: list[_Picked] = []
        while index < len(self) * self.world_size:
            is_filler = index >= self.total
            if not is_filler:
                picked = list(islice(blocks, size))
            if index % self.world_size == self.rank:
                yield replace(self._joined(*_together(picked), index), is_filler=is_filler)
            index += 1

    def batch(self, index: int) -> Batch:
        """Build one micro-batch, reading everything before it in its window."""
        blocks = self._blocks_from(index * self.micro_batch_size)
        return self._joined(*_together(list(islice(blocks, self.micro_batch_size))), index)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the location of its window."""
        begun = self._at(self.position * self.micro_batch_size)
        window = None if begun is None else asdict(begun)
        return {"position": self.position, "window": copy.deepcopy(window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration from a saved position.

        Raises:
            RequestError: it is not a multiple of the micro-batches that these ranks take together.
        """
        super().load_state_dict(state)
        window = state["window"]
        self._begun = deque() if window is None else deque([_Begun(**window)])

    def consumed(self) -> dict[str, Any]:
        """Return statistics of the rows read and encoded for the micro-batches taken so far."""
        begun = self._at(max(self.position * self.micro_batch_size - 1, 0))
        return {} if begun is None else {**begun.read, **begun.counts}

    def _at(self, place: int) -> _Begun | None:
        """Return the last window that starts at or before a block."""
        return next((one for one in reversed(self._begun) if one.first <= place), None)

    def _blocks_from(self, wanted: int) -> Iterator[_Picked]:
        """Yield blocks endlessly, from an index counted over all epochs."""
        begun = self._at(wanted)
        rows = self._open()
        place, counts = 0, {"documents": 0, "truncated": 0, "dropped": 0, "short": 0}
        if begun is not None:
            rows.load_state_dict(begun.rows)
            place = begun.first
            counts = begun.before
        while True:
            state = rows.state_dict()
            window = rows.next_window()
            documents = self._documents(window)
            blocks = _blocks(documents, self._data)
            before, counts = counts, _added(counts, documents)
            read = {
                "epoch": window.epoch,
                "window": window.number,
                "rows": window.totals,
                "rows_sha256": window.rows_sha256,
            }
            self._note(_Begun(first=place, rows=state, before=before, counts=counts, read=read))
            order = permutation(self._order_seed, window.epoch, len(blocks), window=window.number)
            for number in range(max(wanted - place, 0), len(blocks)):
                yield documents, blocks[int(order[number])]
            place += len(blocks)

    def _documents(self, window: Window) -> Encoded:
        pairs = window.sides[Side.TRAIN]
        if window.number > 0:
            return self._encode(pairs)
        if rows_digest(pairs) != self._first_sha256:
            raise DataError(
                "the first rows have changed since the run began",
                where="data",
                found=f"epoch {window.epoch}",
                remedy="restore the files, and continue with resume=<run>",
            )
        return self.documents

    def _note(self, begun: _Begun) -> None:
        """Record the start of a window, and discard windows before the position."""
        while self._begun and self._begun[-1].first >= begun.first:
            self._begun.pop()  # started earlier, from a previous position
        self._begun.append(begun)
        taken = self.position * self.micro_batch_size
        while len(self._begun) > 1 and self._begun[1].first < taken:
            self._begun.popleft()


def _added(counts: dict[str, int], documents: Encoded) -> dict[str, int]:
    return {
        "documents": counts["documents"] + len(documents),
        "truncated": counts["truncated"] + documents.truncated,
        "dropped": counts["dropped"] + documents.dropped,
        "short": counts.get("short", 0) + documents.short,  # not counted by older checkpoints
    }


def _blocks(documents: Encoded, data: DataConfig) -> Blocks:
    return blocks_of(documents, packing=data.packing, capacity=data.seq_len)


def _together(picked: Sequence[_Picked]) -> tuple[Encoded, list[range]]:
    """Copy the documents of some blocks, possibly from two windows."""
    bounds = [(of, of.offsets[i], of.offsets[i + 1]) for of, block in picked for i in block]
    lengths = [int(end - start) for _, start, end in bounds]
    ends = np.cumsum([0, *(len(block) for _, block in picked)]).tolist()
    documents = Encoded(
        ids=np.concatenate([of.ids[start:end] for of, start, end in bounds]),
        supervised=np.concatenate([of.supervised[start:end] for of, start, end in bounds]),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        truncated=0,
        dropped=0,
        extra={
            name: np.concatenate([of.extra[name][start:end] for of, start, end in bounds])
            for name in picked[0][0].extra
        },
        shared=_shared(picked),
        virtual_tokens=picked[0][0].virtual_tokens,
    )
    return documents, [range(a, b) for a, b in pairwise(ends)]


def _shared(picked: Sequence[_Picked]) -> np.ndarray | None:
    known = [of.shared[block] for of, block in picked if of.shared is not None]
    return np.concatenate(known) if known else None
