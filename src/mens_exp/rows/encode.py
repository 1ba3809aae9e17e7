"""Encode rows to token ids and supervision masks, in this process or in several.

Masks are created only here. Generation encodes the prompt alone and the answer follows it, so the
ids before each supervised answer must equal those of its prompt alone. The whole text is tokenized
at once if that preserves the boundaries, and the parts separately if a token would straddle one.

A conversation is one document as long as each answer in it, with everything before it, is token for
token what generation had when that answer was the last. Some templates change earlier turns (Qwen 3
drops their reasoning); an answer that is changed gets a separate document that ends with it.

Large sets of rows are encoded in shards, and each shard is stored as soon as it is finished, so
that an interrupted build resumes from the complete shards. Processes are spawned, not forked,
because this one already has threads (torch's, the tokenizer's) whose locks a fork would copy in an
arbitrary state. Each process receives the tokenizer once and tokenizes on one core. Starting the
processes takes about a second, so small sets are encoded in this process, where the tokenizer uses
all cores. On a single core all sets are, still shard by shard.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from mens_exp.errors import ConfigError, DataError, MensError, Problems, SetupError, expected_name
from mens_exp.rows import files
from mens_exp.rows.answers import Answer, TextEncoder, answer_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.rows.schema import TrainingPair

ENCODING_VERSION = 4  # increment when ids, masks or counts of the same row change
_OBJECTIVES = ("assistant", "causal", "last_k")
_ROWS_AT_ONCE = 2048  # rows whose texts are in memory together; unverified guess
_MOST_PROBLEMS = 20
_SHORTEST = 2  # minimum tokens, so that one can be predicted

_Document = tuple[list[int], list[bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelling:
    """The settings that determine ids and masks, besides rows and tokenizer.

    Attributes:
        objective: ``assistant`` supervises answers and their end markers, ``causal`` every token,
            ``last_k`` the end of the rendered text, with nothing appended to it.
        seq_len: maximum tokens of a document.
        turns: supervise ``all`` answers of a conversation, or the ``last``.
        truncation: the side that is truncated, ``right`` or ``left``.
        k: number of tokens that ``last_k`` supervises; 0 means every token after the prompt.
    """

    objective: str
    seq_len: int
    turns: str = "all"
    truncation: str = "right"
    k: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Documents as flat arrays; document ``i`` is ``ids[offsets[i]:offsets[i + 1]]``.

    ``supervised[t]`` means that token ``t`` is a target, predicted from the tokens before it.
    ``truncated`` and ``dropped`` count documents that lost some or all tokens to the limit. Of the
    dropped, ``short`` ones have fewer than two tokens, so that nothing can be predicted.
    ``unrolled`` counts documents beyond the first of their row.
    """

    ids: np.ndarray  # [tokens] int32
    supervised: np.ndarray  # [tokens] bool
    offsets: np.ndarray  # [documents + 1] int64
    truncated: int
    dropped: int
    unrolled: int = 0
    short: int = 0

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each document, ``[documents] int64``."""
        return np.diff(self.offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    """The document that ends with one answer; ``ids[start:end]`` is the answer and its end."""

    ids: list[int]
    start: int
    end: int


def encode(pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling) -> Encoded:
    """Encode rows.

    Args:
        pairs: the rows.
        encoder: tokenizer with its chat template.
        labelling: supervision and length limit. Truncation on the left keeps a begin-of-sequence
            token. A document without a supervised token left is dropped and counted.

    Raises:
        DataError: the template changes the prompt once an answer follows, drops the answer, or
            nothing marks the answer's end; the row is named.
        Problems: several rows have such problems.
        ConfigError: an unknown objective.
    """
    if labelling.objective not in _OBJECTIVES:
        raise ConfigError(
            "unknown labelling rule",
            where="objective.labels",
            found=labelling.objective,
            expected=expected_name(labelling.objective, _OBJECTIVES),
        )
    parts = []
    for start in range(0, len(pairs), _ROWS_AT_ONCE):
        some = list(pairs[start : start + _ROWS_AT_ONCE])  # this reads rows that are on disk
        documents: list[_Document] = []
        unrolled = 0
        for owns in _owns(some, encoder, labelling):
            mine = _documents(owns) if labelling.objective != "last_k" else _end(owns, labelling.k)
            if labelling.objective == "causal":
                mine = [(ids, [True] * len(ids)) for ids, _ in mine]
            documents += mine
            unrolled += len(mine) - 1
        # Lists of numbers take about ten times the memory of arrays, and are not truncated yet.
        parts.append(_flatten(documents, labelling, encoder.bos_id, unrolled))
    return _joined(parts)


def _owns(
    pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling
) -> Iterator[list[_Own]]:
    """Yield, for each row, the documents of its supervised answers, oldest first."""
    problems: list[MensError] = []
    answers: list[Answer] = []
    counts: list[int] = []
    last_only = labelling.objective != "assistant" or labelling.turns == "last"
    for pair in pairs:
        total = len(pair.exchanges)
        try:
            mine = [
                answer_of(pair, i, encoder) for i in range(total - 1 if last_only else 0, total)
            ]
        except DataError as problem:
            problems.append(problem)
            mine = []
        answers += mine
        counts.append(len(mine))
        if len(problems) == _MOST_PROBLEMS:
            break
    Problems.raise_if(problems)
    special = encoder.special_ids
    as_rendered = labelling.objective == "last_k"
    documents = (
        _own(*parts, special, encoder.eos_id, as_rendered=as_rendered, is_ended=one.is_ended)
        for one, parts in zip(answers, _ids(answers, encoder), strict=True)
    )
    for pair, count in zip(pairs, counts, strict=True):
        owns = [next(documents) for _ in range(count)]
        known = [own for own in owns if own is not None]
        if len(known) < len(owns):
            raise DataError(
                "nothing marks the end of an answer, so its end could not be learned",
                where=pair.name,
                expected="a chat template with an end marker, or a tokenizer with an eos_token",
            )
        yield known


def _ids(
    answers: Sequence[Answer], encoder: TextEncoder
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """Tokenize parts: as one text if no token straddles a boundary, else separately."""
    count = len(answers)
    # Together, because they share almost all of their pieces.
    found = encoder.encode_all(
        [
            *(one.prompt for one in answers),
            *(one.prompt + one.body for one in answers),
            *(one.prompt + one.body + one.closing for one in answers),
        ]
    )
    texts = zip(answers, found[:count], found[count : 2 * count], found[2 * count :], strict=True)
    for one, before, until, ids in texts:
        start, end = len(before), len(until)
        if ids[:start] == before and ids[:end] == until:
            yield before, ids[start:end], ids[end:]
        else:
            body, closing = encoder.encode_all([one.body, one.closing])
            yield before, body, closing


def _own(
    prompt: list[int],
    body: list[int],
    closing: list[int],
    special: set[int],
    eos_id: int | None,
    *,
    as_rendered: bool,
    is_ended: bool,
) -> _Own | None:
    """Join the parts; the answer and its closing, up to the first control token, are supervised.

    A closing without a control token ends with the end-of-sequence token, since generation would
    otherwise never stop, unless the text is wanted exactly as rendered.
    """
    end = next((i + 1 for i, token in enumerate(closing) if token in special), None)
    if end is None and is_ended and body[-1] in special:
        end = 0
    if end is None and as_rendered:
        end = len(closing)
    if end is None:
        if eos_id is None:
            return None
        closing = [*closing, eos_id]
        end = len(closing)
    start = len(prompt)
    return _Own(ids=prompt + body + closing, start=start, end=start + len(body) + end)


def _end(owns: Sequence[_Own], k: int) -> list[_Document]:
    """Supervise the last ``k`` tokens of a row's text, or with 0 all tokens after its prompt."""
    last = owns[-1]
    first = max(last.end - k, 0) if k else last.start
    return [(last.ids[: last.end], [place >= first for place in range(last.end)])]


