"""Packed and padded micro-batches.

Shapes: B sequences, T tokens in each, M supervised tokens in all of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.rows.documents import Encoded


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Ids, document boundaries, and the hidden states that predict each target token.

    A packed batch is one sequence (B = 1), and ``documents`` holds the document bounds; a padded
    one has ``attention_mask_BT`` and no bounds. ``predict_M`` indexes the flattened ``[B·T]``
    hidden states, and ``targets_M`` holds the token that each must predict. A filler batch is for
    a process that would otherwise be idle while others take a stream's last micro-batches.
    ``tokens`` counts tokens without padding, and the virtual tokens of an adapter, for which a
    batch has no places until :func:`with_virtual_tokens`. ``document_M`` is the document number of
    each target, if known; documents that stay together have consecutive numbers. ``extra`` holds
    further values of each target, ``[M]``, which an objective asked for. ``on_host`` is the
    micro-batch that this one was copied from.
    ``prefixes`` has the bounds of the prefix that each document continues, the first tokens of
    another document, or None. ``documents`` then bounds its own tokens only, the end of the prefix
    predicts its first target, and ``places_M`` has the indices of targets.
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
    extra: dict[str, torch.Tensor] = field(default_factory=dict)
    on_host: Batch | None = None
    prefixes: tuple[tuple[int, int] | None, ...] | None = None
    places_M: torch.Tensor | None = None

    @property
    def target_places(self) -> torch.Tensor:
        """The index of each target in the flattened ids, int64 ``[M]``."""
        return self.predict_M + 1 if self.places_M is None else self.places_M

    @property
    def host(self) -> Batch:
        """The same micro-batch in host memory; reading it does not wait for the device."""
        return self if self.on_host is None else self.on_host

    def document_lengths(self) -> torch.Tensor:
        """Return the tokens of each position's document, int64 ``[B, T]``; 0 at padding."""
        mask_BT = self.attention_mask_BT
        if mask_BT is not None:
            return mask_BT * mask_BT.sum(dim=1, keepdim=True)
        lengths = np.zeros(self.input_ids_BT.shape, dtype=np.int64)
        bounds = self.documents or ()
        prefixes = self.prefixes or (None,) * len(bounds)
        for (start, end), prefix in zip(bounds, prefixes, strict=True):
            before = 0 if prefix is None else prefix[1] - prefix[0]
            lengths[0, start:end] = before + end - start
        return _sent(torch.from_numpy(lengths), self.input_ids_BT.device)

    def to(self, device: torch.device | str, **_: Any) -> Batch:
        """Copy the tensors to a device, asynchronously to a GPU."""
        device = torch.device(device)
        moved: dict[str, Any] = {
            one.name: _sent(value, device)
            for one in fields(self)
            if isinstance(value := getattr(self, one.name), torch.Tensor)
        }
        extra = {name: _sent(values, device) for name, values in self.extra.items()}
        on_host = None if device.type == "cpu" else self.host
        return replace(self, **moved, extra=extra, on_host=on_host)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device, asynchronously from pinned memory to a GPU."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=device.type != "cpu")


def packed_batch(
    documents: Encoded,
    blocks: Sequence[Sequence[int] | np.ndarray],
    index: int,
    *,
    multiple: int = 1,
    pad_id: int = 0,
) -> Batch:
    """Concatenate the documents of all blocks into one sequence.

    Tokens that a document shares with the one before it are left out; it attends to them there.

    Args:
        documents: the encoded documents.
        blocks: document indices of each block.
        index: index of the micro-batch in the stream.
        multiple: pad the end of the sequence to a multiple of this many tokens. Padding belongs to
            no document and is never supervised; it only limits the number of shapes.
        pad_id: token id used for padding.
    """
    chosen = np.array([document for block in blocks for document in block])
    shared = np.zeros_like(chosen) if documents.shared is None else documents.shared[chosen]
    later = np.flatnonzero(shared)
    assert np.array_equal(chosen[later - 1], chosen[later] - 1), "pairs stay together"
    bounds = _bounds(documents, chosen, shared)
    ids, supervised, lengths = _gather(documents, bounds)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    positions = np.arange(len(ids)) - np.repeat(starts - shared, lengths)
    before = np.arange(len(ids)) - 1
    before[starts[later]] = starts[later - 1] + shared[later] - 1
    rest = -len(ids) % multiple
    return Batch(
        input_ids_BT=torch.from_numpy(np.pad(ids, (0, rest), constant_values=pad_id))[None],
        position_ids_BT=torch.from_numpy(np.pad(positions, (0, rest)))[None],
        attention_mask_BT=None,
        documents=tuple(zip(starts.tolist(), ends.tolist(), strict=True)),
        predict_M=torch.from_numpy(before[supervised]),
        targets_M=torch.from_numpy(ids[supervised]),
        tokens=len(ids) + documents.virtual_tokens * (len(chosen) - len(later)),
        index=index,
        document_M=torch.from_numpy(np.repeat(chosen, lengths)[supervised]),
        extra=_extra(documents, bounds, supervised),
        prefixes=_prefixes(starts, shared) if len(later) else None,
        places_M=torch.from_numpy(np.flatnonzero(supervised)) if len(later) else None,
    )


def _prefixes(starts: np.ndarray, shared: np.ndarray) -> tuple[tuple[int, int] | None, ...]:
    """Return, for each document, the bounds of the tokens shared with the one before it."""
    return tuple(
        (int(starts[i - 1]), int(starts[i - 1] + tokens)) if tokens else None
        for i, tokens in enumerate(shared)
    )


