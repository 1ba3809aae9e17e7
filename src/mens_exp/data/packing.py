"""Best-fit-decreasing bin packing of documents into blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import overload

import numpy as np

__all__ = ["PACKING_METHOD", "Blocks", "pack", "single"]

PACKING_METHOD = "best_fit_decreasing 1"  # raise the number when the same lengths pack otherwise


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocks(Sequence[np.ndarray]):
    """Document indices of each block, one after the other; ``bounds`` says where each begins."""

    order: np.ndarray  # [documents] int64
    bounds: np.ndarray  # [blocks + 1] int64

    def __len__(self) -> int:
        """Count blocks."""
        return len(self.bounds) - 1

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> list[np.ndarray]: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | list[np.ndarray]:
        """Return the documents of one block."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        return self.order[self.bounds[place] : self.bounds[place + 1]]

    def of(self, chosen: np.ndarray) -> Blocks:
        """Return the same blocks where document ``i`` is ``chosen[i]``."""
        return Blocks(order=chosen[self.order], bounds=self.bounds)


def single(documents: int) -> Blocks:
    """Give each document a block of its own."""
    return Blocks(order=np.arange(documents), bounds=np.arange(documents + 1))


def pack(lengths: Sequence[int] | np.ndarray, capacity: int) -> Blocks:
    """Put documents into blocks of at most ``capacity`` tokens.

    Longest first, each into the fullest block it fits (Johnson 1973), among equally full ones into
    the oldest. The result depends on the lengths alone; documents of one block keep their order.
    Blocks with the same room wait together, and the bits of one number say which rooms there are,
    so that a document costs about a microsecond however many blocks there are.

    Args:
        lengths: tokens of each document, at least one and none over ``capacity``.
        capacity: tokens of a block.

    Returns:
        The document indices of each block.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    assert not len(sizes) or int(sizes.max()) <= capacity, (
        "encoding has cut documents to the sequence length"
    )
    longest_first = np.argsort(-sizes, kind="stable")
    waiting: list[list[int]] = [[] for _ in range(capacity + 1)]  # heaps of blocks, by their room
    rooms = 0  # bit r: some block has room for r tokens
    blocks = 0
    chosen = []
    for length in sizes[longest_first].tolist():
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            block = heappop(waiting[room])
            if not waiting[room]:
                rooms ^= 1 << room
        else:
            room, block = capacity, blocks
            blocks += 1
        chosen.append(block)
        left = room - length
        heappush(waiting[left], block)
        rooms |= 1 << left
    block_of = np.empty(len(sizes), dtype=np.int64)
    block_of[longest_first] = chosen
    return Blocks(
        order=np.argsort(block_of, kind="stable"),
        bounds=np.concatenate([[0], np.cumsum(np.bincount(block_of, minlength=blocks))]),
    )
