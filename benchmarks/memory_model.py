"""Predicted beside measured peak memory, over configurations of SmolLM2 on this machine's CPU.

    python benchmarks/memory_model.py > experiments/memory_model/table.md

Each configuration is a process of its own that trains two steps on documents as long as the
sequence, where attention costs most. The ledger is emptied before each, so that the prediction
is the formula's alone. About a minute each on two cores.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

COMMON = (
    *("model=smollm2_135m", "trainer=cpu", "logger=none", "suite=none"),
    *("trainer.max_steps=2", "trainer.accumulate_grad_batches=1", "schedule=constant"),
    *("schedule.warmup_steps=0", "data=jsonl", "data.val_frac=0.1", "data.heldout_frac=0.1"),
    "data.val_max_tokens=512",
)
# seq_len, micro-batch, rank, and what else differs from the default.
CONFIGURATIONS: tuple[tuple[int, int, int, tuple[str, ...]], ...] = (
    (128, 1, 4, ()),
    (256, 1, 16, ()),
    (256, 4, 8, ()),
    (512, 1, 16, ()),
    (512, 2, 64, ()),
    (512, 4, 16, ()),
    (1024, 1, 16, ()),
    (512, 1, 128, ()),
    (512, 1, 16, ("quant.double_quant=false",)),
    (512, 1, 16, ("quant.compute_dtype=f32",)),
    (512, 1, 16, ("lora.dropout=0",)),
    (256, 8, 8, ("lora=qv", "quant=fp4")),
    (1024, 2, 4, ("lora=attention",)),
    (512, 2, 16, ("model.gradient_checkpointing=on",)),
    (1024, 2, 16, ("model.gradient_checkpointing=on",)),
)
MIB = 2**20


def main() -> None:
    """Measure every configuration and print the table, Markdown."""
    print("| seq_len | micro-batch | r | other | predicted | interval | measured | off |")
    print("| ---: | ---: | ---: | --- | ---: | ---: | ---: | ---: |")
    inside, near = 0, 0
    with tempfile.TemporaryDirectory() as place:
        rows = Path(place) / "rows.jsonl"
        write_rows(rows)
        for seq_len, micro_batch, rank, more in CONFIGURATIONS:
            made = measure(Path(place), rows, seq_len, micro_batch, rank, more)
            memory, peak = made["memory_bytes"], made["measured"]["peak_bytes"]
            off = memory["estimate"] / peak - 1
            near += abs(off) <= 0.15  # noqa: PLR2004  # the figure of issue 4
            inside += memory["low"] <= peak <= memory["high"]
            sizes = (memory["estimate"], memory["low"], memory["high"], peak)
            estimate, low, high, measured = (round(size / MIB) for size in sizes)
            print(
                f"| {seq_len} | {micro_batch} | {rank} | {' '.join(more)} | {estimate} "
                f"| {low} to {high} | {measured} | {off:+.1%} |",
                flush=True,
            )
    total = len(CONFIGURATIONS)
    print(f"\nWithin 15 %: {near} of {total}. Inside the interval: {inside} of {total}. MiB.")


def write_rows(path: Path) -> None:
    """Write forty rows of four thousand words each, longer than any sequence here."""
    words = [
        "the",
        "value",
        "of",
        "an",
        "index",
        "name",
        "in",
        "this",
        "list",
        "returns",
        "item",
        "class",
        "self",
        "data",
        "result",
    ]
    generator = random.Random(0)  # noqa: S311  # text to fill sequences with
    lines = [
        {"prompt": f"Write text {n}.", "response": " ".join(generator.choices(words, k=4000))}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def measure(
    place: Path, rows: Path, seq_len: int, micro_batch: int, rank: int, more: tuple[str, ...]
) -> dict[str, Any]:
    """Train two steps in a process of its own; return its plan, measured values beside."""
    run = Path(tempfile.mkdtemp(dir=place)) / "run"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MENS_EXP_CACHE": str(place / "cache")}
    (place / "cache" / "ledger.jsonl").unlink(missing_ok=True)
    sizes = (
        f"data.seq_len={seq_len}",
        f"data.micro_batch_size={micro_batch}",
        f"lora.r={rank}",
        f"data.path={rows}",
    )
    command = [sys.executable, "-m", "mens_exp", *COMMON, *sizes, *more, f"hydra.run.dir={run}"]
    subprocess.run(command, env=environment, check=True, capture_output=True)  # noqa: S603  # ourselves
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text("utf-8"))
    return plan


if __name__ == "__main__":
    main()
