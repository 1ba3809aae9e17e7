"""Encode rows to ids and supervision masks, in this process or in several.

This is the one place where masks are made. Generation encodes the prompt alone and the answer
follows it, so the ids before each learned answer must be those of its prompt alone: the whole text
is tokenized where that keeps the seams, and the parts apart where a token would straddle one.

A conversation is one document as long as each answer in it, with all that stands before it, is
token for token what generation had when it was the last one. Some templates change earlier turns
(Qwen 3 drops their reasoning): an answer that is changed gets a document of its own, up to it.

Many rows are encoded in shards, and each shard is stored as soon as it is finished, so that an
interrupted build resumes from the shards that are whole. Processes are spawned, not forked: this
one has threads by now (torch's, the tokenizer's), whose locks a fork would copy as they happen to
be. Each process gets the tokenizer once and tokenizes on its one core. Starting them takes about a
second, so few rows are encoded in this process, where the tokenizer uses all cores; so are all
where there is one core, still shard by shard.
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

ENCODING_VERSION = 4  # raise it when ids, masks or counts of the same row change
_OBJECTIVES = ("assistant", "causal", "last_k")
_ROWS_AT_ONCE = 2048  # their texts are in memory together; unverified guess
_MOST_PROBLEMS = 20
_SHORTEST = 2  # tokens of which one can be predicted

_Document = tuple[list[int], list[bool]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelling:
    """The settings besides rows and tokenizer that decide ids and masks.

    Attributes:
        objective: ``assistant`` learns answers and their end markers, ``causal`` every token,
            ``last_k`` the end of the text as it is rendered, with nothing added to it.
        seq_len: tokens that a document may have.
        turns: ``all`` answers of a conversation are learned, or the ``last``.
        truncation: the side that is cut, ``right`` or ``left``.
        k: tokens that ``last_k`` learns; 0 is every one after the prompt.
    """

    objective: str
    seq_len: int
    turns: str = "all"
    truncation: str = "right"
    k: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Documents as flat arrays; document ``i`` is ``ids[offsets[i]:offsets[i + 1]]``.

    ``supervised[t]`` says that token ``t`` is learned, that is predicted from those before it.
    ``truncated`` and ``dropped`` count documents that lost tokens, or everything, to the limit;
    of the dropped, ``short`` ones have fewer than two tokens, so that nothing can be predicted.
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
        """Count documents."""
        return len(self.offsets) - 1

    @property
    def lengths(self) -> np.ndarray:
        """Tokens in each document, ``[documents] int64``."""
        return np.diff(self.offsets)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Own:
    """The document that ends with one answer; ``ids[start:end]`` are the answer and its end."""

    ids: list[int]
    start: int
    end: int


def encode(pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling) -> Encoded:
    """Encode rows.

    Args:
        pairs: the rows.
        encoder: tokenizer with its chat template.
        labelling: what is learned and how long a document may be. Cut on the left, it keeps a
            begin-of-sequence token. One that keeps no supervised token is dropped and counted.

    Raises:
        DataError: the template changes the prompt once an answer follows, or drops the answer,
            or nothing would mark the answer's end; the row is named.
        Problems: it does so with several rows.
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
        some = list(pairs[start : start + _ROWS_AT_ONCE])  # of rows on disk these are read
        documents: list[_Document] = []
        unrolled = 0
        for owns in _owns(some, encoder, labelling):
            mine = _documents(owns) if labelling.objective != "last_k" else _end(owns, labelling.k)
            if labelling.objective == "causal":
                mine = [(ids, [True] * len(ids)) for ids, _ in mine]
            documents += mine
            unrolled += len(mine) - 1
        # Lists of numbers take some ten times what their arrays do, and are not yet cut.
        parts.append(_flatten(documents, labelling, encoder.bos_id, unrolled))
    return _joined(parts)


def _owns(
    pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling
) -> Iterator[list[_Own]]:
    """Yield, for each row, the documents of the answers that it learns, oldest first."""
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
    """Tokenize parts: as one text where no token straddles a seam, else apart."""
    count = len(answers)
    # Together, because they share nearly all of their pieces.
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
    """Join the parts; learned are the answer and what closes it, to the first control token.

    A closing without one ends with the end-of-sequence token, or generation would never stop,
    unless the text is wanted as it is rendered.
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
    """Learn the last ``k`` tokens of a row's text, or with 0 all that follow its prompt."""
    last = owns[-1]
    first = max(last.end - k, 0) if k else last.start
    return [(last.ids[: last.end], [place >= first for place in range(last.end)])]


def _documents(owns: Sequence[_Own]) -> list[_Document]:
    """Learn each answer once, in the longest document that has it as generation met it."""
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
    """Cut a document that is too long; what is learned moves with its tokens."""
    limit = labelling.seq_len
    if len(ids) <= limit:
        return ids, learned
    if labelling.truncation == "right":
        return ids[:limit], learned[:limit]
    # A token that opens every turn (ChatML's) is no begin of sequence, whatever it is called.
    kept = int(ids[0] == bos_id and bos_id not in ids[1:])
    rest = len(ids) - limit + kept
    # The first token behind the cut would be predicted from what never stood before it.
    return ids[:kept] + ids[rest:], [False] * (kept + 1) + learned[rest + 1 :]


def _joined(parts: Sequence[Encoded]) -> Encoded:
    """Put the documents of all parts one after the other."""
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
        if any(learned[1:]):  # the first token is predicted from nothing
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


_SHARD: Final = 4_096  # rows; measured: one or two seconds' work of one core
_POOL_FROM: Final = 16_384  # rows; measured: from about here two processes outrun their start
_SHARD_ARRAYS: Final = ("ids", "supervised", "offsets")
_SHARD_COUNTS: Final = ("truncated", "dropped", "unrolled", "short")
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
    missing = {shard: rows for shard, rows in shards.items() if _open_shard(shard) is None}
    if usable_cores() < 2:  # noqa: PLR2004  # one core is this process's
        for shard, rows in missing.items():
            _store_shard(shard, encode(rows, encoder, labelling))
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
        return _read_shard(self._paths[index])


def _encode_missing(
    missing: dict[Path, Sequence[TrainingPair]], encoder: TextEncoder, labelling: Labelling
) -> None:
    """Encode shards side by side; the first one in order that has a problem tells it."""
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


_of_this_process: list[Any] = []  # of a process of the pool: its encoder and labelling


def _begin_process(encoder: TextEncoder, labelling: Labelling) -> None:
    os.environ.update(_ENVIRONMENT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's goes to all; the first one acts
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
