"""Preference pairs with their prompt computed once, compared with twice, in turns in one process.

    python benchmarks/shared_prompts.py [overrides …]

Tokens, seconds and processor time of a pair over whole micro-batches of `objective=dpo`: forward
passes of adapter and base, and the backward pass. Prompts and answers are of random words; both
arms have the same rows, seeds and weights.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import record

from mens_exp.config.overrides import check
from mens_exp.corpus.source import load_rows
from mens_exp.data.datamodule import RowsDataModule
from mens_exp.errors import Problems
from mens_exp.model.sources import resolve
from mens_exp.planning.preflight import writable_cache
from mens_exp.tokenizer.load import load_tokenizer
from mens_exp.training.build import build_backend, build_module, lightning_quiet

QUESTION = "How much does a pair of answers cost if its prompt is computed once?"
ROUNDS, PAIRS = 3, 160
WORDS = ((80, 20), (20, 20))  # per prompt, and per answer
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALLEST = ("model=tiny_llama", "data.seq_len=2048")
FULL = ("data.seq_len=1024",)


def main() -> None:
    """Measure both arms in turns, for each prompt length."""
    parser = record.command_line(__file__, __doc__)
    parser.add_argument("overrides", nargs="*", help="of both arms")
    given = record.begin(parser)
    rounds = 1 if given.smallest else ROUNDS
    figures = []
    for prompt, answer in WORDS:
        with tempfile.TemporaryDirectory() as place:
            path = Path(place, "pairs.jsonl")
            path.write_text(
                "".join(json.dumps(row) + "\n" for row in pairs(prompt, answer)), "utf-8"
            )
            usual = ["trainer=cpu", "objective=dpo", "data=jsonl", f"data.path={path}"]
            usual += [*(SMALLEST if given.smallest else FULL), *given.overrides]
            arms = [Arm([*usual, f"objective.share_prompt={one}"]) for one in ("true", "false")]
        for arm in arms:
            arm.measure()
        found = [[arm.measure() for arm in arms] for _ in range(rounds)]
        once, twice = zip(*found, strict=True)
        lower = record.Better.LOWER
        name = f"{prompt} words of prompt, {answer} of each answer"
        units = {"tokens": "tokens/pair", "time": "s/pair", "processor time": "s/pair"}
        for at, (what, unit) in enumerate(units.items()):
            mine, its = ([one[at] for one in arm] for arm in (once, twice))
            beside = ("prompt twice", its)
            figures.append(record.figure(f"{name}: {what}", mine, unit, lower, beside))
    record.finish(QUESTION, figures, given)


def pairs(prompt: int, answer: int) -> list[dict[str, str]]:
    """Return rows of random words, identical in every run."""
    draws = random.Random(0)  # noqa: S311 - no secret

    def words(count: int) -> str:
        return " ".join(
            "".join(draws.choices(LETTERS, k=draws.randint(2, 8))) for _ in range(count)
        )

    names = {"prompt": prompt, "chosen": answer, "rejected": answer}
    return [{name: words(count) for name, count in names.items()} for _ in range(PAIRS)]


class Arm:
    """One configuration in a manual loop: forward and backward, without an optimizer."""

    def __init__(self, overrides: list[str]) -> None:
        """Build model, data and objective as training does."""
        checked = check(overrides)
        Problems.raise_if(checked.problems)
        config = checked.cells[0].config
        cache = writable_cache()
        base = resolve(config.model, cache)
        tokenizer = load_tokenizer(config.tokenizer, base.directory)
        data = RowsDataModule(config, load_rows(config.data, cache), tokenizer, cache)
        with lightning_quiet():
            self.module: Any = build_module(config, build_backend(config, base), data).train()
        self.stream = data.train_dataloader()
        self.position = 0

    def measure(self) -> tuple[float, float, float]:
        """Return tokens, seconds and CPU time per pair, over one micro-batch."""
        batch = self.stream.batch(self.position)
        self.position += 1
        began = time.perf_counter(), time.process_time()
        loss = self.module.passed(batch)[1]
        loss.total.backward()
        ended = time.perf_counter(), time.process_time()
        taken = [(last - first) / loss.count for first, last in zip(began, ended, strict=True)]
        return batch.tokens / loss.count, taken[0], taken[1]


if __name__ == "__main__":
    main()