def _documents(owns: Sequence[_Own]) -> list[_Document]:
    """Supervise each answer once, in the longest document that has it as generation saw it."""
    documents: list[_Document] = []
    left = list(owns)
    while left:
        whole = left.pop()
        mask = [False] * len(whole.ids)
        changed = []
        for own in [*left, whole]:
            if own.ids[: own.end] == whole.ids[: own.end]:
                mask[own.start : own.end] = [True] * (own.end - own.start)
            else:
                changed.append(own)
        documents.append((whole.ids, mask))
        left = changed
    return documents[::-1]


def _cut(
    ids: list[int], learned: list[bool], labelling: Labelling, bos_id: int | None
) -> _Document:
    """Truncate a document that is too long, together with its mask."""
    limit = labelling.seq_len
    if len(ids) <= limit:
        return ids, learned
    if labelling.truncation == "right":
        return ids[:limit], learned[:limit]
    # A token that starts every turn (ChatML's) is not a begin of sequence, whatever its name.
    kept = int(ids[0] == bos_id and bos_id not in ids[1:])
    rest = len(ids) - limit + kept
    # The first token after the cut would be predicted from a token that never preceded it.
    return ids[:kept] + ids[rest:], [False] * (kept + 1) + learned[rest + 1 :]


def _joined(parts: Sequence[Encoded]) -> Encoded:
    """Concatenate the documents of all parts."""
    lengths = [np.zeros(1, np.int64), *(part.lengths for part in parts)]
    return Encoded(
        ids=np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
        supervised=np.concatenate([np.zeros(0, bool), *(part.supervised for part in parts)]),
        offsets=np.cumsum(np.concatenate(lengths)),
        truncated=sum(part.truncated for part in parts),
        dropped=sum(part.dropped for part in parts),
        unrolled=sum(part.unrolled for part in parts),
        short=sum(part.short for part in parts),
    )


