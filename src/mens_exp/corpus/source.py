"""The rows of a run: read or extracted, and split by group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.artifacts.digest import digest
from mens_exp.config.data import DataConfig, RowsData, Truncation
from mens_exp.config.objective import AssistantObjective, LastKObjective, Turns
from mens_exp.corpus import stdlib
from mens_exp.corpus.files import RowsFile, described, pairs_of, read_own, refuse_leakage
from mens_exp.corpus.split import Side, assert_disjoint, split
from mens_exp.errors import DataError
from mens_exp.rows.cache import CacheKey
from mens_exp.rows.encode import Labelling
from mens_exp.rows.readers import rows_digest

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["Rows", "cache_key", "labelling_of", "load_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The three sides of a split, and the hash of all rows in order."""

    source: str
    train: list[TrainingPair]
    val: list[TrainingPair]
    heldout: list[TrainingPair]
    sha256: str
    files: tuple[RowsFile, ...] = ()

    def side_sha256(self, side: Side) -> str:
        """Hash the rows of one side."""
        return rows_digest(getattr(self, side.value))


def load_rows(config: DataConfig, cache: Path) -> Rows:
    """Read or extract the rows that a configuration asks for, and split them.

    Where `data.val_path` or `data.val_split` names rows to validate on, no other row does;
    `heldout_frac` holds out other rows either way.

    Args:
        config: the `data` group.
        cache: folder where an extraction is kept.

    Raises:
        DataError: a file or a row in it is wrong, a side of the split is empty, or a row to
            validate on is also one of the others.
        Problems: several of them.
        MensError: a dataset of the hub cannot be had.
    """
    files: tuple[RowsFile, ...] = ()
    val = None
    if isinstance(config, RowsData):
        own, apart = read_own(config)
        pairs = pairs_of(own)
        files = (*described(config, own, "rows"), *described(config, apart or [], "validation"))
        if apart is not None:
            val = pairs_of(apart)
            refuse_leakage(pairs, val)
    else:
        pairs = stdlib.load(cache).pairs
    sides = split(pairs, config.val_frac if val is None else 0, config.heldout_frac)
    if val is not None:
        sides[Side.VAL] = val
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
        sha256=rows_digest([*pairs, *(val or [])]),
        files=files,
    )


def labelling_of(config: RunConfig) -> Labelling:
    """Return how a configuration turns rows into ids and masks."""
    objective = config.objective
    turns = objective.turns if isinstance(objective, AssistantObjective) else Turns.all
    ends = isinstance(objective, LastKObjective)
    usual = Truncation.left if ends else Truncation.right
    return Labelling(
        objective=objective.labels,
        turns=turns.value,
        seq_len=config.data.seq_len,
        truncation=(config.data.truncation or usual).value,
        k=objective.k if isinstance(objective, LastKObjective) else 0,
    )


def cache_key(config: RunConfig, rows: Rows, side: Side, tokenizer: Tokenizer) -> CacheKey:
    """Name the encoding of one side of the rows."""
    return CacheKey(
        rows_sha256=rows.side_sha256(side),
        tokenizer_sha256=tokenizer.sha256,
        template_sha256=tokenizer.template_sha256,
        special_tokens_sha256=digest(tokenizer.special_tokens),
        allow_control_text=tokenizer.allow_control_text,
        labelling=labelling_of(config),
    )
