"""Encoding and packing compared with the tokenizer alone, packing, and opening a large cache.

    python benchmarks/encode.py [copies of the corpus]

Rows are those of `data=stdlib`, so many times over, with a different prompt in each copy. The
tokenizer alone is `tokenizers`' batch encoding of the same rendered texts on all cores; ours is
everything from rows in memory to packed blocks and a cache on disk that was read back. The two are
measured in turns. Processor time is that of all processes. The large cache is opened in fresh
processes, first unverified and then verified.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import record
from processes import timed as timed_process

from mens_exp.config.compose import compose, typed
from mens_exp.corpus.source import labelling_of, load_rows
from mens_exp.model.sources import resolve
from mens_exp.planning.preflight import writable_cache
from mens_exp.rows import files
from mens_exp.rows.cache import CacheKey, encoded_parts
from mens_exp.rows.encode import encode, encode_parts
from mens_exp.rows.packing import cached_blocks, pack
from mens_exp.tokenizer.implementations import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mens_exp.rows.documents import Labelling
    from mens_exp.rows.schema import TrainingPair

QUESTION = "How close do encoding and packing come to the tokenizer alone?"
COPIES, PAIRS = 12, 3
CAPACITIES = (512, 1024, 2048)
ROWS, TOKENS = 1_000_000, 300  # of the large cache: rows, and tokens per row
PIECE = 1000  # distinct rows drawn for it
USUAL = ("trainer=cpu", "logger=none", "suite=none")
SMALLEST = ("model=tiny_llama", "data=synthetic", "data.rows=40", "data.seq_len=1024")
HIGHER, LOWER = record.Better.HIGHER, record.Better.LOWER


def main() -> None:
    """Measure the whole pipeline, packing, and opening a cache."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("copies", type=int, nargs="?", help=f"default: {COPIES}")
    given = record.begin(parser)
    config = typed(compose([[*USUAL, *(SMALLEST if given.smallest else ())]])[0].values)
    cache = writable_cache()
    tokenizer = HfTokenizer.from_directory(resolve(config.model, cache).directory)
    rows = load_rows(config.data, cache).train
    many = [
        dataclasses.replace(pair, prompt=f"{pair.prompt} ({number})")
        for number in range(given.copies or (1 if given.smallest else COPIES))
        for pair in rows
    ]
    labelling, large = labelling_of(config), PIECE if given.smallest else ROWS
    figures = [
        *throughput(many, tokenizer, labelling, 1 if given.smallest else PAIRS),
        *packing(rows, tokenizer, labelling, large),
        *opening(large),
    ]
    record.finish(QUESTION, figures, given)


def throughput(
    pairs: Sequence[TrainingPair], tokenizer: HfTokenizer, labelling: Labelling, rounds: int
) -> Iterator[record.Figure]:
    """Measure the tokenizer alone and the whole pipeline in turns."""
    texts = [
        tokenizer.render(
            [
                {"role": "user", "content": pair.prompt},
                {"role": "assistant", "content": pair.response},
            ],
            add_generation_prompt=False,
        )
        for pair in pairs
    ]
    raw: list[tuple[float, float]] = []
    ours: list[tuple[float, float]] = []
    tokens = 0
    for _ in range(rounds):
        wall, cpu, batch = timed(
            lambda: tokenizer.core.encode_batch_fast(texts, add_special_tokens=False)
        )
        tokens = sum(len(one.ids) for one in batch)
        del batch
        raw.append((tokens / wall, tokens / cpu))
        with tempfile.TemporaryDirectory() as root:
            way = functools.partial(whole_way, pairs, tokenizer, labelling, Path(root))
            wall, cpu, _ = timed(way)
        ours.append((tokens / wall, tokens / cpu))
    for place, clock in enumerate(("by the clock", "by processor time")):
        rates, alone = ([one[place] for one in each] for each in (ours, raw))
        name = f"encoding and packing, {clock}"
        yield record.figure(name, rates, "tokens/s", HIGHER, ("the tokenizer alone", alone))
    yield record.figure("rows encoded", len(pairs), "rows")
    yield record.figure("tokens encoded", tokens, "tokens")


