"""Mixtures of sources by weight, and sources that are streamed during training.

Weights are converted to fractions, and each source has exactly its share of all rows. The next row
always comes from the source furthest behind its share, so the shares nearly hold for any prefix.

A streamed source is read window by window, epoch after epoch, from any position. `datasets` reads
it and tracks the position. Rows are shuffled only within a window, so the position and number of a
window suffice to read the same rows again.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mens_exp.config.data import HubData, JsonlData, MixStop, OnBadRow
from mens_exp.corpus import hub_rows, row_files
from mens_exp.corpus.split import Side, filtered, group_of, side_of, split
from mens_exp.errors import DataError, Problems
from mens_exp.rows.decode import Located, decoded_rows
from mens_exp.rows.files import resolve_files
from mens_exp.rows.readers import RowReader, WrongRows, rows_digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from mens_exp.config.data import MixData, RowsData
    from mens_exp.rows.readers import BadRow
    from mens_exp.rows.schema import TrainingPair

CHARS_PER_TOKEN: Final = 3.4  # measured: the stdlib rows under SmolLM2's tokenizer
TEMPLATE_TOKENS: Final = 40  # added by a chat template per exchange
MOST_PASSES: Final = 100  # over one source; more suggests a wrong weight (unverified guess)


def estimated_tokens(pair: TrainingPair) -> float:
    """Estimate the tokens of a row from its characters."""
    return sum(
        (len(user) + len(said)) / CHARS_PER_TOKEN + TEMPLATE_TOKENS for user, said in pair.exchanges
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawing:
    """The settings for drawing rows.

    Attributes:
        weights: positive weight of each source by name; only their ratios matter.
        stop: the stopping rule.
        budget_tokens: estimated tokens to draw with stop=budget.
        seed: seed of the row order.
        settings: config paths of these settings and of the weights, for messages.
    """

    weights: Mapping[str, float]
    stop: MixStop
    budget_tokens: int | None
    seed: int
    settings: tuple[str, str] = ("data", "data.sources")


def mixed(
    corpora: Mapping[str, Sequence[TrainingPair]], weights: Mapping[str, float], config: MixData
) -> tuple[list[TrainingPair], dict[str, Any]]:
    """Draw rows from several sources by weight.

    Args:
        corpora: the rows of each source by name; none empty.
        weights: positive weight of each source; only their ratios matter.
        config: the stopping rule and the seed.

    Returns:
        The rows as drawn, and the record: each source's requested and actual share, its rows, and
        its number of passes.

    Raises:
        DataError: a source has no rows, or would be repeated over `MOST_PASSES` times.
    """
    how = Drawing(
        weights=weights,
        stop=config.stop,
        budget_tokens=config.budget_tokens,
        seed=config.mix_seed,
    )
    counts: Counter[str] = Counter()
    rows = list(draw(corpora, how, counts))
    return rows, record_of(corpora, how, counts)


def draw(
    corpora: Mapping[str, Sequence[TrainingPair]], how: Drawing, counts: Counter[str]
) -> Iterator[TrainingPair]:
    """Yield rows from several sources by weight, one at a time.

    Args:
        corpora: the rows of each source by name; none empty. A row is read when it is drawn, so
            rows need not be in memory.
        how: the weights, the stopping rule and the seed.
        counts: counter of rows by source; updated in place.

    Raises:
        DataError: a source has no rows, or would be repeated over `MOST_PASSES` times.
    """
    for name, pairs in corpora.items():
        if not pairs:
            raise DataError(
                "a source has no row to train on",
                where=how.settings[1],
                found=name,
                expected="at least one, filters and split passed",
                remedy="drop the source, or loosen its filter",
            )
    names = list(corpora)
    budget = float(how.budget_tokens or 0)
    sizes = [len(pairs) for pairs in corpora.values()]
    queues = [_shuffled(pairs, how.seed, number) for number, pairs in enumerate(corpora.values())]
    shares = _shares(how.weights, names)
    for source in _order(shares, _counts(shares, sizes, how.stop)):
        name = names[source]
        if counts[name] == MOST_PASSES * sizes[source]:
            raise _repeated(name, how)
        row = next(queues[source])
        counts[name] += 1
        yield row
        if how.stop is MixStop.budget:
            budget -= estimated_tokens(row)
            if budget <= 0:
                break


def record_of(
    corpora: Mapping[str, Sequence[TrainingPair]], how: Drawing, counts: Counter[str]
) -> dict[str, Any]:
    """Return the record of a draw.

    Returns:
        Each source's requested and actual share, its rows, and its number of passes.
    """
    shares = _shares(how.weights, list(corpora))
    drawn = counts.total()
    return {
        name: {
            "weight": how.weights[name],
            "share_asked": round(float(share), 6),
            "share": round(counts[name] / drawn, 6),
            "rows": counts[name],
            "of": len(pairs),
            "passes": round(counts[name] / len(pairs), 4),
        }
        for (name, pairs), share in zip(corpora.items(), shares, strict=True)
    }


def _shares(weights: Mapping[str, float], names: Sequence[str]) -> list[Fraction]:
    exact = [Fraction(repr(weights[name])) for name in names]  # repr: 0.1 is exactly 1/10
    return [weight / sum(exact) for weight in exact]


def _counts(shares: Sequence[Fraction], sizes: Sequence[int], stop: MixStop) -> list[int] | None:
    """Return the number of rows of each source; None with a token budget.

    The total is the fewest rows that exhaust every source, or the most that repeat none. It is
    divided by the largest remainder method.
    """
    if stop is MixStop.budget:
        return None
    reached = [size / share for size, share in zip(sizes, shares, strict=True)]
    rows = math.ceil(max(reached)) if stop is MixStop.all_exhausted else math.floor(min(reached))
    counts = [math.floor(share * rows) for share in shares]
    remainders = [share * rows - count for share, count in zip(shares, counts, strict=True)]
    largest = sorted(range(len(shares)), key=remainders.__getitem__, reverse=True)
    for source in largest[: rows - sum(counts)]:
        counts[source] += 1
    return counts


def _order(shares: Sequence[Fraction], counts: Sequence[int] | None) -> Iterator[int]:
    """Yield the source of each row: the unfinished source that is furthest behind its share.

    Without counts, no source ever finishes.
    """
    wanted = [float(share) for share in shares]
    behind = wanted.copy()
    left = list(counts) if counts is not None else [1] * len(wanted)
    while any(left):
        source = max((i for i, rest in enumerate(left) if rest), key=behind.__getitem__)
        yield source
        behind[source] -= 1
        behind = [one + share for one, share in zip(behind, wanted, strict=True)]
        if counts is not None:
            left[source] -= 1


def _shuffled(pairs: Sequence[TrainingPair], seed: int, number: int) -> Iterator[TrainingPair]:
    """Yield the rows of a source endlessly, reshuffled for each complete pass."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, number])))
    while True:
        yield from (pairs[index] for index in generator.permutation(len(pairs)))


