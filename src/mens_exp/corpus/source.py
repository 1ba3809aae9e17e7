"""The rows of a run: read or extracted, and split by group."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.config.data import DataConfig, JsonlData
from mens_exp.corpus import stdlib
from mens_exp.corpus.split import Side, assert_disjoint, split
from mens_exp.errors import DataError
from mens_exp.rows.cache import CacheKey
from mens_exp.rows.readers import read_jsonl, rows_digest

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.hf import HfTokenizer

__all__ = ["Rows", "cache_key", "load_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The three sides of a split, and the hash of all rows in order."""

    source: str
    train: list[TrainingPair]
    val: list[TrainingPair]
    heldout: list[TrainingPair]
    sha256: str

    def side_sha256(self, side: Side) -> str:
        """Hash the rows of one side."""
        return rows_digest(getattr(self, side.value))


def load_rows(config: DataConfig, cache: Path) -> Rows:
    """Read or extract the rows that a configuration asks for, and split them.

    Args:
        config: the `data` group.
        cache: folder where an extraction is kept.

    Raises:
        DataError: the file or a row in it is wrong, or a side of the split is empty.
    """
    if isinstance(config, JsonlData):
        pairs = read_jsonl(Path(config.path).expanduser())
    else:
        pairs = stdlib.load(cache).pairs
    sides = split(pairs, config.val_frac, config.heldout_frac)
    assert_disjoint(sides)
    for side in (Side.TRAIN, Side.VAL):
        if not sides[side]:
            raise DataError(
                f"no row is left for {side.value}",
                where="data",
                found=f"{len(pairs)} rows",
                expected="at least three groups, or a larger share",
                remedy="add rows, or give rows that may be parted different `group` values",
            )
    return Rows(
        source=config.source,
        train=sides[Side.TRAIN],
        val=sides[Side.VAL],
        heldout=sides[Side.HELDOUT],
        sha256=rows_digest(pairs),
    )


def cache_key(config: RunConfig, rows: Rows, side: Side, tokenizer: HfTokenizer) -> CacheKey:
    """Name the encoding of one side of the rows."""
    return CacheKey(
        rows_sha256=rows.side_sha256(side),
        tokenizer_sha256=tokenizer.sha256,
        template_sha256=tokenizer.template_sha256,
        objective=config.objective.labels,
        seq_len=config.data.seq_len,
    )