def _flatten(
    documents: list[_Document], labelling: Labelling, bos_id: int | None, unrolled: int
) -> Encoded:
    kept: list[_Document] = []
    truncated = dropped = short = 0
    for whole, mask in documents:
        truncated += len(whole) > labelling.seq_len
        ids, learned = _cut(whole, mask, labelling, bos_id)
        if any(learned[1:]):  # the first token has no predecessor
            kept.append((ids, learned))
        else:
            dropped += 1
            short += len(ids) < _SHORTEST
    offsets = np.cumsum([0, *(len(ids) for ids, _ in kept)], dtype=np.int64)
    every = chain.from_iterable(learned for _, learned in kept)
    supervised = np.fromiter(every, bool, offsets[-1])
    supervised[offsets[:-1]] = False
    return Encoded(
        ids=np.fromiter(chain.from_iterable(ids for ids, _ in kept), np.int32, offsets[-1]),
        supervised=supervised,
        offsets=offsets,
        truncated=truncated,
        dropped=dropped,
        unrolled=unrolled,
        short=short,
    )


_SHARD: Final = 4_096  # rows; measured: one or two seconds of work on one core
_POOL_FROM: Final = 16_384  # rows; measured: from about here two processes pay off
_SHARD_ARRAYS: Final = ("ids", "supervised", "offsets")
_SHARD_COUNTS: Final = ("truncated", "dropped", "unrolled", "short")
_ENVIRONMENT: Final = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def encode_parts(
    pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling, kept: Path
) -> Sequence[Encoded]:
    """Encode rows, using several processes if there are many.

    Rows on disk are read by the process that encodes them.

    Args:
        pairs: the rows.
        encoder: tokenizer with its chat template.
        labelling: supervision and length limit.
        kept: directory of finished shards, for exactly these rows, encoder and labelling.

    Returns:
        The documents in parts, whose concatenation equals the result of `encode`. For many rows,
        parts are opened on access.

    Raises:
        SetupError: a process was killed externally.
        MensError: as in `encode`; for the first shard with a problem.
    """
    if len(pairs) < _POOL_FROM:
        return [encode(pairs, encoder, labelling)]
    shards = {
        kept / f"{start:012}-{len(pairs)}-{_SHARD}": pairs[start : start + _SHARD]
        for start in range(0, len(pairs), _SHARD)
    }
    missing = {shard: rows for shard, rows in shards.items() if _open_shard(shard) is None}
    if usable_cores() < 2:  # noqa: PLR2004  # a single core is used by this process
        for shard, rows in missing.items():
            _store_shard(shard, encode(rows, encoder, labelling))
    elif missing:
        _encode_missing(missing, encoder, labelling)
    return _Shards(list(shards))


class _Shards(Sequence[Encoded]):
    """Finished shards, each mapped only while in use, as the number of open files is limited."""

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
        return _read_shard(self._paths[index])


def _encode_missing(
    missing: dict[Path, Sequence[TrainingPair]], encoder: TextEncoder, labelling: Labelling
) -> None:
    """Encode shards in parallel; the problem of the first shard in order is raised."""
    pool = ProcessPoolExecutor(
        min(usable_cores(), len(missing)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_process,
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


_of_this_process: list[Any] = []  # in a pool process: its encoder and labelling


def _begin_process(encoder: TextEncoder, labelling: Labelling) -> None:
    os.environ.update(_ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the parent handles Ctrl-C
    _of_this_process[:] = encoder, labelling


def _encode_shard(shard: Path, pairs: Sequence[TrainingPair]) -> None:
    encoder, labelling = _of_this_process
    _store_shard(shard, encode(pairs, encoder, labelling))


def _store_shard(shard: Path, part: Encoded) -> None:
    counts = {name: getattr(part, name) for name in _SHARD_COUNTS}
    files.store_arrays(
        shard, {name: [getattr(part, name)] for name in _SHARD_ARRAYS}, lambda _: counts
    )


def _read_shard(shard: Path) -> Encoded:
    part = _open_shard(shard)
    if part is None:
        raise SetupError(
            "encoded documents cannot be read back as they were written",
            where=str(shard),
            remedy="check the disk, or give another one with MENS_EXP_CACHE=<folder>",
        )
    return part


def _open_shard(shard: Path) -> Encoded | None:
    found = files.open_arrays(shard)
    if found is None:
        return None
    stored: dict[str, Any] = {**found[0], **{name: found[1][name] for name in _SHARD_COUNTS}}
    return Encoded(**stored)
