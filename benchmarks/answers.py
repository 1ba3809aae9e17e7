"""Greedy answers to a suite's items: ours, and transformers' own batches with a static cache.

    python benchmarks/answers.py [items] [longest answer in tokens] [answers at a time]

SmolLM2-135M in f32, and as the NF4 base of QLoRA, on items of mini_python with their few-shot
prompts. The reference reads the prompts in their order, in batches padded on the left, and waits
for the longest answer of each batch. Both stop at the model's end marker. Each pair of figures is
measured in turns.
"""

from __future__ import annotations

import time
from typing import Any

import record
import torch
from batch_invariance import loaded

from mens_exp.config.suite import MiniPythonSuite
from mens_exp.evals.program_suite import mini_python

QUESTION = "How fast are a suite's answers made, compared with transformers' own generation?"
ITEMS, TOKENS, BATCH, TURNS = 16, 160, 8, 2
FORMS = {
    "f32": ["backend=lora", "quant.compute_dtype=f32"],
    "nf4": ["backend=qlora", "quant.compute_dtype=bf16"],
}


def main() -> None:
    """Measure both implementations in turns."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("items", type=int, nargs="?", help=f"default: {ITEMS}")
    parser.add_argument("tokens", type=int, nargs="?", help=f"default: {TOKENS}")
    parser.add_argument("batch", type=int, nargs="?", help=f"default: {BATCH}")
    given = record.begin(parser)
    small = given.smallest
    items = given.items or (4 if small else ITEMS)
    tokens = given.tokens or (4 if small else TOKENS)
    batch = given.batch or (2 if small else BATCH)
    figures = []
    for name, overrides in FORMS.items():
        backend, tokenizer = loaded(
            ["model=tiny_llama" if small else "model=smollm2_135m", *overrides]
        )
        suite = mini_python(MiniPythonSuite(items=items))
        prompts = tokenizer.encode_prompts([list(item.messages) for item in suite.items])
        options = {
            "max_new_tokens": tokens,
            "end_ids": tokenizer.end_ids,
        }
        rates: list[list[float]] = [[], []]
        made: list[list[list[int]]] = [[], []]
        for _ in range(1 if small else TURNS):
            for at, answer in enumerate((ours, theirs)):
                began = time.perf_counter()
                made[at] = answer(backend, prompts, batch, options)
                seconds = time.perf_counter() - began
                rates[at].append(sum(map(len, made[at])) / seconds)
        same = sum(a == b for a, b in zip(*made, strict=True)) / items
        higher = record.Better.HIGHER
        figures += [
            record.figure(
                f"{name}: ours", rates[0], "tokens/s", higher, ("transformers", rates[1])
            ),
            record.figure(f"{name}: the same answers", same, "frac", higher),
        ]
    record.finish(QUESTION, figures, given)


def ours(backend: Any, prompts: list[list[int]], batch: int, options: Any) -> list[list[int]]:
    """Generate answers as scorecards do."""
    answers: list[list[int]] = backend.generate(prompts, batch_size=batch, **options)
    return answers


def theirs(backend: Any, prompts: list[list[int]], batch: int, options: Any) -> list[list[int]]:
    """Generate answers batch by batch with transformers' `generate`."""
    model, answers = backend.causal_lm.eval(), []
    for start in range(0, len(prompts), batch):
        some = prompts[start : start + batch]
        width = max(map(len, some))
        ids_BT = torch.full((len(some), width), 0)
        mask_BT = torch.zeros_like(ids_BT)
        for row, prompt in enumerate(some):
            ids_BT[row, width - len(prompt) :] = torch.tensor(prompt)
            mask_BT[row, width - len(prompt) :] = 1
        with torch.inference_mode(), backend._compute():  # noqa: SLF001  # as in ours
            output = model.generate(
                input_ids=ids_BT,
                attention_mask=mask_BT,
                max_new_tokens=options["max_new_tokens"],
                do_sample=False,
                eos_token_id=sorted(options["end_ids"]),
                pad_token_id=0,
                cache_implementation="static",
                disable_compile=True,
            )
        answers += [_until(ids, options["end_ids"]) for ids in output[:, width:].tolist()]
    return answers


def _until(ids: list[int], end_ids: set[int]) -> list[int]:
    end = next((at for at, token in enumerate(ids) if token in end_ids), len(ids) - 1)
    return ids[: end + 1]


if __name__ == "__main__":
    main()
