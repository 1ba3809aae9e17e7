"""Rows that are read while training: a window of them at a time, epoch after epoch, from any place.

`datasets` reads and knows its place; a window is what is read between two places. All that chance
decides happens inside a window, so its place and number are all there is to remember: the same rows
are read again from there, and no buffer has to be kept.

Sides are decided by a row's group as ever, but only the first window's rows validate or are held
out; later ones of those sides are passed over, so that nothing of them is trained on.
"""

from __future__ import annotations

import copy
import hashlib
from collections import Counter
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from mens_exp.config.data import HubData, JsonlData, OnBadRow
from mens_exp.corpus import files, hub_rows
from mens_exp.corpus.filters import filtered
from mens_exp.corpus.split import Side, group_of, side_of
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.rows.decode import Located, decoded_rows
from mens_exp.rows.files import resolve_files
from mens_exp.rows.readers import RowReader, rows_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from mens_exp.config.data import RowsData
    from mens_exp.rows.quarantine import BadRow
    from mens_exp.rows.schema import TrainingPair

__all__ = ["RowStream", "Window", "validates_apart"]

_MOST_PROBLEMS = 20
# Bytes of lines and rows that were read; rows put aside; refused by a filter; passed over for their
# side, or because they are among the rows to validate on; and what is left to train on.
_TOTALS = ("bytes", "rows", "bad", "filtered", "other_sides", "validated_on", "trained_on")


