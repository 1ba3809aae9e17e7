"""Best-fit-decreasing bin packing of documents into blocks."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["pack"]


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put documents into blocks of at most ``capacity`` tokens.

    Longest first, each into the fullest block it fits (Johnson 1973). The result depends on the
    lengths alone; documents of one block keep their order.

    Args:
        lengths: tokens of each document, none over ``capacity``.
        capacity: tokens of a block.

    Returns:
        The document indices of each block.
    """
    blocks: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, block), ascending
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[document]
        assert length <= capacity, "encoding has cut documents to the sequence length"
        place = bisect_left(room, (length, -1))
        if place < len(room):
            left, block = room.pop(place)
        else:
            left, block = capacity, len(blocks)
            blocks.append([])
        blocks[block].append(document)
        insort(room, (left - length, block))
    return [sorted(block) for block in blocks]
