"""A corpus of a gigabyte through task=corpus and the encoder: peak memory, and how time grows.

    python benchmarks/corpus_scale.py [gigabytes, 0.1 and 1 by default ...]
        [steps=validate,dedupe,split] [encode=no]

For each size distinct rows are written, about 600 bytes each; then `task=corpus` does the steps in
a process of its own, and unless encode=no another encodes the training rows as a run would before
its first step. Memory is the largest sum, over a process and all of its children, of what each has
to itself and its share of what they share (PSS), sampled five times a second; time is that of the
whole command, on the clock and as processor time of all its processes. Ends with the processor time
for a gigabyte of the largest size over that of the smallest: 1 is linear, whatever else runs.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

STEPS = "validate,dedupe,split"
EVERY_S = 0.2
LINES = 12


class Took(NamedTuple):
    """What a command took."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int


def write_rows(path: Path, size: float) -> int:
    """Write distinct rows of Python, so many bytes of them; return how many rows."""
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


def watched(command: Sequence[str]) -> Took:
    """Run a command, and watch the memory of it and of its children.

    Raises:
        SystemExit: it failed.
    """
    began, before, peak = time.perf_counter(), processor_seconds(), 0
    with subprocess.Popen(command) as process:  # noqa: S603 - our own interpreter
        me = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, resident(me))
            time.sleep(EVERY_S)
    if process.returncode:
        sys.exit(f"{' '.join(command)}: exit code {process.returncode}")
    return Took(time.perf_counter() - began, processor_seconds() - before, peak)


def processor_seconds() -> float:
    """Return the processor time of all children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def resident(process: psutil.Process) -> int:
    """Return the proportional memory of a process and its children; of one that ended, nothing."""
    total = 0
    with contextlib.suppress(psutil.Error):
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                total += one.memory_full_info().pss
    return total


def encode_rows(corpus: str, folder: str) -> None:
    """Encode, cache and pack what a run on the corpus would, with its default model's tokenizer."""
    from mens_exp.config.compose import compose, typed
    from mens_exp.corpus.source import load_rows
    from mens_exp.data.datamodule import RowsDataModule
    from mens_exp.model.resolve import resolve
    from mens_exp.rows.cache import cache_root
    from mens_exp.tokenizer.load import load_tokenizer

    files = [f"data.path={corpus}/train.jsonl", f"data.val_path={corpus}/val.jsonl"]
    config = typed(compose([["data=jsonl", *files]])[0].values)
    tokenizer = load_tokenizer(config.tokenizer, resolve(config.model, cache_root()).directory)
    cache = Path(folder) / "cache"
    data = RowsDataModule(config, load_rows(config.data, cache), tokenizer, cache)
    print(f"  {data.train_counts.tokens:,} tokens", flush=True)


def measure(folder: Path, size: float, steps: str, *, encode: bool) -> dict[str, Took]:
    """Write a corpus, and take it through its steps and the encoder."""
    rows = folder / "rows.jsonl"
    count = write_rows(rows, size)
    print(f"{size / 1e9:g} GB, {count:,} rows:", flush=True)
    program = [sys.executable, "-m", "mens_exp", f"hydra.run.dir={folder}/run"]
    out = folder / "corpus"
    command = [*program, "task=corpus", f"corpus.steps=[{steps}]"]
    command += [f"corpus.input={rows}", f"corpus.output={out}"]
    took = {steps: told(steps, watched(command), size)}
    names = steps.split(",")
    last = out / f"{len(names):02d}-{names[-1]}"
    if encode:
        command = [sys.executable, __file__, "encode", str(last), str(folder)]
        took["encode"] = told("encode", watched(command), size)
    return took


def told(name: str, took: Took, size: float) -> Took:
    """Print what a command took, and return it."""
    print(
        f"  {name}: {took.seconds:.1f} s, {took.cpu_seconds:.1f} s of processor time, "
        f"{size / took.cpu_seconds / 1e6:.2f} MB/s of one core, "
        f"peak {took.peak_bytes / 1e6:,.0f} MB",
        flush=True,
    )
    return took


def main(arguments: Sequence[str]) -> None:
    """Measure each size in turn."""
    options = dict(one.split("=", 1) for one in arguments if "=" in one)
    sizes = [float(one) * 1e9 for one in arguments if "=" not in one] or [1e8, 1e9]
    steps = options.get("steps", STEPS)
    took: list[dict[str, Took]] = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            encode = options.get("encode") != "no"
            took.append(measure(Path(folder), size, steps, encode=encode))
    if len(sizes) > 1:
        for name in took[0]:
            first, last = (took[i][name].cpu_seconds / sizes[i] for i in (0, -1))
            print(f"{name}: a byte takes {last / first:.2f} times as long at the largest size")


if __name__ == "__main__":
    if sys.argv[1:2] == ["encode"]:
        encode_rows(*sys.argv[2:])
    else:
        main(sys.argv[1:])
