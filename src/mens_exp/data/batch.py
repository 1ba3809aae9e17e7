"""Micro-batches, packed or padded, and the packing of documents into blocks.

Shapes: B sequences, T tokens in each, M supervised tokens in all of them.

Packing is best-fit decreasing, or fills blocks up if that is better. Best fit looks at one document
at a time. Filling looks for two or three that end a block exactly, which matters where blocks hold
few documents (measured: on the standard library's rows at 512 tokens, where two documents make a
block, 0.982 of the room instead of 0.977; 0.991 is a bound). Packed blocks are kept on disk where
packing takes longer than opening.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
import torch

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.host import file_lock
from mens_exp.rows import files

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.rows.encode import Encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Ids, where documents begin and end, and which hidden states predict which tokens.

    A packed batch is one sequence (B = 1), and ``documents`` holds the bounds of what is in it; a
    padded one has ``attention_mask_BT`` and no bounds. ``predict_M`` indexes the flattened
    ``[B·T]`` hidden states, ``targets_M`` the token that each must predict. A filler is there for
    the process that would have nothing to do while others take a stream's last micro-batches.
    ``document_M`` is the number of the document that each target is of, where that is known.
    """

    input_ids_BT: torch.Tensor
    position_ids_BT: torch.Tensor
    attention_mask_BT: torch.Tensor | None
    documents: tuple[tuple[int, int], ...] | None
    predict_M: torch.Tensor
    targets_M: torch.Tensor
    tokens: int
    index: int
    is_filler: bool = False
    document_M: torch.Tensor | None = None

    def to(self, device: torch.device | str, **_: Any) -> Batch:
        """Move the tensors to a device."""
        moved: dict[str, Any] = {
            field.name: value.to(device)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def packed_batch(
    documents: Encoded,
    blocks: Sequence[Sequence[int] | np.ndarray],
    index: int,
    *,
    multiple: int = 1,
    pad_id: int = 0,
) -> Batch:
    """Join the documents of all blocks into one sequence.

    Args:
        documents: the encoded documents.
        blocks: document indices of each block.
        index: the micro-batch's place in the stream.
        multiple: fill the sequence's end up to a multiple of so many tokens. What fills it belongs
            to no document and is never learned; it only keeps the number of shapes small.
        pad_id: the id that fills it.
    """
    chosen = [document for block in blocks for document in block]
    ids, supervised, lengths = _gather(documents, chosen)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    positions = np.arange(len(ids)) - np.repeat(starts, lengths)
    predict = np.flatnonzero(supervised) - 1
    rest = -len(ids) % multiple
    return Batch(
        input_ids_BT=torch.from_numpy(np.pad(ids, (0, rest), constant_values=pad_id))[None],
        position_ids_BT=torch.from_numpy(np.pad(positions, (0, rest)))[None],
        attention_mask_BT=None,
        documents=tuple((int(s), int(e)) for s, e in zip(starts, ends, strict=True)),
        predict_M=torch.from_numpy(predict),
        targets_M=torch.from_numpy(ids[predict + 1]),
        tokens=len(ids),
        index=index,
        document_M=torch.from_numpy(np.repeat(chosen, lengths)[supervised]),
    )


def padded_batch(
    documents: Encoded, blocks: Sequence[Sequence[int] | np.ndarray], index: int, *, pad_id: int
) -> Batch:
    """Give each document a sequence of its own, padded on the right to the longest."""
    chosen = [document for block in blocks for document in block]
    ids, supervised, lengths = _gather(documents, chosen)
    width = int(lengths.max())
    inside = np.arange(width)[None] < lengths[:, None]
    ids_BT = np.full(inside.shape, pad_id, dtype=np.int64)
    supervised_BT = np.zeros(inside.shape, dtype=bool)
    ids_BT[inside], supervised_BT[inside] = ids, supervised
    predict = np.flatnonzero(supervised_BT.reshape(-1)) - 1
    return Batch(
        input_ids_BT=torch.from_numpy(ids_BT),
        position_ids_BT=torch.arange(width).expand(len(chosen), width),
        attention_mask_BT=torch.from_numpy(inside.astype(np.int64)),
        documents=None,
        predict_M=torch.from_numpy(predict),
        targets_M=torch.from_numpy(ids_BT.reshape(-1)[predict + 1]),
        tokens=len(ids),
        index=index,
        document_M=torch.from_numpy(np.repeat(chosen, lengths)[supervised]),
    )


def _gather(documents: Encoded, chosen: Sequence[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    bounds = [(documents.offsets[i], documents.offsets[i + 1]) for i in chosen]
    ids = np.concatenate([documents.ids[s:e] for s, e in bounds]).astype(np.int64)
    supervised = np.concatenate([documents.supervised[s:e] for s, e in bounds])
    return ids, supervised, np.array([e - s for s, e in bounds])


PACKING_METHOD = (
    "best_fit_decreasing or filling 1"  # raise the number when the same lengths pack otherwise
)

_TRIED = 4  # lengths that are tried with every two others; more do not fill the corpora better


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

    Longest first, each into the fullest block it fits (Johnson 1973), or each block filled up,
    where that makes fewer blocks. The result depends on the lengths alone; documents of one block
    keep their order. It takes a few microseconds a document, however many blocks there are.

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
    fitted, filled = _best_fit(sizes, capacity), _filled(sizes, capacity)
    block_of = filled if filled.max(initial=0) < fitted.max(initial=0) else fitted
    return Blocks(
        order=np.argsort(block_of, kind="stable"),
        bounds=np.concatenate([[0], np.cumsum(np.bincount(block_of))]),
    )


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the block of each document; among equally full blocks the oldest takes it.

    Blocks with the same room wait together, and the bits of one number say which rooms there are.
    """
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
    return block_of


def _filled(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the block of each document; each begins with the longest that is left."""
    supply = _Supply(sizes, capacity)
    block_of = np.empty(len(sizes), dtype=np.int64)
    block = 0
    while supply.present:
        room = capacity
        while supply.fitting(room):
            for length in supply.ending(room) if room < capacity else (supply.longest(room),):
                block_of[supply.take(length)] = block
                room -= length
        block += 1
    return block_of


class _Supply:
    """The lengths that are left; bit l of ``present`` is a length l, bit C - l of ``mirrored``."""

    def __init__(self, sizes: np.ndarray, capacity: int) -> None:
        self.capacity = capacity
        self.documents = np.argsort(sizes, kind="stable").tolist()
        ends = np.cumsum(np.bincount(sizes, minlength=capacity + 1))
        self.next = [0, *ends[:-1].tolist()]  # of each length, the document to be taken next
        self.end = ends.tolist()
        self.present = self.mirrored = 0
        for length in np.unique(sizes).tolist():
            self._flip(length)

    def _flip(self, length: int) -> None:
        self.present ^= 1 << length
        self.mirrored ^= 1 << (self.capacity - length)

    def take(self, length: int) -> int:
        """Return the first document that is left of a length, and count it out."""
        document: int = self.documents[self.next[length]]
        self.next[length] += 1
        if self.next[length] == self.end[length]:
            self._flip(length)
        return document

    def fitting(self, room: int) -> int:
        """Return the lengths up to a room, as bits."""
        return self.present & ((1 << (room + 1)) - 1)

    def longest(self, room: int) -> int:
        """Return the longest length that fits."""
        return self.fitting(room).bit_length() - 1

    def ending(self, room: int) -> tuple[int, ...]:
        """Return one, two or three lengths that fill a room to its end, else the longest."""
        if self.present >> room & 1:
            return (room,)
        if two := self._two(room):
            return two
        fitting = self.fitting(room)
        for _ in range(_TRIED):
            if not fitting:
                break
            length = fitting.bit_length() - 1
            fitting ^= 1 << length
            two = self._two(room - length)
            if two and self._has((length, *two)):
                return (length, *two)
        return (self.longest(room),)

    def _two(self, room: int) -> tuple[int, ...]:
        """Return two lengths of a sum, the one as long as can be, or nothing."""
        both = self.present & (self.mirrored >> (self.capacity - room))
        longer = both.bit_length() - 1
        pair = (longer, room - longer)
        return pair if both and self._has(pair) else ()

    def _has(self, lengths: tuple[int, ...]) -> bool:
        return all(self.end[one] - self.next[one] >= lengths.count(one) for one in lengths)


_CACHED_FROM: Final = 50_000  # documents; measured: packing fewer takes under 0.05 s


def cached_blocks(root: Path, content_sha256: str, lengths: np.ndarray, capacity: int) -> Blocks:
    """Pack documents, or open the blocks that were packed of them before.

    Args:
        root: the cache folder.
        content_sha256: hash of the documents, which says what their lengths are.
        lengths: tokens of each.
        capacity: tokens of a block.
    """
    if len(lengths) < _CACHED_FROM:
        return pack(lengths, capacity)
    key = {"content": content_sha256, "capacity": capacity, "method": PACKING_METHOD}
    directory = root / "packed" / digest(key)[:32]
    found = _open_blocks(directory)
    if found is not None:
        return found
    with file_lock(root / f".{directory.name}.lock"):
        found = _open_blocks(directory)
        if found is None:
            found = pack(lengths, capacity)
            pieces = {"order": [found.order], "bounds": [found.bounds]}
            files.store_arrays(directory, pieces, lambda _: {"key": key})
    return found


def _open_blocks(directory: Path) -> Blocks | None:
    found = files.open_arrays(directory)
    return None if found is None else Blocks(**found[0])
