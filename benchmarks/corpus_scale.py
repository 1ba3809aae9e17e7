"""A corpus of a gigabyte through task=corpus and the encoder: peak memory, and growth of time.

    python benchmarks/corpus_scale.py [gigabytes …]
        [--steps validate,dedupe,split] [--no-encode]

For each size distinct rows are written, about 600 bytes each. One process takes them through the
steps of `task=corpus`; another encodes the training rows as a run does before its first step. Rates
are by processor time of all processes, so that they do not depend on what else runs; the reference
is to parse the same rows as JSON and hash them. Memory is the largest sum, over a process and all
of its children, of what each has to itself and its share of what they share (PSS), sampled five
times a second. The last figures are the processor time for a byte of the largest size, compared
with that of the smallest: a ratio of 1 is linear.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import record
from processes import processor_seconds, started, timed

if TYPE_CHECKING:
    from collections.abc import Sequence

QUESTION = "How do time and memory of a corpus grow with its size?"
SCRIPT = str(Path(__file__).resolve())
GIGABYTES, SMALLEST = (0.1, 1.0), (0.0001, 0.0002)
TINY = ("model=tiny_llama", "data.seq_len=2048")  # byte-level tokenizer
STEPS = "validate,dedupe,split"
EVERY_S = 0.2
LINES = 12
HIGHER, LOWER = record.Better.HIGHER, record.Better.LOWER


class Took(NamedTuple):
    """The cost of one stage."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def main() -> None:
    """Measure each size in turn."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("gigabytes", type=float, nargs="*", help="default: 0.1 and 1")
    parser.add_argument("--steps", default=STEPS, help=f"default: {STEPS}")
    parser.add_argument("--no-encode", action="store_true", help="leave out the encoder")
    given = record.begin(parser)
    overrides = TINY if given.smallest else ()
    stages = ["steps"] if given.no_encode else ["steps", "encode"]
    if not given.no_encode:  # its weights are created once, before the measurement
        timed([SCRIPT, "resolve", *overrides])
    figures, for_a_byte = [], []
    for gigabytes in given.gigabytes or (SMALLEST if given.smallest else GIGABYTES):
        size = gigabytes * 1e9
        with tempfile.TemporaryDirectory() as folder:
            rows = Path(folder) / "rows.jsonl"
            count = write_rows(rows, size)
            parsing = parsed(rows)
            took = {"steps": through_steps(Path(folder), given.steps)}
            if not given.no_encode:
                took["encode"] = encoded(Path(folder), given.steps, overrides)
        name, reference = f"{gigabytes:g} GB", "parsing and hashing the same rows"
        figures.append(record.figure(f"{name}: rows", count, "rows"))
        for stage, one in took.items():
            rate, beside = size / 1e6 / one.cpu_seconds, size / 1e6 / parsing
            clock = record.figure(
                f"{name}: {stage}, by the clock", one.seconds, "s", LOWER, (reference, parsing)
            )
            figures += [
                record.figure(
                    f"{name}: {stage}", rate, "MB/s of a core", HIGHER, (reference, beside)
                ),
                clock,
                record.figure(f"{name}: peak of {stage}", one.peak_bytes / 1e6, "MB", LOWER),
            ]
        for_a_byte.append({stage: one.cpu_seconds / size for stage, one in took.items()})
    if len(for_a_byte) > 1:
        first, last = for_a_byte[0], for_a_byte[-1]
        figures += [
            record.figure(
                f"{stage}: a byte of the largest size",
                last[stage] * 1e9,
                "ns of a core",
                LOWER,
                ("a byte of the smallest size", first[stage] * 1e9),
            )
            for stage in stages
        ]
    record.finish(QUESTION, figures, given)


def write_rows(path: Path, size: float) -> int:
    """Write distinct Python rows of about `size` bytes; return the number of rows."""
    rng = random.Random(0)  # noqa: S311 - no secret
    names = ["".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(20_000)]
    rows = written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            body = "\n".join(
                f"    {rng.choice(names)} = {rng.choice(names)}({rng.choice(names)}, "
                f"{rng.randrange(10_000)})"
                for _ in range(LINES)
            )
            function = f"def {rng.choice(names)}_{rows}(a, b):\n{body}\n    return a, b"
            row = {
                "prompt": f"Write {rng.choice(names)} number {rows} of {rng.choice(names)}.",
                "response": function,
                "language": "python",
                "group": f"project::{rows // 20}.py",
            }
            written += file.write(json.dumps(row) + "\n")
            rows += 1
    return rows


def parsed(path: Path) -> float:
    """Return the CPU time of parsing every row and hashing its text."""
    began = time.process_time()
    with path.open("rb") as file:
        for line in file:
            hashlib.sha256(json.loads(line)["response"].encode()).digest()
    return time.process_time() - began


def through_steps(folder: Path, steps: str) -> Took:
    """Run steps of task=corpus on the rows in a directory."""
    command = ["-m", "mens_exp", f"hydra.run.dir={folder}/run", "task=corpus"]
    command += [f"corpus.steps=[{steps}]", f"corpus.input={folder}/rows.jsonl"]
    return watched([*command, f"corpus.output={folder}/corpus"])


def encoded(folder: Path, steps: str, overrides: Sequence[str]) -> Took:
    """Encode the rows that remain after the steps."""
    names = steps.split(",")
    last = folder / "corpus" / f"{len(names):02d}-{names[-1]}"
    return watched([SCRIPT, "encode", str(last), str(folder), *overrides])


def watched(arguments: list[str]) -> Took:
    """Run a process of this interpreter, and track the memory of its process tree."""
    began, before, peak = time.perf_counter(), processor_seconds(), 0
    with started(arguments) as (process, _):
        me = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, resident(me))
            time.sleep(EVERY_S)
    return Took(time.perf_counter() - began, processor_seconds() - before, peak)


def resident(process: psutil.Process) -> int:
    """Return the PSS of a process and its children; 0 for a process that has ended."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += one.memory_full_info().pss
    return total


def encode_rows(corpus: str, folder: str, *overrides: str) -> None:
    """Encode, cache and pack the corpus as a run would."""
    from mens_exp.config.compose import compose, typed
    from mens_exp.corpus.source import load_rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.sources import resolve
    from mens_exp.rows.cache import cache_root
    from mens_exp.tokenizer.load import load_tokenizer

    files = [f"data.path={corpus}/train.jsonl", f"data.val_path={corpus}/val.jsonl"]
    config = typed(compose([["data=jsonl", *files, *overrides]])[0].values)
    tokenizer = load_tokenizer(config.tokenizer, resolve(config.model, cache_root()).directory)
    cache = Path(folder) / "cache"
    data = RowsDataModule(config, load_rows(config.data, cache), tokenizer, cache)
    assert data.train_counts.tokens, "the rows hold text"


def resolve_model(*overrides: str) -> None:
    """Create the model's weights in the cache."""
    from mens_exp.config.compose import compose, typed
    from mens_exp.model.sources import resolve
    from mens_exp.rows.cache import cache_root

    resolve(typed(compose([[*overrides]])[0].values).model, cache_root())


if __name__ == "__main__":
    if sys.argv[1:2] == ["encode"]:
        encode_rows(*sys.argv[2:])
    elif sys.argv[1:2] == ["resolve"]:
        resolve_model(*sys.argv[2:])
    else:
        main()