def validates_apart(config: RowsData) -> bool:
    """Tell whether rows to validate on are named apart."""
    named = config.val_path if isinstance(config, JsonlData) else getattr(config, "val_split", None)
    return named is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Rows read between two places, by side; ``totals`` count from the first row of all.

    ``rows_sha256`` chains the digests of all windows up to this one.
    """

    epoch: int
    number: int  # in its epoch
    sides: dict[Side, list[TrainingPair]]
    bad: tuple[BadRow, ...]
    totals: dict[str, int]
    rows_sha256: str


class RowStream:
    """Reads windows of ``data.shuffle_buffer`` rows, without end; its place can be saved."""

    def __init__(self, config: RowsData, val: Sequence[TrainingPair] | None) -> None:
        """Stand before the first row.

        Args:
            config: the `data` group.
            val: the rows to validate on, where they are named apart; nothing that shares a group
                with them is trained on.
        """
        self._config = config
        self._apart = None if val is None else {group_of(pair) for pair in val}
        self._epoch = self._number = 0
        self._row = 0  # of a split, in its epoch
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._trained_before = 0  # rows of earlier epochs
        self._sha256 = ""
        self._place: Any = None
        self._dataset: Any = None
        self._rows: Iterator[Located] | None = None
        self._reader: RowReader | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the place of the next window."""
        place = self._place if self._dataset is None else self._dataset.state_dict()
        return {
            "epoch": self._epoch,
            "number": self._number,
            "row": self._row,
            "place": copy.deepcopy(place),
            "totals": dict(self._totals),
            "trained_before": self._trained_before,
            "sha256": self._sha256,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Stand before the window whose place was saved."""
        self._epoch, self._number, self._row = state["epoch"], state["number"], state["row"]
        self._totals, self._sha256 = dict(state["totals"]), state["sha256"]
        self._trained_before = state["trained_before"]
        self._place = copy.deepcopy(state["place"])
        self._dataset = self._rows = self._reader = None

    def next_window(self) -> Window:
        """Read the next window; after the last row comes the first again.

        Raises:
            DataError: a row is wrong, too many are, or nothing of an epoch is trained on.
            Problems: several rows are wrong.
            MensError: the files or the dataset cannot be had.
        """
        rows = self._read()
        while not rows:
            self._end_epoch()
            rows = self._read()
        pairs, bad = self._pairs_of(rows)
        self._totals["rows"] += len(rows)
        self._totals["bytes"] += sum(len(row.raw) + 1 for row in rows if row.raw)
        self._totals["bad"] += len(bad)
        self._refuse_too_many(bad)
        kept, _ = filtered(pairs, self._config.filter)
        self._totals["filtered"] += len(pairs) - len(kept)
        chained = f"{self._sha256}{rows_digest(pairs)}"
        self._sha256 = hashlib.sha256(chained.encode()).hexdigest()
        window = Window(
            epoch=self._epoch,
            number=self._number,
            sides=self._sides(kept),
            bad=bad,
            totals=dict(self._totals),
            rows_sha256=self._sha256,
        )
        self._number += 1
        return window

    def _read(self) -> list[Located]:
        if self._rows is None:
            self._dataset = _dataset(self._config)
            if self._place is not None:
                self._dataset.load_state_dict(self._place)
            self._rows = self._located()
        return list(islice(self._rows, self._config.shuffle_buffer))

    def _located(self) -> Iterator[Located]:
        config = self._config
        if isinstance(config, HubData):
            name = hub_rows.name(config, config.split)
            for row in hub_rows.examples(config, self._dataset):
                self._row += 1
                yield Located(f"{name}:{self._row}", row)
        else:
            yield from (Located(*example["located"]) for example in self._dataset)

    def _end_epoch(self) -> None:
        if self._totals["trained_on"] == self._trained_before:
            raise DataError(
                "no row is left to train on",
                where="data",
                found=f"{self._totals['rows']} rows",
                expected="rows of several groups that pass the filters",
            )
        self._trained_before = self._totals["trained_on"]
        self._epoch, self._number, self._row = self._epoch + 1, 0, 0
        self._place = self._dataset = self._rows = self._reader = None

    def _pairs_of(self, rows: Sequence[Located]) -> tuple[list[TrainingPair], tuple[BadRow, ...]]:
        """Read rows as those of files are read; the format is settled for each file."""
        pairs: list[TrainingPair] = []
        bad: list[BadRow] = []
        problems: list[MensError] = []
        for located in rows:
            name = located.where.rpartition(":")[0]
            if self._reader is None or self._reader.name != name:
                self._reader = RowReader(name, files.how(self._config, _setting(self._config)))
            problems += self._reader.take(located)
            pairs += self._reader.pairs
            bad += self._reader.bad
            self._reader.pairs.clear()
            self._reader.bad.clear()
            if len(problems) >= _MOST_PROBLEMS:
                break
        Problems.raise_if(problems)
        return pairs, tuple(bad)

    def _refuse_too_many(self, bad: Sequence[BadRow]) -> None:
        config, count, rows = self._config, self._totals["bad"], self._totals["rows"]
        if config.on_bad_row is OnBadRow.quarantine and count > config.max_bad_frac * rows:
            reasons = Counter(reason for row in bad for reason in row.reasons).most_common(5)
            told = "; ".join(f"{reason} ({number})" for reason, number in reasons)
            last = f", at last in {bad[-1].file}:{bad[-1].line}: {told}" if bad else ""
            raise DataError(
                "too many bad rows",
                where="data.max_bad_frac",
                found=f"{count} of {rows}{last}",
                expected=f"at most {config.max_bad_frac:g} of them",
                remedy="mend the rows, or raise data.max_bad_frac",
            )

    def _sides(self, pairs: Sequence[TrainingPair]) -> dict[Side, list[TrainingPair]]:
        config = self._config
        val_frac = config.val_frac if self._apart is None else 0
        sides: dict[Side, list[TrainingPair]] = {side: [] for side in Side}
        for pair in pairs:
            group = group_of(pair)
            if self._apart is not None and group in self._apart:
                self._totals["validated_on"] += 1
                continue
            sides[side_of(group, val_frac, config.heldout_frac)].append(pair)
        self._totals["trained_on"] += len(sides[Side.TRAIN])
        self._totals["other_sides"] += len(sides[Side.VAL]) + len(sides[Side.HELDOUT])
        return sides


def _setting(config: RowsData) -> str:
    return "data.path" if isinstance(config, JsonlData) else "data.split"


def _dataset(config: RowsData) -> Any:
    """Return what `datasets` reads the rows of an epoch with."""
    if isinstance(config, HubData):
        return hub_rows.streamed(config, config.split, "data.split")
    assert isinstance(config, JsonlData), "the only other one"
    return hub_rows.generated(_examples, resolve_files(config.path, "data.path"))


def _examples(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for located in decoded_rows(path, "data.path"):
            yield {"located": tuple(located)}