def _repeated(name: str, how: Drawing) -> DataError:
    return DataError(
        f"the rows of a source would be repeated over {MOST_PASSES} times",
        where=how.settings[1],
        found=name,
        expected="weights nearer to the numbers of rows",
        remedy=f"lower its weight, or choose another {how.settings[0]}.stop than {how.stop.value}",
    )


_MOST_PROBLEMS = 20
# Bytes and rows read; rows quarantined; refused by a filter; assigned to other sides; excluded
# because they share a group with the validation rows; and rows to train on.
_TOTALS = ("bytes", "rows", "bad", "filtered", "other_sides", "validated_on", "trained_on")


def validates_apart(config: RowsData) -> bool:
    """Return whether the configuration names separate validation rows."""
    named = config.val_path if isinstance(config, JsonlData) else getattr(config, "val_split", None)
    return named is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """Rows between two positions, by side; ``totals`` are cumulative over the whole stream.

    ``rows_sha256`` chains the digests of all windows so far.
    """

    epoch: int
    number: int  # within its epoch
    sides: dict[Side, list[TrainingPair]]
    bad: tuple[BadRow, ...]
    totals: dict[str, int]
    rows_sha256: str


class RowStream:
    """An endless reader of windows of ``data.shuffle_buffer`` rows, with a savable position."""

    def __init__(self, config: RowsData, val: Sequence[TrainingPair] | None) -> None:
        """Start before the first row.

        Args:
            config: the `data` group.
            val: separate validation rows, if any; rows that share a group with them are excluded
                from training.
        """
        self._config = config
        self._apart = None if val is None else {group_of(pair) for pair in val}
        self._epoch = self._number = 0
        self._row = 0  # of a Hub split, within the epoch
        self._totals = dict.fromkeys(_TOTALS, 0)
        self._trained_before = 0  # rows of earlier epochs
        self._sha256 = ""
        self._place: Any = None
        self._dataset: Any = None
        self._rows: Iterator[Located] | None = None
        self._reader: RowReader | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next window."""
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
        """Move to a saved position."""
        self._epoch, self._number, self._row = state["epoch"], state["number"], state["row"]
        self._totals, self._sha256 = dict(state["totals"]), state["sha256"]
        self._trained_before = state["trained_before"]
        self._place = copy.deepcopy(state["place"])
        self._dataset = self._rows = self._reader = None

    def next_window(self) -> Window:
        """Read the next window; a new epoch begins after the last row.

        Raises:
            DataError: a row is invalid, too many are, or an epoch has no row to train on.
            Problems: several rows are invalid.
            MensError: the files or the dataset are not available.
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
            sides=self._sides(kept, is_whole=self._is_whole(rows)),
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
        """Read rows as from files, with one format per file.

        The columns of optional fields must occur in the first window.
        """
        pairs: list[TrainingPair] = []
        readers: dict[str, RowReader] = {}
        bad: list[BadRow] = []
        wrong = WrongRows(_MOST_PROBLEMS)
        for located in rows:
            name = located.where.rpartition(":")[0]
            if self._reader is None or self._reader.name != name:
                self._reader = RowReader(name, row_files.how(self._config, _setting(self._config)))
            readers[name] = self._reader
            wrong.add(self._reader.take(located))
            pairs += self._reader.pairs
            bad += self._reader.bad
            self._reader.pairs.clear()
            self._reader.bad.clear()
        first = readers.values() if self._epoch == self._number == 0 else ()
        absent = [one for each in first for one in each.absent_columns()]
        Problems.raise_if(wrong.reported(absent, "data", is_part=True))
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
                remedy="fix the rows, or raise data.max_bad_frac",
            )

    def _is_whole(self, rows: Sequence[Located]) -> bool:
        """Return whether a window holds a whole epoch: the buffer is not full."""
        return self._number == 0 and len(rows) < self._config.shuffle_buffer

    def _sides(
        self, pairs: Sequence[TrainingPair], *, is_whole: bool
    ) -> dict[Side, list[TrainingPair]]:
        """Split a window by group hash, or with `split` if it holds a whole epoch."""
        config = self._config
        val_frac = config.val_frac if self._apart is None else 0
        apart = self._apart or set()
        left = [pair for pair in pairs if group_of(pair) not in apart]
        self._totals["validated_on"] += len(pairs) - len(left)
        if is_whole:
            sides = split(left, val_frac, config.heldout_frac)
        else:
            sides = {side: [] for side in Side}
            for pair in left:
                sides[side_of(group_of(pair), val_frac, config.heldout_frac)].append(pair)
        self._totals["trained_on"] += len(sides[Side.TRAIN])
        self._totals["other_sides"] += len(sides[Side.VAL]) + len(sides[Side.HELDOUT])
        return sides


def _setting(config: RowsData) -> str:
    return "data.path" if isinstance(config, JsonlData) else "data.split"


def _dataset(config: RowsData) -> Any:
    """Return the `datasets` reader for one epoch."""
    if isinstance(config, HubData):
        return hub_rows.streamed(config, config.split, "data.split")
    assert isinstance(config, JsonlData), "the only other one"
    return hub_rows.generated(_examples, resolve_files(config.path, "data.path"))


def _examples(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for located in decoded_rows(path, "data.path"):
            yield {"located": tuple(located)}
