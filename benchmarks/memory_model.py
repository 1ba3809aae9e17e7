"""Predicted peak memory compared with the measured one, over configurations on this CPU.

    python benchmarks/memory_model.py

Each configuration is a process of its own that trains two steps of SmolLM2 on documents as long as
the sequence, where attention costs most. The ledger is emptied before each, so that the prediction
is the formula's alone. About a minute each on two cores.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

import record
from processes import timed

QUESTION = "How close is a plan's predicted peak memory to the measured one?"
COMMON = (
    *(
        "trainer=cpu",
        "logger=none",
        "suite=none",
        "suite.items=0",
        "data=jsonl",
        "data.val_frac=0.1",
    ),
    *("trainer.max_steps=2", "trainer.accumulate_grad_batches=1", "schedule=constant"),
    *("schedule.warmup_steps=0", "data.heldout_frac=0.1", "data.val_max_tokens=512"),
)
# seq_len, micro-batch, rank, and other differences from the default.
Configuration = tuple[int, int, int, tuple[str, ...]]
CONFIGURATIONS: tuple[Configuration, ...] = (
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
SMALLEST: tuple[Configuration, ...] = ((128, 1, 4, ("model=tiny_llama",)),)
ROW_WORDS, SMALLEST_ROW_WORDS = 4000, 100  # longer than any sequence
NEAR = 0.15  # fraction of the measured peak
WORDS = (
    *("the", "value", "of", "an", "index", "name", "in", "this", "list", "returns", "item"),
    *("class", "self", "data", "result"),
)
MIB = 2**20


def main() -> None:
    """Measure every configuration."""
    given = record.begin(record.command_line(__file__, __doc__))
    figures = []
    near = inside = 0
    chosen = SMALLEST if given.smallest else CONFIGURATIONS
    with tempfile.TemporaryDirectory() as place:
        row_words = SMALLEST_ROW_WORDS if given.smallest else ROW_WORDS
        write_rows(Path(place) / "rows.jsonl", row_words)
        for one in chosen:
            plan = measure(Path(place), one)
            memory, peak = plan["memory_bytes"], plan["measured"]["peak_bytes"]
            near += abs(memory["estimate"] / peak - 1) <= NEAR
            inside += memory["low"] <= peak <= memory["high"]
            predicted, measured = memory["estimate"] / MIB, ("measured peak", peak / MIB)
            figures.append(record.figure(named(one), predicted, "MiB", beside=measured))
    for name, count in (("within 15 %", near), ("inside the interval", inside)):
        share = count / len(chosen)
        figures.append(record.figure(f"measured {name}", share, "frac", record.Better.HIGHER))
    record.finish(QUESTION, figures, given)


def named(configuration: Configuration) -> str:
    """Return the name of a configuration's figure."""
    seq_len, micro_batch, rank, more = configuration
    return " ".join([f"predicted for {micro_batch} × {seq_len} tokens, r {rank}", *more])


def write_rows(path: Path, words: int) -> None:
    """Write forty rows of `words` words each."""
    generator = random.Random(0)  # noqa: S311  # text to fill sequences with
    lines = [
        {"prompt": f"Write text {n}.", "response": " ".join(generator.choices(WORDS, k=words))}
        for n in range(40)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")


def measure(place: Path, configuration: Configuration) -> dict[str, Any]:
    """Train two steps in a separate process; return its plan, with the measured values."""
    seq_len, micro_batch, rank, more = configuration
    run = Path(tempfile.mkdtemp(dir=place)) / "run"
    (place / "cache" / "ledger.jsonl").unlink(missing_ok=True)
    sizes = (
        f"data.seq_len={seq_len}",
        f"data.micro_batch_size={micro_batch}",
        f"lora.r={rank}",
        f"data.path={place / 'rows.jsonl'}",
    )
    timed(
        ["-m", "mens_exp", *COMMON, *sizes, *more, f"hydra.run.dir={run}"],
        environment={"OMP_NUM_THREADS": "1", "MENS_EXP_CACHE": str(place / "cache")},
    )
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text("utf-8"))
    return plan


if __name__ == "__main__":
    main()
