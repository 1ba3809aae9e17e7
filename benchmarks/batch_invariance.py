"""Does an item get the same greedy answer alone and in a batch of sixteen?

SmolLM2-135M as `task=evaluate path=base` loads it without quantization, on items of mini_python, in
f32 and in bf16. Prints the share of items whose text is identical, and where the others part.

    python benchmarks/batch_invariance.py [items] [longest answer in tokens] [f32|bf16]
"""

from __future__ import annotations

import sys
import time
from typing import Any

from mens_exp.config.compose import compose, typed
from mens_exp.config.suite import MiniPythonSuite
from mens_exp.evals.generation import Generation, GraphEngine, Request
from mens_exp.evals.mini_python import mini_python
from mens_exp.model.resolve import resolve
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.hf import HfTokenizer
from mens_exp.training.build import build_backend

_BATCHES = (1, 16)


def texts(backend: Any, tokenizer: HfTokenizer, items: int, tokens: int, batch: int) -> list[str]:
    """Return the greedy answers to the first items."""
    suite = mini_python(MiniPythonSuite(items=items))
    engine = GraphEngine(backend, tokenizer, Generation(max_new_tokens=tokens, batch_size=batch))
    requests = [Request(messages=item.messages, seed=0) for item in suite.items]
    with backend.base_only():
        return [one.text for one in engine.complete(requests)]


def apart(one: str, other: str) -> int:
    """Return the first character that differs."""
    places = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))


def main(items: int, tokens: int, *dtypes: str) -> None:
    """Print the shares."""
    for dtype in dtypes or ("f32", "bf16"):
        overrides = ["model=smollm2_135m", "backend=lora", f"quant.compute_dtype={dtype}"]
        config = typed(compose([[*overrides, "trainer=cpu", "logger=none"]])[0].values)
        base = resolve(config.model, cache_root())
        backend = build_backend(config, base)
        tokenizer = HfTokenizer.from_directory(base.directory)
        began = time.perf_counter()
        alone, together = (texts(backend, tokenizer, items, tokens, size) for size in _BATCHES)
        differ = [apart(a, b) for a, b in zip(alone, together, strict=True) if a != b]
        took = time.perf_counter() - began
        print(
            f"{dtype}: {items - len(differ)} of {items} items identical "
            f"({(items - len(differ)) / items:.1%}), {tokens} tokens at most, {took:.0f} s; "
            f"the others part after {differ or 'no'} characters",
            flush=True,
        )


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:3]]
    main(*(given + [48, 32][len(given) :]), *sys.argv[3:])
