"""VoxTokenizer's speed on one core: tokens a second, encoding and decoding.

    python benchmarks/vox_tokenizer.py

The texts are this repository's own source, and one that is all compounds. The reference is to split
the same text at its words with a regular expression, in characters a second.
"""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import record

from mens_exp.tokenizer.implementations import VoxTokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

QUESTION = "How many tokens a second does VoxTokenizer encode and decode?"
SECONDS = 1.0  # per measurement
ROUNDS = 3
COMPOUNDS = "fn f(x) -> { ret a::b == c }  @test let y => spawn(w) "


def main() -> None:
    """Measure both directions and the reference in turns."""
    given = record.begin(record.command_line(__file__, __doc__))
    rounds, seconds, copies = (1, 0.01, 10) if given.smallest else (ROUNDS, SECONDS, 10_000)
    root = Path(__file__).resolve().parents[1] / "src"
    files = sorted(root.rglob("*.py"))[: 5 if given.smallest else None]
    texts = {
        "source code": "".join(file.read_text("utf-8") for file in files),
        "compounds": COMPOUNDS * copies,
    }
    vox, figures = VoxTokenizer(), []
    for name, text in texts.items():
        ids = vox.encode(text)
        works: dict[str, tuple[Callable[[], object], int]] = {
            "encode": (partial(vox.encode, text), len(ids)),
            "decode": (partial(vox.decode, ids), len(ids)),
            "split": (partial(re.findall, r"\w+|\W", text), len(text)),
        }
        rates: dict[str, list[float]] = {work: [] for work in works}
        for _ in range(rounds):
            for work, (action, units) in works.items():
                rates[work].append(rate(action, units, seconds) / 1e6)
        beside = ("splitting it by a regular expression, M characters/s", rates["split"])
        figures += [
            record.figure(f"{work} {name}", rates[work], "M tokens/s", record.Better.HIGHER, beside)
            for work in ("encode", "decode")
        ]
    record.finish(QUESTION, figures, given)


def rate(action: Callable[[], object], units: int, seconds: float) -> float:
    """Return units per second, over about `seconds` seconds and at least one call."""
    calls, start, elapsed = 0, time.perf_counter(), 0.0
    while not calls or elapsed < seconds:
        action()
        calls += 1
        elapsed = time.perf_counter() - start
    return calls * units / elapsed


if __name__ == "__main__":
    main()
