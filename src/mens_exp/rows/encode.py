"""Encode rows to token ids and supervision masks, in this process or in several.

Masks are created only here. Generation encodes the prompt alone and the answer follows it, so the
ids before each supervised answer must equal those of its prompt alone. The whole text is tokenized
at once if that preserves the boundaries, and the parts separately if a token would straddle one.

A conversation is one document as long as each answer in it, with its context, has the same tokens
as when it was generated as the last answer. Some templates change earlier turns (Qwen 3 drops their
reasoning); an answer that is changed gets a separate document that ends with it.

Large sets of rows are encoded in shards, and each shard is stored as soon as it is finished, so
that an interrupted build resumes from the complete shards. Processes are spawned, not forked,
because this one already has threads (torch's, the tokenizer's) whose locks a fork would copy in an
arbitrary state. Each process receives the tokenizer once and tokenizes on one core. Starting the
processes takes about a second, so small sets are encoded in this process, where the tokenizer uses
all cores. With a single core, all sets are encoded in this process, still shard by shard.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np

from mens_exp.errors import DataError, Problems, SetupError
from mens_exp.rows import files
from mens_exp.rows.documents import (
    Document,
    Encoded,
    Ending,
    Labelling,
    arrays_of,
    opened,
    spans,
)
from mens_exp.rows.readers import WrongRows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from mens_exp.rows.answers import Answer, TextEncoder
    from mens_exp.rows.schema import TrainingPair

ENCODING_VERSION = 7  # increment when ids, masks or counts of the same row change
MOST_BAD_ROWS = 20  # rendered before a refusal
_SHORTEST = 2  # minimum tokens, so that one can be predicted


def encode(pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling) -> Encoded:
    """Encode rows.

    Args:
        pairs: the rows.
        encoder: tokenizer with its chat template.
        labelling: supervision and length limit. Truncation on the left keeps a begin-of-sequence
            token. A document without a supervised token left is dropped and counted. A plain text
            over the limit is not truncated: its parts are documents.

    Raises:
        DataError: the template changes the prompt once an answer follows, drops the answer, or
            nothing marks the answer's end, or the row has other fields than the objective reads;
            the row is named.
        Problems: several rows have such problems.
        ConfigError: an unknown objective.
        SetupError: an installed objective cannot be used.
    """
    parts, rows = [], labelling.rows
    for part in spans(len(pairs)):
        read = list(pairs[part])  # this reads rows that are on disk
        for pair in read:
            rows.check(pair)  # report only the first row, since the others have the same problem
        some = rows.prepared(read)
        documents: list[Document] = []
        unrolled = 0
        for pair, owns in zip(some, _endings(some, encoder, labelling), strict=True):
            mine = rows.documents_of(pair, owns, labelling)
            if pair.is_text:
                mine = [part for whole in mine for part in _parts(whole, labelling.document_tokens)]
            documents += mine
            unrolled += len(mine) // rows.together - 1
        # Lists of numbers take about ten times the memory of arrays, and are not truncated yet.
        parts.append(_flatten(documents, labelling, encoder.bos_id, unrolled))
    return _joined(parts, labelling)


def rendered_answers(
    pairs: Iterable[TrainingPair], encoder: TextEncoder, labelling: Labelling
) -> list[list[Answer]]:
    """Render the answers of rows that documents are built from, those of each row oldest first.

    Raises:
        DataError: a row cannot be rendered without loss; rendering stops after 20 such rows.
        Problems: rows have several problems of this kind.
    """
    wrong, bad = WrongRows(MOST_BAD_ROWS), 0
    found: list[list[Answer]] = []
    for pair in pairs:
        try:
            found.append(labelling.rows.rendered(pair, encoder, labelling))
        except DataError as problem:
            wrong.add([problem])
            bad += 1
        if bad == MOST_BAD_ROWS:
            break
    Problems.raise_if(wrong.reported((), "data", is_part=bad == MOST_BAD_ROWS))
    return found


def _endings(
    pairs: Sequence[TrainingPair], encoder: TextEncoder, labelling: Labelling
) -> Iterator[list[Ending]]:
    """Yield, for each row, the text up to each of its supervised answers, oldest first."""
    rows = labelling.rows
    each = rendered_answers(pairs, encoder, labelling)
    answers = [*chain.from_iterable(each)]
    special = encoder.special_ids
    documents = (
        _ending(
            *parts, special, encoder.eos_id, as_rendered=rows.as_rendered, is_ended=one.is_ended
        )
        for one, parts in zip(answers, _ids(answers, encoder), strict=True)
    )
    for pair, mine in zip(pairs, each, strict=True):
        owns = [next(documents) for _ in mine]
        known = [own for own in owns if own is not None]
        if len(known) < len(owns):
            raise DataError(
                "no token marks the end of an answer, so it could not be learned",
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
            body, closing = encode_continued([one.body, one.closing], encoder)
            yield before, body, closing


# Texts in front of another one; some tokenizers put a space before the first word of a text.
ANCHORS: Final = ("\n", ".", "0")


def encode_continued(texts: Sequence[str], encoder: TextEncoder) -> list[list[int]]:
    """Tokenize texts as the continuation of another text.

    Each is encoded behind the first anchor that does not merge with it, or alone if all do.
    """
    found = encoder.encode_all(texts)
    left = [*range(len(texts))]
    for anchor, before in zip(ANCHORS, encoder.encode_all(ANCHORS), strict=True):
        behind = encoder.encode_all([anchor + texts[number] for number in left])
        whole = dict(zip(left, behind, strict=True))
        left = [number for number in left if whole[number][: len(before)] != before]
        for number in whole.keys() - set(left):
            found[number] = whole[number][len(before) :]
    return found


def _ending(
    prompt: list[int],
    body: list[int],
    closing: list[int],
    special: set[int],
    eos_id: int | None,
    *,
    as_rendered: bool,
    is_ended: bool,
) -> Ending | None:
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
    return Ending(ids=prompt + body + closing, start=start, end=start + len(body) + end)


def _parts(whole: Document, limit: int) -> Iterator[Document]:
    """Split a plain text that is too long, so that none of it is lost."""
    for part in text_parts(len(whole.ids), limit):
        extra = {name: values[part] for name, values in whole.extra.items()}
        yield Document(whole.ids[part], whole.learned[part], extra)


def text_parts(tokens: int, limit: int) -> list[slice]:
    """Return the parts of a plain text of ``tokens`` tokens, each of at most ``limit`` tokens.

    A part begins with the last token of the previous one, as context of its first prediction.
    """
    starts = range(0, max(tokens - 1, 1), limit - 1)
    return [slice(start, min(start + limit, tokens)) for start in starts]


def _cut(whole: Document, limit: int, truncation: str, bos_id: int | None) -> Document:
    """Truncate a document that is too long, together with its mask and its further values."""
    ids = whole.ids
    if len(ids) <= limit:
        return whole
    if truncation == "right":
        extra = {name: values[:limit] for name, values in whole.extra.items()}
        return Document(ids[:limit], whole.learned[:limit], extra)
    # A token that starts every turn (ChatML's) is not a begin of sequence, whatever its name.
    kept = int(ids[0] == bos_id and bos_id not in ids[1:])
    rest = len(ids) - limit + kept
    # The first token after the cut would be predicted from a token that never preceded it.
    return Document(
        ids[:kept] + ids[rest:],
        [False] * (kept + 1) + whole.learned[rest + 1 :],
        {name: values[:kept] + values[rest:] for name, values in whole.extra.items()},
    )


def _joined(parts: Sequence[Encoded], labelling: Labelling) -> Encoded:
    """Concatenate the documents of all parts."""
    lengths = [np.zeros(1, np.int64), *(part.lengths for part in parts)]
    no_values = np.zeros(0, np.float32)
    return Encoded(
        ids=np.concatenate([np.zeros(0, np.int32), *(part.ids for part in parts)]),
        supervised=np.concatenate([np.zeros(0, bool), *(part.supervised for part in parts)]),
        offsets=np.cumsum(np.concatenate(lengths)),
        truncated=sum(part.truncated for part in parts),
        dropped=sum(part.dropped for part in parts),
        unrolled=sum(part.unrolled for part in parts),
        short=sum(part.short for part in parts),
        extra={
            name: np.concatenate([no_values, *(part.extra[name] for part in parts)])
            for name in labelling.rows.extra
        },
        together=labelling.rows.together,
    )


def _flatten(
    documents: list[Document], labelling: Labelling, bos_id: int | None, unrolled: int
) -> Encoded:
    rows, limit = labelling.rows, labelling.document_tokens
    kept: list[Document] = []
    truncated = dropped = short = 0
    for first in range(0, len(documents), rows.together):
        unit = documents[first : first + rows.together]
        truncated += sum(len(whole.ids) > limit for whole in unit)
        cut = [_cut(whole, limit, labelling.truncation, bos_id) for whole in unit]
        if all(any(one.learned[1:]) for one in cut):  # the first token has no predecessor
            kept += cut
        else:
            dropped += len(cut)
            short += sum(len(one.ids) < _SHORTEST for one in cut)
    offsets = np.cumsum([0, *(len(one.ids) for one in kept)], dtype=np.int64)
    every = chain.from_iterable(one.learned for one in kept)
    supervised = np.fromiter(every, bool, offsets[-1])
    supervised[offsets[:-1]] = False
    return Encoded(
        ids=np.fromiter(chain.from_iterable(one.ids for one in kept), np.int32, offsets[-1]),
        supervised=supervised,
        offsets=offsets,
        truncated=truncated,
        dropped=dropped,
        unrolled=unrolled,
        short=short,
        extra={
            name: np.fromiter(
                chain.from_iterable(one.extra[name] for one in kept), np.float32, offsets[-1]
            )
            for name in rows.extra
        },
        together=rows.together,
    )


_SHARD: Final = 4_096  # rows; measured: one or two seconds of work on one core
_POOL_FROM: Final = 16_384  # rows; measured: from about here two processes pay off
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
        kept / f"{part.start:012}-{len(pairs)}-{_SHARD}": pairs[part]
        for part in spans(len(pairs), _SHARD)
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
        shard, {name: [values] for name, values in arrays_of(part).items()}, lambda _: counts
    )


def _read_shard(shard: Path) -> Encoded:
    part = _open_shard(shard)
    if part is None:
        raise SetupError(
            "encoded documents changed when they were read back",
            where=str(shard),
            remedy="check the disk, or give another one with MENS_EXP_CACHE=<folder>",
        )
    return part


def _open_shard(shard: Path) -> Encoded | None:
    found = files.open_arrays(shard)
    if found is None:
        return None
    return opened(found[0], {name: found[1][name] for name in _SHARD_COUNTS})
