"""Micro-batches of rows that are read while training.

Each window of rows is encoded, packed and shuffled by itself: an epoch is its windows one after the
other, and in each the blocks are permuted by seed, epoch and window. With all rows in one window
that is the order of a run that read them first. Micro-batches are cut out of the blocks without
regard to windows and epochs.

The state is the position, and the place of the window that it lies in: the window is read and
packed again, and what was taken of it is left out. Every rank reads all rows and builds its own
share of the micro-batches, so that the order is the same for any number of them.
"""

from __future__ import annotations

import copy
from collections import deque
from dataclasses import asdict, dataclass, replace
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.corpus.split import Side
from mens_exp.data.packing import Blocks, pack, single
from mens_exp.data.stream import MicroBatches, permutation
from mens_exp.errors import DataError
from mens_exp.rows.encode import Encoded
from mens_exp.rows.readers import rows_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.config.data import DataConfig
    from mens_exp.corpus.streamed import RowStream, Window
    from mens_exp.data.batch import Batch
    from mens_exp.rows.schema import TrainingPair

__all__ = ["StreamedMicroBatches"]

_Picked = tuple[Encoded, np.ndarray]  # documents, and which of them are one block


@dataclass(frozen=True, kw_only=True, slots=True)
class _Begun:
    """A window that was begun: the place of its first block among all, and that of its rows.

    ``before`` and ``counts`` are of all documents up to its beginning and its end, ``read`` says
    what the rows up to its end were.
    """

    first: int
    rows: dict[str, Any]
    before: dict[str, int]
    counts: dict[str, int]
    read: dict[str, Any]


class StreamedMicroBatches(MicroBatches):
    """Iterate over micro-batches from a position, reading rows as they are needed."""

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
        """Lay out a stream.

        Args:
            rows: begins to read rows.
            first: the training rows of an epoch's first window.
            documents: the same, encoded.
            encode: encodes rows.
            data: how they are packed into which micro-batches.
            seed: seed of the order.
            total: micro-batches in the stream.
            pad_id: id that fills padding.
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
        """Build one micro-batch; what stands before it in its window is read for it."""
        blocks = self._blocks_from(index * self.micro_batch_size)
        return self._joined(*_together(list(islice(blocks, self.micro_batch_size))), index)

    def state_dict(self) -> dict[str, Any]:
        """Return the position, and the place of the window that it lies in."""
        begun = self._at(self.position * self.micro_batch_size)
        window = None if begun is None else asdict(begun)
        return {"position": self.position, "window": copy.deepcopy(window)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Start the next iteration from a saved position.

        Raises:
            RequestError: it lies inside what these ranks take together.
        """
        super().load_state_dict(state)
        window = state["window"]
        self._begun = deque() if window is None else deque([_Begun(**window)])

    def consumed(self) -> dict[str, Any]:
        """Say what was read and encoded for the micro-batches that were taken."""
        begun = self._at(max(self.position * self.micro_batch_size - 1, 0))
        return {} if begun is None else {**begun.read, **begun.counts}

    def _at(self, place: int) -> _Begun | None:
        """Find the last window that begins at a block or before it."""
        return next((one for one in reversed(self._begun) if one.first <= place), None)

    def _blocks_from(self, wanted: int) -> Iterator[_Picked]:
        """Yield blocks without end, from one that is counted over all epochs."""
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
                "the first rows are no longer what they were when the run began",
                where="data",
                found=f"epoch {window.epoch}",
                remedy="put the files back as they were, and go on with resume=<run>",
            )
        return self.documents

    def _note(self, begun: _Begun) -> None:
        """Remember where a window began, and forget those that lie behind the position."""
        while self._begun and self._begun[-1].first >= begun.first:
            self._begun.pop()  # begun before, from an earlier position
        self._begun.append(begun)
        taken = self.position * self.micro_batch_size
        while len(self._begun) > 1 and self._begun[1].first < taken:
            self._begun.popleft()


def _added(counts: dict[str, int], documents: Encoded) -> dict[str, int]:
    return {
        "documents": counts["documents"] + len(documents),
        "truncated": counts["truncated"] + documents.truncated,
        "dropped": counts["dropped"] + documents.dropped,
        "short": counts.get("short", 0) + documents.short,  # older checkpoints did not count them
    }


def _blocks(documents: Encoded, data: DataConfig) -> Blocks:
    if data.packing:
        return pack(documents.lengths, data.seq_len)
    return single(len(documents))


def _together(picked: Sequence[_Picked]) -> tuple[Encoded, list[range]]:
    """Copy the documents of some blocks, which may be of two windows, out of theirs."""
    bounds = [(of, of.offsets[i], of.offsets[i + 1]) for of, block in picked for i in block]
    lengths = [int(end - start) for _, start, end in bounds]
    ends = np.cumsum([0, *(len(block) for _, block in picked)]).tolist()
    documents = Encoded(
        ids=np.concatenate([of.ids[start:end] for of, start, end in bounds]),
        supervised=np.concatenate([of.supervised[start:end] for of, start, end in bounds]),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        truncated=0,
        dropped=0,
    )
    return documents, [range(a, b) for a, b in pairwise(ends)]
