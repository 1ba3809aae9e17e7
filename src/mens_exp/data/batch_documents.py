"""The documents of micro-batches, taken apart again for tests of the batches themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.rows.documents import Encoded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.data.batch import Batch

_MOST_DOCUMENTS = 4  # selected; of units that stay together, at least one
_TOKENS = 64  # of each; measured: 6 s of one core for SmolLM2


@dataclass(frozen=True, slots=True)
class _Short:
    """A document up to its last supervised token: ids, loss mask, and further values.

    The first ``shared`` of its tokens are also the first ones of the document before it.
    """

    ids: np.ndarray
    mask: np.ndarray
    extra: dict[str, np.ndarray]
    shared: int

    def cut(self, begin: int, tokens: int) -> _Short:
        """Return ``tokens`` tokens from ``begin`` on, up to the last supervised one."""
        mask = self.mask[begin : begin + tokens].copy()
        mask[0] = False  # its predecessor is missing
        part = slice(begin, begin + int(mask.nonzero()[0].max(initial=0)) + 1)
        extra = {name: one[part] for name, one in self.extra.items()}
        return _Short(self.ids[part], mask[: part.stop - begin], extra, self.shared)


def _documents(batch: Batch) -> list[_Short]:
    """Split a batch into its documents."""
    ids, targets = batch.input_ids_BT.flatten().numpy(), batch.target_places.numpy()
    learned = np.zeros(len(ids), bool)
    learned[targets] = True
    extra = {name: np.zeros(len(ids), np.float32) for name in batch.extra}
    for name, values in batch.extra.items():
        extra[name][targets] = values.numpy()
    width = batch.input_ids_BT.shape[1]
    bounds: Sequence[tuple[int, int]] = batch.documents or [
        (row * width, (row + 1) * width) for row in range(batch.input_ids_BT.shape[0])
    ]
    found = []
    for (start, end), prefix in zip(bounds, batch.prefixes or (None,) * len(bounds), strict=True):
        own = np.flatnonzero(learned[start:end])
        if len(own):
            before = np.arange(*(prefix or (0, 0)))
            places = np.append(before, np.arange(start, start + own[-1] + 1))
            mask = learned[places]
            mask[: len(before)] = False  # supervised only in the document that they are from
            further = {name: one[places] for name, one in extra.items()}
            found.append(_Short(ids[places], mask, further, len(before)))
    return found


def _cut(unit: Sequence[_Short]) -> list[_Short]:
    """Cut documents that stay together; those that share a prompt still share its end."""
    shared = unit[-1].shared
    if shared and unit[-1].mask[shared]:
        begin = max(shared - _TOKENS // 2, 0)
        return [one.cut(begin, _TOKENS) for one in unit]
    return [one.cut(max(len(one.ids) - _TOKENS, 0), _TOKENS) for one in unit]


def short_documents(batches: Sequence[Batch], *, together: int = 1) -> Encoded:
    """Select the shortest documents of micro-batches, each cut to its last supervised tokens.

    Args:
        batches: the micro-batches.
        together: documents that stay together.
    """
    documents = [one for batch in batches for one in _documents(batch)]
    units = [_cut(documents[i : i + together]) for i in range(0, len(documents), together)]
    whole = [unit for unit in units if all(one.mask.any() for one in unit)]
    whole.sort(key=lambda unit: sum(len(one.ids) for one in unit))
    return _encoded(
        [one for unit in whole[: max(_MOST_DOCUMENTS // together, 1)] for one in unit], together
    )


def whole_documents(batch: Batch, together: int = 1) -> Encoded:
    """Return the documents of a micro-batch, each up to its last supervised token.

    Args:
        batch: the micro-batch.
        together: documents that stay together.
    """
    return _encoded(_documents(batch), together)


def _encoded(chosen: Sequence[_Short], together: int) -> Encoded:
    lengths = [len(one.ids) for one in chosen]
    return Encoded(
        ids=np.concatenate([one.ids for one in chosen]).astype(np.int32),
        supervised=np.concatenate([one.mask for one in chosen]),
        offsets=np.cumsum([0, *lengths], dtype=np.int64),
        truncated=0,
        dropped=0,
        extra={n: np.concatenate([one.extra[n] for one in chosen]) for n in chosen[0].extra},
        together=together,
    )


def units_of(documents: Encoded) -> list[range]:
    """Return the indices of documents that stay together, unit by unit."""
    together = documents.together
    return [range(i, i + together) for i in range(0, len(documents), together)]
