"""Encoding and packing beside what the tokenizer alone takes, packing, and opening a large cache.

    python benchmarks/encode.py [copies of the corpus, 12 by default]

Rows are those of `data=stdlib`, so many times over, each copy's prompts told apart. The tokenizer
alone is `tokenizers`' batch encoding of the same rendered texts on all cores; ours is everything
from rows in memory to packed blocks and a cache on disk that was read back. The two are measured in
turns. Times of the processor count all processes and do not depend on what else the machine does.
Writes benchmarks/results/encode.json.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil

from mens_exp.config.compose import compose, typed
from mens_exp.corpus.source import labelling_of, load_rows
from mens_exp.data.packed import packed
from mens_exp.data.packing import pack
from mens_exp.plan.preflight import writable_cache
from mens_exp.rows import arrays
from mens_exp.rows.cache import CacheKey, encoded_parts
from mens_exp.rows.encode import encode
from mens_exp.rows.shards import encode_parts, usable_cores
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.rows.encode import Labelling
    from mens_exp.rows.schema import TrainingPair

COPIES, PAIRS = 12, 3
CAPACITIES = (512, 1024, 2048)
ROWS, TOKENS = 1_000_000, 300  # of the large cache: rows, and tokens of each
RESULTS = Path(__file__).parent / "results" / "encode.json"


def timed(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Return the time on the wall, that of the processor in all processes, and the result."""
    began, before = time.perf_counter(), _processor()
    result = work()
    return time.perf_counter() - began, _processor() - before, result


def _processor() -> float:
    kinds = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return sum(sum(resource.getrusage(kind)[:2]) for kind in kinds)


def throughput(
    pairs: list[TrainingPair], tokenizer: HfTokenizer, labelling: Labelling
) -> dict[str, Any]:
    """Measure the tokenizer alone and the whole way in turns."""
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
    found: dict[str, list[float]] = {"raw_s": [], "raw_cpu_s": [], "ours_s": [], "ours_cpu_s": []}
    tokens = 0
    for _ in range(PAIRS):
        wall, cpu, batch = timed(
            lambda: tokenizer.core.encode_batch_fast(texts, add_special_tokens=False)
        )
        found["raw_s"].append(wall)
        found["raw_cpu_s"].append(cpu)
        tokens = sum(len(one.ids) for one in batch)
        del batch
        with tempfile.TemporaryDirectory() as root:
            way = functools.partial(_whole_way, pairs, tokenizer, labelling, Path(root))
            wall, cpu, _ = timed(way)
        found["ours_s"].append(wall)
        found["ours_cpu_s"].append(cpu)
    shares = [raw / ours for raw, ours in zip(found["raw_s"], found["ours_s"], strict=True)]
    cpu = [raw / ours for raw, ours in zip(found["raw_cpu_s"], found["ours_cpu_s"], strict=True)]
    return {
        "rows": len(pairs),
        "tokens": tokens,
        **{name: [round(one, 2) for one in values] for name, values in found.items()},
        "of_raw_frac": round(statistics.median(shares), 3),
        "of_raw_cpu_frac": round(statistics.median(cpu), 3),
    }


def _whole_way(
    pairs: list[TrainingPair], tokenizer: HfTokenizer, labelling: Labelling, root: Path
) -> None:
    key = CacheKey(
        rows_sha256="benchmark",
        tokenizer_sha256=tokenizer.sha256,
        template_sha256=tokenizer.template_sha256,
        special_tokens_sha256="",
        allow_control_text=False,
        labelling=labelling,
    )
    documents, counts = encoded_parts(
        root, key, lambda kept: encode_parts(pairs, tokenizer, labelling, kept)
    )
    packed(root, counts.sha256, documents.lengths, labelling.seq_len)


def packing(
    pairs: list[TrainingPair], tokenizer: HfTokenizer, labelling: Labelling
) -> dict[str, Any]:
    """Pack the corpus once for each length."""
    found = {}
    for capacity in CAPACITIES:
        documents = encode(pairs, tokenizer, dataclasses.replace(labelling, seq_len=capacity))
        blocks = pack(documents.lengths, capacity)
        found[str(capacity)] = {
            "efficiency_frac": round(len(documents.ids) / (len(blocks) * capacity), 4),
            "documents_per_block": round(len(documents) / len(blocks), 2),
        }
    lengths = np.random.default_rng(0).integers(20, 2049, ROWS)
    found["million_documents_s"] = round(timed(lambda: pack(lengths, 2048))[0], 2)
    return found


def opening() -> dict[str, Any]:
    """Open a cache of a million rows in fresh processes: the first time, and when verified."""
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root) / "large"
        piece = np.random.default_rng(0).integers(0, 49152, 1000 * TOKENS, dtype=np.int32)
        pieces = ROWS // 1000
        arrays.store(
            directory,
            {
                "ids": [piece] * pieces,
                "supervised": [piece % 2 == 0] * pieces,
                "offsets": [np.arange(ROWS + 1, dtype=np.int64) * TOKENS],
            },
            lambda _: {},
        )
        size = sum(file.stat().st_size for file in directory.iterdir())
        command = [sys.executable, __file__, "--open", str(directory)]
        found = [
            json.loads(subprocess.run(command, check=True, capture_output=True).stdout)  # noqa: S603  # ourselves
            for _ in range(2)
        ]
    return {"rows": ROWS, "bytes": size, "first": found[0], "again": found[1]}


def open_one(directory: Path) -> None:
    """Open a cache, use a little of it, and print the time and how much memory grew."""
    process = psutil.Process()
    before = process.memory_info().rss
    wall, cpu, found = timed(lambda: arrays.opened(directory))
    assert found is not None, "it is whole"
    offsets = found[0]["offsets"]
    assert len(found[0]["ids"][offsets[5] : offsets[6]]) == TOKENS
    grown = process.memory_info().rss - before
    print(json.dumps({"s": round(wall, 3), "cpu_s": round(cpu, 3), "rss_growth_bytes": grown}))


def main(copies: int) -> None:
    """Measure everything and write the record."""
    config = typed(compose([["trainer=cpu", "logger=none", "suite=none"]])[0].values)
    cache = writable_cache()
    from mens_exp.model.resolve import resolve

    tokenizer = HfTokenizer.from_directory(resolve(config.model, cache).directory)
    rows = load_rows(config.data, cache).train
    many = [
        dataclasses.replace(pair, prompt=f"{pair.prompt} ({number})")
        for number in range(copies)
        for pair in rows
    ]
    labelling = labelling_of(config)
    record = {
        "command": f"python benchmarks/encode.py {copies}",
        "machine": f"{platform.machine()}, {usable_cores()} cores, Python "
        f"{platform.python_version()}; load {os.getloadavg()[0]:.1f} when it began",
        "tokenizer": "SmolLM2-135M-Instruct",
        "encode_and_pack": throughput(many, tokenizer, labelling),
        "packing": packing(rows, tokenizer, labelling),
        "opening": opening(),
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record, indent=2))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--open"]:
        open_one(Path(sys.argv[2]))
    else:
        main(int(sys.argv[1]) if len(sys.argv) > 1 else COPIES)
