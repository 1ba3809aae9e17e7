"""Rows of files larger than memory, read once and left on disk, and multi-process work on them.

Only eight bytes per hash are kept in memory. The result equals that of `corpus.source.load_rows` on
rows in memory. Rows and groups are considered equal if 64 bits of their hashes are equal: with ten
million rows, one corpus in a hundred thousand has a chance collision.
"""

from __future__ import annotations

import hashlib
import os
import threading
from array import array
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain, islice
from multiprocessing import get_context, parent_process
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mens_exp.config.data import OnBadRow
from mens_exp.corpus.row_files import (
    MOST_LEAKS,
    Rows,
    described,
    how,
    raise_leaks,
    read_each,
    refuse_empty,
)
from mens_exp.corpus.split import (
    HashPrefixes,
    Side,
    asked,
    bounds_of,
    check_fractions,
    distinct,
    first_failed,
    group_of,
    hash_prefix,
    position_of,
    refuse_nothing_left,
    side_at,
)
from mens_exp.errors import MensError, Problems, SetupError
from mens_exp.rows import readers
from mens_exp.rows.cache import RowsOnDisk, read_on_disk
from mens_exp.rows.readers import row_line, rows_digest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from concurrent.futures import Future
    from pathlib import Path

    from mens_exp.config.data import JsonlData
    from mens_exp.rows.readers import FileOfRows
    from mens_exp.rows.schema import TrainingPair


