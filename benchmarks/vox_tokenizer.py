"""VoxTokenizer's speed: tokens a second, encoding and decoding, on one core.

python benchmarks/vox_tokenizer.py
"""

from __future__ import annotations

import time
from pathlib import Path

from mens_exp.tokenizer.vox import VoxTokenizer

SECONDS = 1.0  # of each measurement


def rate(action: object, tokens: int) -> float:
    """Return tokens a second over about :data:`SECONDS`."""
    assert callable(action)
    calls, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < SECONDS:
        action()
        calls += 1
    return calls * tokens / elapsed


def main() -> None:
    """Measure on this repository's own source, and on text that is all compounds."""
    root = Path(__file__).resolve().parents[1] / "src"
    texts = {
        "source code": "".join(file.read_text("utf-8") for file in sorted(root.rglob("*.py"))),
        "compounds": "fn f(x) -> { ret a::b == c }  @test let y => spawn(w) " * 10_000,
    }
    vox = VoxTokenizer()
    for name, text in texts.items():
        ids = vox.encode(text)
        encoding = rate(lambda text=text: vox.encode(text), len(ids)) / 1e6
        decoding = rate(lambda ids=ids: vox.decode(ids), len(ids)) / 1e6
        print(
            f"{name:12} {len(ids):9,} tokens   encode {encoding:6.1f} M/s   "
            f"decode {decoding:6.1f} M/s"
        )


if __name__ == "__main__":
    main()
