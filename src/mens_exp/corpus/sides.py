"""The rows of a run by side, and what is recorded of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.corpus.files import RowsFile, records
from mens_exp.errors import DataError
from mens_exp.rows.readers import rows_digest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.corpus.split import Side
    from mens_exp.rows.quarantine import BadRow
    from mens_exp.rows.schema import TrainingPair

__all__ = ["Rows", "refuse_empty"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The three sides of a split, the hash of all rows in order, and where they come from.

    ``taken`` says how they were chosen: what was put aside, what filters refused, how a
    mix was drawn. ``bad`` are the
    rows that were put aside. Of rows that are streamed these are the first window's. Where rows
    stay on disk, ``sides_sha256`` are the hashes of the sides, which would take reading them again.
    """

    source: str
    train: Sequence[TrainingPair]
    val: Sequence[TrainingPair]
    heldout: Sequence[TrainingPair]
    sha256: str
    files: tuple[RowsFile, ...] = ()
    taken: dict[str, Any] = field(default_factory=dict)
    bad: tuple[BadRow, ...] = ()
    streamed: bool = False
    sides_sha256: Mapping[Side, str] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return files and choice for a manifest or a plan; nothing of what does not apply."""
        return ({"files": records(self.files)} if self.files else {}) | self.taken

    def side_sha256(self, side: Side) -> str:
        """Hash the rows of one side."""
        return self.sides_sha256.get(side) or rows_digest(getattr(self, side.value))


def refuse_empty(side: Side, rows: int) -> DataError:
    """Return that a side which a run needs has none of so many rows."""
    return DataError(
        f"no row is left for {side.value}",
        where="data",
        found=f"{rows} rows",
        expected="at least three groups, or a larger share",
        remedy="add rows, or give rows that may be parted different `group` values",
    )
