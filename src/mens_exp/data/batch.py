"""One micro-batch, packed or padded.

Shapes: B sequences, T tokens in each, M supervised tokens in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.rows.encode import Encoded

__all__ = ["Batch", "packed_batch", "padded_batch"]


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
