"""Packed blocks, kept on disk where packing takes longer than opening."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.wait_lock import waiting
from mens_exp.data.packing import PACKING_METHOD, Blocks, pack
from mens_exp.rows import arrays

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np

__all__ = ["packed"]

_KEPT_FROM: Final = 50_000  # documents; measured: packing fewer takes under 0.05 s


def packed(root: Path, content_sha256: str, lengths: np.ndarray, capacity: int) -> Blocks:
    """Pack documents, or open the blocks that were packed of them before.

    Args:
        root: the cache folder.
        content_sha256: hash of the documents, which says what their lengths are.
        lengths: tokens of each.
        capacity: tokens of a block.
    """
    if len(lengths) < _KEPT_FROM:
        return pack(lengths, capacity)
    key = {"content": content_sha256, "capacity": capacity, "method": PACKING_METHOD}
    directory = root / "packed" / digest(key)[:32]
    found = _open(directory)
    if found is not None:
        return found
    with waiting(root / f".{directory.name}.lock"):
        found = _open(directory)
        if found is None:
            found = pack(lengths, capacity)
            pieces = {"order": [found.order], "bounds": [found.bounds]}
            arrays.store(directory, pieces, lambda _: {"key": key})
    return found


def _open(directory: Path) -> Blocks | None:
    found = arrays.opened(directory)
    return None if found is None else Blocks(**found[0])