def load(config: JsonlData, cache: Path) -> Rows:
    """Read the rows of JSON Lines files, split them, and leave them on disk.

    Args:
        config: the `data` group.
        cache: directory for the text of compressed files.

    Raises:
        DataError: as `load_rows`.
        Problems: as `load_rows`.
    """
    whole = hashlib.sha256()
    own, val = _read(config, cache, whole)
    bad = tuple(row for part in (own, val) if part for file in part.files for row in file.bad)
    taken: dict[str, Any] = {}
    if config.on_bad_row is OnBadRow.quarantine:
        rows = len(bad) + sum(part.rows for part in (own, val) if part)
        taken["quarantined"] = readers.quarantine_summary(bad, rows, config.max_bad_frac)
    if asked(config.filter):
        taken["filtered"] = _filtered(config, own, val)
    if val is not None:
        _refuse_leakage(own, val)
    sides, sha256s = _sides(config, own, val)
    for side in (Side.TRAIN, Side.VAL):
        if not len(sides[side]):
            raise refuse_empty(side, len(own.pairs))
    return Rows(
        source=config.source,
        train=sides[Side.TRAIN],
        val=sides[Side.VAL],
        heldout=sides[Side.HELDOUT],
        sha256=whole.hexdigest(),
        files=(
            *described(config, own.files, "rows"),
            *described(config, val.files if val else [], "validation"),
        ),
        taken=taken,
        bad=bad,
        sides_sha256=sha256s,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """Rows of one role that pass the filters, with their hashes.

    Attributes:
        rows: number of rows before the filters.
        ids: 64 bits of each row's id; empty without separate validation rows.
        sha256s: hash of the rows of each side, as assigned by the group hashes alone.
    """

    files: list[FileOfRows]
    rows: int
    pairs: RowsOnDisk
    heads: HashPrefixes
    ids: HashPrefixes
    refused: Counter[str]
    sha256s: dict[Side, str]


def _read(config: JsonlData, cache: Path, whole: hashlib._Hash) -> tuple[_Part, _Part | None]:
    """Read the files of both settings, and report all problems together."""
    problems: list[MensError] = []

    def part(setting: str, names: Any, shares: tuple[float, float]) -> _Part:
        seen = _Seen(config, shares, whole)
        files = read_each(
            names,
            how(config, setting),
            lambda path, reading: read_on_disk(path, reading, cache / "decompressed", seen.add),
            problems,
        )
        return seen.part(files, is_whole=not problems)

    has_val = config.val_path is not None
    val_frac = 0.0 if has_val else config.val_frac
    own = part("data.path", config.path, (val_frac, config.heldout_frac))
    val = part("data.val_path", config.val_path, (0.0, 0.0)) if has_val else None
    Problems.raise_if(problems)
    return own, val


class _Seen:
    """Accumulates hashes and filter results while rows are read."""

    def __init__(
        self, config: JsonlData, shares: tuple[float, float], whole: hashlib._Hash
    ) -> None:
        self.kept, self.heads, self.ids = array("B"), array("Q"), array("Q")
        self.refused: Counter[str] = Counter()
        self.states = {side: hashlib.sha256() for side in Side}
        self._wanted = asked(config.filter)
        self._with_ids = config.val_path is not None
        self._shares = shares
        self._whole = whole

    def add(self, pair: TrainingPair) -> None:
        """Add the next row."""
        failed = first_failed(pair, self._wanted)
        self.kept.append(failed is None)
        if failed is not None:
            self.refused[failed] += 1
            return
        head, line = hash_prefix(group_of(pair)), row_line(pair)
        self.heads.append(head)
        if self._with_ids:
            self.ids.append(int(pair.id, 16))
        self._whole.update(line)
        self.states[side_at(position_of(head), *self._shares)].update(line)

    def part(self, files: list[FileOfRows], *, is_whole: bool) -> _Part:
        """Return the rows that passed; after problems, the result is not used."""
        kept = np.array(self.kept, bool)
        pairs = RowsOnDisk.joined([one.pairs for one in files if isinstance(one.pairs, RowsOnDisk)])
        return _Part(
            files=files,
            rows=len(kept),
            pairs=pairs.take(kept) if is_whole else pairs,
            heads=np.array(self.heads, np.uint64),
            ids=np.array(self.ids, np.uint64),
            refused=self.refused,
            sha256s={side: state.hexdigest() for side, state in self.states.items()},
        )


def _filtered(config: JsonlData, own: _Part, val: _Part | None) -> dict[str, Any]:
    """Return the filters' record, and refuse a role without any rows left."""
    parts = [part for part in (own, val) if part is not None]
    for part in parts:
        refuse_nothing_left(part.rows, part.refused)
    refused = sum((part.refused for part in parts), Counter[str]())
    return {
        "rows": sum(part.rows for part in parts),
        "kept": sum(len(part.pairs) for part in parts),
        "refused": {name: refused[name] for name in asked(config.filter)},
    }


def _refuse_leakage(own: _Part, val: _Part) -> None:
    """Refuse the same leakage as `corpus.row_files.refuse_leakage`."""
    same, near = np.isin(val.ids, own.ids), np.isin(val.heads, own.heads)
    leaks = np.flatnonzero(same | near)
    first = []
    for number in leaks[:MOST_LEAKS].tolist():
        hashes, mine = (own.ids, val.ids) if same[number] else (own.heads, val.heads)
        (others,) = np.nonzero(hashes == mine[number])
        first.append((val.pairs[number], own.pairs[int(others[0])]))
    raise_leaks(first, len(leaks))


def _sides(
    config: JsonlData, own: _Part, val: _Part | None
) -> tuple[dict[Side, RowsOnDisk], dict[Side, str]]:
    """Split the rows as `corpus.split.split` does, and return each side with its hash."""
    val_frac = config.val_frac if val is None else 0
    check_fractions(val_frac, config.heldout_frac)
    bounds = bounds_of(distinct(own.heads), val_frac, config.heldout_frac)
    sides = {side: own.pairs.take(mask) for side, mask in bounds.masks(own.heads).items()}
    sha256s = own.sha256s
    if bounds.ranked:
        sha256s = {side: rows_digest(pairs) for side, pairs in sides.items()}
    if val is not None:
        sides[Side.VAL] = val.pairs
        sha256s = sha256s | {Side.VAL: val.sha256s[Side.TRAIN]}  # read with shares of 0
    return sides, sha256s


T = TypeVar("T")
R = TypeVar("R")


def pieces(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Cut a stream into lists of `size` items; the last one may be shorter."""
    stream = iter(items)
    while piece := list(islice(stream, size)):
        yield piece


def map_in_order(work: Callable[[T], R], stream: Iterable[T], processes: int) -> Iterator[R]:
    """Map `work` over a stream in several processes, and yield the results in order.

    Args:
        work: a function that can be pickled.
        stream: the pieces; at most two per process are read ahead.
        processes: number of processes; one process, or one piece, is handled in this process.

    Raises:
        SetupError: the operating system killed one of the processes.
        Exception: whatever `work` raises.
    """
    source = iter(stream)
    first = list(islice(source, 2))
    if processes == 1 or len(first) < 2:  # noqa: PLR2004 - a second piece
        yield from map(work, chain(first, source))
        return
    # Spawned: a fork would copy the locks that other threads hold at that moment.
    pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_end_with_parent)
    try:
        waiting: deque[Future[R]] = deque()
        for piece in chain(first, source):
            waiting.append(pool.submit(work, piece))
            if len(waiting) > 2 * processes:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise SetupError(
            "a worker process was killed",
            found="no result of it",
            expected="memory for each process, some hundred MB",
            remedy="free memory, or ask for fewer processes",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Exit when the parent process is gone, because nothing else would end this worker."""

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
