"""Greedy answers to the same items, alone and in a batch of sixteen.

    python benchmarks/batch_invariance.py [items] [longest answer in tokens] [f32|bf16 …]

SmolLM2-135M as `task=evaluate path=base` loads it without quantization, on items of mini_python. An
answer is identical if its text is. The reference of the time is to answer one item at a time.
"""

from __future__ import annotations

import time
from typing import Any

import record

from mens_exp.config.compose import compose, typed
from mens_exp.config.suite import MiniPythonSuite
from mens_exp.evals.engines import Generation, GraphEngine, Request
from mens_exp.evals.program_suite import mini_python
from mens_exp.model.sources import resolve
from mens_exp.rows.cache import cache_root
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training.build import build_backend

QUESTION = "Does an item get the same greedy answer alone and in a batch?"
ITEMS, TOKENS, DTYPES = 48, 32, ("f32", "bf16")
BATCH = 16


def main() -> None:
    """Generate answers alone and in batches, in each dtype."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("items", type=int, nargs="?", help=f"default: {ITEMS}")
    parser.add_argument("tokens", type=int, nargs="?", help=f"default: {TOKENS}")
    parser.add_argument("dtypes", nargs="*", metavar="dtype", help="default: f32 and bf16")
    given = record.begin(parser)
    small = given.smallest
    items, tokens = given.items or (2 if small else ITEMS), given.tokens or (4 if small else TOKENS)
    figures = []
    for dtype in given.dtypes or (DTYPES[:1] if small else DTYPES):
        model = "tiny_llama" if small else "smollm2_135m"
        backend, tokenizer = loaded([f"model={model}", f"quant.compute_dtype={dtype}"])
        seconds, answers = [], []
        for size in (1, BATCH):
            began = time.perf_counter()
            answers.append(texts(backend, tokenizer, items, tokens, size))
            seconds.append(time.perf_counter() - began)
        alone, together = answers
        differ = [apart(a, b) for a, b in zip(alone, together, strict=True) if a != b]
        higher, lower = record.Better.HIGHER, record.Better.LOWER
        figures += [
            record.figure(f"{dtype}: identical", 1 - len(differ) / items, "frac", higher),
            record.figure(
                f"{dtype}: in batches", seconds[1], "s", lower, ("one item at a time", seconds[0])
            ),
        ]
        if differ:
            name = f"{dtype}: characters before the others differ"
            figures.append(record.figure(name, differ, "characters", higher))
    record.finish(QUESTION, figures, given)


def loaded(overrides: list[str]) -> tuple[Any, Any]:
    """Return an unquantized model without adapter, and its tokenizer."""
    usual = ["backend=lora", "trainer=cpu", "logger=none"]
    config = typed(compose([[*usual, *overrides]])[0].values)
    base = resolve(config.model, cache_root())
    return build_backend(config, base), load_tokenizer(config.tokenizer, base.directory)


def texts(backend: Any, tokenizer: Any, items: int, tokens: int, batch: int) -> list[str]:
    """Return the greedy answers to the first items."""
    suite = mini_python(MiniPythonSuite(items=items))
    engine = GraphEngine(backend, tokenizer, Generation(max_new_tokens=tokens, batch_size=batch))
    requests = [Request(messages=item.messages, seed=0) for item in suite.items]
    with backend.base_only():
        return [one.text for one in engine.complete(requests)]


def apart(one: str, other: str) -> int:
    """Return the position of the first difference."""
    places = (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(places, min(len(one), len(other)))


if __name__ == "__main__":
    main()