def whole_way(
    pairs: Sequence[TrainingPair], tokenizer: HfTokenizer, labelling: Labelling, root: Path
) -> None:
    """Encode, store, read back and pack rows."""
    key = CacheKey(
        rows_sha256="benchmark",
        tokenizer_sha256=tokenizer.sha256,
        template_sha256=tokenizer.template_sha256,
        special_tokens_sha256="",
        date=None,
        allow_control_text=False,
        labelling=labelling,
    )
    documents, counts = encoded_parts(
        root, key, lambda kept: encode_parts(pairs, tokenizer, labelling, kept)
    )
    cached_blocks(root, counts.sha256, documents.lengths, labelling.seq_len)


def packing(
    pairs: Sequence[TrainingPair], tokenizer: HfTokenizer, labelling: Labelling, many: int
) -> Iterator[record.Figure]:
    """Pack the corpus once per sequence length, and many random lengths."""
    for capacity in CAPACITIES:
        documents = encode(pairs, tokenizer, dataclasses.replace(labelling, seq_len=capacity))
        blocks = pack(documents.lengths, capacity)
        full = len(documents.ids) / (len(blocks) * capacity)
        yield record.figure(f"room filled at {capacity} tokens", full, "frac", HIGHER)
        each = len(documents) / len(blocks)
        yield record.figure(f"documents in a block of {capacity}", each, "documents", HIGHER)
    lengths = np.random.default_rng(0).integers(20, 2049, many)
    sort, _, _ = timed(lambda: np.sort(lengths))
    seconds, _, _ = timed(lambda: pack(lengths, 2048))
    beside = ("sorting their lengths", sort)
    yield record.figure(f"packing {many:,} documents", seconds, "s", LOWER, beside)


def opening(rows: int) -> Iterator[record.Figure]:
    """Open a large cache in fresh processes, first unverified and then verified."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "large"
        piece = np.random.default_rng(0).integers(0, 49152, PIECE * TOKENS, dtype=np.int32)
        pieces = rows // PIECE
        files.store_arrays(
            directory,
            {
                "ids": [piece] * pieces,
                "supervised": [piece % 2 == 0] * pieces,
                "offsets": [np.arange(rows + 1, dtype=np.int64) * TOKENS],
            },
            lambda _: {},
        )
        command = [str(Path(__file__).resolve()), "--open", str(directory)]
        first, again = (
            json.loads(timed_process(command).output.splitlines()[-1]) for _ in range(2)
        )
        hashing, _, _ = timed(lambda: hashed(directory))
        size = sum(file.stat().st_size for file in directory.iterdir())
    name = f"opening {rows:,} rows"
    beside = ("SHA-256 of the same bytes", hashing)
    yield record.figure(f"{name} the first time", first["s"], "s", LOWER, beside)
    yield record.figure(f"{name} again", again["s"], "s", LOWER, ("the first time", first["s"]))
    yield record.figure(f"{name}: size on disk", size / 1e6, "MB")
    grown = max(first["rss_growth_bytes"], again["rss_growth_bytes"]) / 1e6
    yield record.figure(f"{name}: growth of resident memory", grown, "MB", LOWER)


def open_one(directory: Path) -> None:
    """Open a cache, read some of it, and print the time and the memory growth."""
    process = psutil.Process()
    before = process.memory_info().rss
    seconds, _, found = timed(lambda: files.open_arrays(directory))
    assert found is not None, "it is whole"
    offsets = found[0]["offsets"]
    assert len(found[0]["ids"][offsets[5] : offsets[6]]) == TOKENS
    grown = process.memory_info().rss - before
    print(json.dumps({"s": seconds, "rss_growth_bytes": grown}))


def hashed(directory: Path) -> None:
    """Hash every file of a directory."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            hashlib.file_digest(file, "sha256")


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return wall time, CPU time of all processes, and the result."""
    began, before = time.perf_counter(), processor_seconds()
    result = work()
    return time.perf_counter() - began, processor_seconds() - before, result


def processor_seconds() -> float:
    """Return the CPU time of this process and its finished children."""
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--open"]:
        open_one(Path(sys.argv[2]))
    else:
        main()
