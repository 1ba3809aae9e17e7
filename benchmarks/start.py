"""Time of a short run in a process of its own, compared with importing the libraries it stands on.

    python benchmarks/start.py

The run takes three optimizer steps of a tiny model, from the command line to its report; the
imports are those of torch, transformers, PEFT and Lightning, in a fresh interpreter. They take
turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import record

QUESTION = "How long does a short run take, from the command line to its report?"
ROUNDS = 7
IMPORTS = "import torch, transformers, peft, lightning"
RUN = [
    "model=tiny_llama",
    "trainer=cpu",
    "logger=none",
    "suite=none",
    "suite.items=0",
    "data=jsonl",
    "data.seq_len=192",
    "trainer.max_steps=3",
]


def main() -> None:
    """Measure in turns, so that load on the machine affects both."""
    given = record.begin(record.command_line(__file__, __doc__))
    runs, imports = [], []
    with tempfile.TemporaryDirectory() as place:
        rows = Path(place) / "rows.jsonl"
        pairs = [{"prompt": f"What is {n} + 1?", "response": str(n + 1)} for n in range(200)]
        rows.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), "utf-8")
        for number in range(1 if given.smallest else ROUNDS):
            where = [f"data.path={rows}", f"hydra.run.dir={place}/{number}"]
            runs.append(_seconds(["-m", "mens_exp", *RUN, *where]))
            imports.append(_seconds(["-c", IMPORTS]))
    whole = record.figure(
        "three steps", runs, "s", record.Better.LOWER, ("importing the libraries", imports)
    )
    record.finish(QUESTION, [whole], given)


def _seconds(arguments: list[str]) -> float:
    began = time.perf_counter()
    command = [sys.executable, *arguments]
    subprocess.run(command, check=True, capture_output=True)  # noqa: S603  # fixed arguments
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
