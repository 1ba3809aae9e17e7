"""The sides of groups that are known by 64 bits of their hash, of millions of them at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mens_exp.corpus.split import Side, ranks

if TYPE_CHECKING:
    from array import array

    from numpy.typing import NDArray

__all__ = ["Bounds", "Heads", "bounds_of", "distinct"]

Heads: TypeAlias = "NDArray[np.uint64]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds of the sides among the heads: held out up to one, validated on from another.

    ``ranked`` says that they follow the ranks of few groups, as `corpus.split.split` has it.
    """

    heldout_until: int
    val_from: int
    ranked: bool

    def side(self, head: int) -> Side:
        """Return the side of a group."""
        if head <= self.heldout_until:
            return Side.HELDOUT
        return Side.VAL if head >= self.val_from else Side.TRAIN

    def masks(self, heads: Heads) -> dict[Side, NDArray[np.bool_]]:
        """Tell which groups are on each side."""
        none = np.zeros(len(heads), bool)
        held = heads <= np.uint64(self.heldout_until) if self.heldout_until >= 0 else none
        val = heads >= np.uint64(self.val_from) if self.val_from < 2**64 else none
        return {Side.TRAIN: ~(held | val), Side.VAL: val, Side.HELDOUT: held}


def distinct(heads: array[int] | Heads) -> Heads:
    """Return each head once, in their order."""
    return np.unique(np.asarray(heads, dtype=np.uint64))


def bounds_of(groups: Heads, val_frac: float, heldout_frac: float) -> Bounds:
    """Return where the sides lie, for groups that are `distinct`.

    Args:
        groups: the heads of all groups.
        val_frac: share of the groups for validation, in [0, 1).
        heldout_frac: share of the groups to hold out, in [0, 1).
    """
    positions = np.ldexp((groups >> np.uint64(11)).astype(np.float64), -53)  # as position_of has it
    total = len(groups)
    heldout = int(np.searchsorted(positions, heldout_frac))
    val = total - max(int(np.searchsorted(positions, 1 - val_frac)), heldout)
    counts = [(1.0, total - heldout - val), (val_frac, val), (heldout_frac, heldout)]
    ranked = any(share > 0 and not count for share, count in counts)
    if ranked:
        heldout, val = ranks(total, val_frac, heldout_frac)
    return Bounds(
        heldout_until=int(groups[heldout - 1]) if heldout else -1,
        val_from=int(groups[total - val]) if val else 2**64,
        ranked=ranked,
    )