def padded_batch(
    documents: Encoded, blocks: Sequence[Sequence[int] | np.ndarray], index: int, *, pad_id: int
) -> Batch:
    """Put each document in a separate sequence, right-padded to the longest."""
    chosen = np.array([document for block in blocks for document in block])
    bounds = _bounds(documents, chosen, np.zeros_like(chosen))
    ids, supervised, lengths = _gather(documents, bounds)
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
        tokens=len(ids) + documents.virtual_tokens * len(chosen),
        index=index,
        document_M=torch.from_numpy(np.repeat(chosen, lengths)[supervised]),
        extra=_extra(documents, bounds, supervised),
    )


# Tokens. oneDNN builds and caches a kernel for each new length, so using few lengths keeps steps
# fast and memory constant (measured: experiments/LOG.md).
SHAPE_MULTIPLE: Final = 32


def with_virtual_tokens(batch: Batch, ids: Sequence[int]) -> Batch:
    """Return a micro-batch whose documents begin with the same virtual tokens.

    Targets stay as they are, and so does ``tokens``, which includes virtual tokens. Documents that
    share a prefix also share its virtual tokens.

    Args:
        batch: the micro-batch.
        ids: ids of the virtual tokens; if there are none, the batch is returned unchanged.
    """
    if not ids:
        return batch
    placed = _with_virtual_rows if batch.documents is None else _with_virtual_documents
    return replace(placed(batch, torch.tensor(ids)), on_host=None)


def _with_virtual_rows(batch: Batch, ids_K: torch.Tensor) -> Batch:
    """Put virtual tokens before each row of a padded micro-batch."""
    rows, width = batch.input_ids_BT.shape
    wider, device = width + len(ids_K), batch.input_ids_BT.device
    ids_BK = _sent(ids_K, device).expand(rows, -1)
    mask_BT = batch.attention_mask_BT
    assert mask_BT is not None, "padded rows have a mask"
    places_M = batch.predict_M
    return replace(
        batch,
        input_ids_BT=torch.cat([ids_BK, batch.input_ids_BT], dim=1),
        position_ids_BT=torch.arange(wider, device=device).expand(rows, wider),
        attention_mask_BT=torch.cat([torch.ones_like(ids_BK, dtype=mask_BT.dtype), mask_BT], dim=1),
        predict_M=places_M + (places_M // width + 1) * len(ids_K),
    )


def _with_virtual_documents(batch: Batch, ids_K: torch.Tensor) -> Batch:
    """Put virtual tokens before each document of a packed one, except those with a prefix."""
    assert batch.documents is not None, "the caller has asked"
    bounds, many = np.array(batch.documents), len(ids_K)
    prefixes = batch.prefixes or (None,) * len(bounds)
    starts = bounds[[prefix is None for prefix in prefixes], 0]
    end, width = int(bounds[-1, 1]), batch.input_ids_BT.shape[1]
    shift = many * np.searchsorted(starts, np.arange(end + 1), side="right")  # of each old place
    virtual = np.tile(np.arange(width, width + many), len(starts))
    places = np.insert(np.arange(end), np.repeat(starts, many), virtual)
    places = np.pad(places, (0, -len(places) % SHAPE_MULTIPLE), constant_values=width)
    device = batch.input_ids_BT.device
    places_T, shift_T = (_sent(torch.from_numpy(one), device) for one in (places, shift))

    def moved(old_BT: torch.Tensor, virtual_K: torch.Tensor) -> torch.Tensor:
        return torch.cat([old_BT[0], _sent(virtual_K, device)])[places_T][None]

    def bounded(first: int, last: int, *, begins: bool) -> tuple[int, int]:
        return int(first + shift[first]) - many * begins, int(last + shift[last - 1])

    own = [bounded(*pair, begins=one is None) for pair, one in zip(bounds, prefixes, strict=True)]
    before = [None if one is None else bounded(*one, begins=True) for one in prefixes]
    after_M = batch.places_M
    return replace(
        batch,
        input_ids_BT=moved(batch.input_ids_BT, ids_K),
        position_ids_BT=moved(batch.position_ids_BT + many, torch.arange(many)),
        documents=tuple(own),
        predict_M=batch.predict_M + shift_T[batch.predict_M],
        prefixes=None if batch.prefixes is None else tuple(before),
        places_M=None if after_M is None else after_M + shift_T[after_M],
    )


_Spans: TypeAlias = "list[tuple[int, int]]"


def _bounds(documents: Encoded, chosen: np.ndarray, shared: np.ndarray) -> _Spans:
    """Return start and end of documents in the arrays, without shared tokens."""
    starts, ends = documents.offsets[chosen] + shared, documents.offsets[chosen + 1]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def _extra(documents: Encoded, bounds: _Spans, supervised: np.ndarray) -> dict[str, torch.Tensor]:
    """Return the further values of the targets of some documents."""
    return {
        name: torch.from_numpy(np.concatenate([values[s:e] for s, e in bounds])[supervised])
        for name, values in documents.extra.items()
    }


def _gather(documents: Encoded, bounds: _Spans) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids = np.concatenate([documents.ids[s:e] for s, e in bounds]).astype(np.int64)
    supervised = np.concatenate([documents.supervised[s:e] for s, e in bounds])
    return ids, supervised, np.array([e - s for s, e in bounds])
