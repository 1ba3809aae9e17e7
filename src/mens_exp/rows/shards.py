"""Many rows encoded by several processes, shard by shard, each kept as soon as it is finished.

A build that is interrupted goes on from the shards that are whole; they are verified like any
arrays of the cache. Processes are spawned, not forked: this one has threads by now (torch's, the
tokenizer's), whose locks a fork would copy as they happen to be. Each process gets the tokenizer
once and tokenizes on its one core, so that they do not fight over the cores. Starting them takes
about a second, so few rows are encoded in this process, where the tokenizer uses all cores; so are
all where there is one core, still shard by shard.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING, Any, Final, overload

from mens_exp.errors import SetupError
from mens_exp.rows import arrays
from mens_exp.rows.encode import Encoded, encode

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.rows.encode import Labelling, TextEncoder
    from mens_exp.rows.schema import TrainingPair

__all__ = ["encode_parts", "usable_cores"]

_SHARD: Final = 4_096  # rows; measured: one or two seconds' work of one core
_POOL_FROM: Final = 16_384  # rows; measured: from about here two processes outrun their start
_ARRAYS: Final = ("ids", "supervised", "offsets")
_COUNTS: Final = ("truncated", "dropped", "unrolled", "short")
_ENVIRONMENT: Final = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def usable_cores() -> int:
    """Count the cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode_parts(
    pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling, kept: Path
) -> Sequence[Encoded]:
    """Encode rows, many of them by several processes.

    Rows on disk are read by the process that encodes them.

    Args:
        pairs: the rows.
        encoder: tokenizer with its chat template.
        labelling: what is learned and how long a document may be.
        kept: folder of finished shards, of these rows under this encoder and labelling only.

    Returns:
        The documents in parts; one after the other they are what `encode` returns. Those of many
        rows are opened when they are asked for.

    Raises:
        SetupError: a process was ended from outside.
        MensError: as `encode`; of the first shard that has a problem.
    """
    if len(pairs) < _POOL_FROM:
        return [encode(pairs, encoder, labelling)]
    shards = {
        kept / f"{start:012}-{len(pairs)}-{_SHARD}": pairs[start : start + _SHARD]
        for start in range(0, len(pairs), _SHARD)
    }
    missing = {shard: rows for shard, rows in shards.items() if _open(shard) is None}
    if usable_cores() < 2:  # noqa: PLR2004  # one core is this process's
        for shard, rows in missing.items():
            _keep(shard, encode(rows, encoder, labelling))
    elif missing:
        _encode_missing(missing, encoder, labelling)
    return _Shards(list(shards))


class _Shards(Sequence[Encoded]):
    """Finished shards, each mapped only while it is used: there may be more than open files."""

    def __init__(self, paths: list[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> Encoded: ...
    @overload
    def __getitem__(self, index: slice) -> _Shards: ...
    def __getitem__(self, index: int | slice) -> Encoded | _Shards:
        if isinstance(index, slice):
            return _Shards(self._paths[index])
        return _whole(self._paths[index])


def _encode_missing(
    missing: dict[Path, Sequence[TrainingPair]], encoder: TextEncoder, labelling: Labelling
) -> None:
    """Encode shards side by side; the first one in order that has a problem tells it."""
    pool = ProcessPoolExecutor(
        min(usable_cores(), len(missing)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(encoder, labelling),
    )
    try:
        for done in [pool.submit(_encode_shard, *shard) for shard in missing.items()]:
            done.result()
    except BrokenProcessPool as error:
        raise SetupError(
            "a process that encodes rows was ended",
            where="data",
            expected="memory for the tokenizer and some thousand rows in each process",
            remedy="start again: the shards that are finished are kept",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_own: list[Any] = []  # of a process of the pool: its encoder and labelling


def _begin(encoder: TextEncoder, labelling: Labelling) -> None:
    os.environ.update(_ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to all; the first one acts
    _own[:] = encoder, labelling


def _encode_shard(shard: Path, pairs: Sequence[TrainingPair]) -> None:
    encoder, labelling = _own
    _keep(shard, encode(pairs, encoder, labelling))


def _keep(shard: Path, part: Encoded) -> None:
    counts = {name: getattr(part, name) for name in _COUNTS}
    arrays.store(shard, {name: [getattr(part, name)] for name in _ARRAYS}, lambda _: counts)


def _whole(shard: Path) -> Encoded:
    part = _open(shard)
    if part is None:
        raise SetupError(
            "encoded documents cannot be read back as they were written",
            where=str(shard),
            remedy="check the disk, or give another one with MENS_EXP_CACHE=<folder>",
        )
    return part


def _open(shard: Path) -> Encoded | None:
    found = arrays.opened(shard)
    if found is None:
        return None
    stored: dict[str, Any] = {**found[0], **{name: found[1][name] for name in _COUNTS}}
    return Encoded(**stored)
