"""The rows of a run: read or extracted, and split by group."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import digest
from mens_exp.config.data import DataConfig, OnBadRow, RowsData, Truncation
from mens_exp.config.objective import AssistantObjective, LastKObjective, Turns
from mens_exp.corpus import stdlib
from mens_exp.corpus.files import (
    RowsFile,
    described,
    pairs_of,
    read_own,
    records,
    refuse_leakage,
)
from mens_exp.corpus.filters import asked, filtered, refuse_nothing_left
from mens_exp.corpus.split import Side, assert_disjoint, split
from mens_exp.errors import DataError
from mens_exp.rows import quarantine
from mens_exp.rows.cache import CacheKey
from mens_exp.rows.encode import Labelling
from mens_exp.rows.readers import rows_digest

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.rows.quarantine import BadRow
    from mens_exp.rows.readers import FileOfRows
    from mens_exp.rows.schema import TrainingPair
    from mens_exp.tokenizer.protocol import Tokenizer

__all__ = ["Rows", "cache_key", "labelling_of", "load_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The three sides of a split, the hash of all rows in order, and where they come from.

    ``taken`` says how they were chosen: what was put aside, what filters refused. ``bad`` are the
    rows that were put aside.
    """

    source: str
    train: list[TrainingPair]
    val: list[TrainingPair]
    heldout: list[TrainingPair]
    sha256: str
    files: tuple[RowsFile, ...] = ()
    taken: dict[str, Any] = field(default_factory=dict)
    bad: tuple[BadRow, ...] = ()

    def record(self) -> dict[str, Any]:
        """Return files and choice for a manifest or a plan; nothing of what does not apply."""
        return ({"files": records(self.files)} if self.files else {}) | self.taken

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
        DataError: a file or a row in it is wrong, too many rows are bad, no row passes the
            filters, a side of the split is empty, or a row to validate on is also one of the
            others.
        Problems: several of them.
        MensError: a dataset of the hub cannot be had.
    """
    files: tuple[RowsFile, ...] = ()
    bad: tuple[BadRow, ...] = ()
    taken: dict[str, Any] = {}
    val = None
    if isinstance(config, RowsData):
        own, apart = read_own(config)
        pairs = pairs_of(own)
        files = (*described(config, own, "rows"), *described(config, apart or [], "validation"))
        if config.on_bad_row is OnBadRow.quarantine:
            bad = _put_aside(config, [*own, *(apart or [])], taken)
        if apart is not None:
            val = pairs_of(apart)
            refuse_leakage(pairs, val)
    else:
        pairs = stdlib.load(cache).pairs
    if asked(config.filter):
        pairs, val = _filtered(config, pairs, val, taken)
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
        taken=taken,
        bad=bad,
    )


def _put_aside(
    config: RowsData, files: list[FileOfRows], taken: dict[str, Any]
) -> tuple[BadRow, ...]:
    """Return the rows of files that were put aside, and note how many and why."""
    bad = tuple(row for file in files for row in file.bad)
    rows = len(bad) + sum(len(file.pairs) for file in files)
    quarantine.refuse_too_many(bad, rows, config.max_bad_frac)
    taken["quarantined"] = {
        "rows": rows,
        "bad": len(bad),
        "reasons": dict(sorted(quarantine.counts(bad).items())),
    }
    return bad


def _filtered(
    config: DataConfig,
    pairs: list[TrainingPair],
    val: list[TrainingPair] | None,
    taken: dict[str, Any],
) -> tuple[list[TrainingPair], list[TrainingPair] | None]:
    """Filter both kinds of rows alike, and note how many each filter refused."""
    refused: Counter[str] = Counter()
    sides = []
    for side in (pairs, val or []):
        kept, gone = filtered(side, config.filter)
        refuse_nothing_left(len(side), gone)
        refused += gone
        sides.append(kept)
    taken["filtered"] = {
        "rows": len(pairs) + len(val or []),
        "kept": len(sides[0]) + len(sides[1]),
        "refused": {name: refused[name] for name in asked(config.filter)},
    }
    return sides[0], None if val is None else sides[1]


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
