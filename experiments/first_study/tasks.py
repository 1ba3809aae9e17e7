"""Write the study's rows and its suite: two steps over a list of numbers, in Python.

Usage: python experiments/first_study/tasks.py <directory>

A task is a pair of steps, and the suite's pairs are not trained on. `train.jsonl` holds rows for
data=jsonl, `suite.jsonl` tasks in MBPP's form for suite=humaneval. The same bytes every time.
"""

from __future__ import annotations

import itertools
import json
import random
import sys
from pathlib import Path

# What a step does, and its expression over `values`; {k} is a small number.
STEPS = [
    ("keeps the numbers above {k}", "[value for value in values if value > {k}]"),
    ("keeps the numbers below {k}", "[value for value in values if value < {k}]"),
    ("keeps the multiples of {k}", "[value for value in values if value % {k} == 0]"),
    ("keeps the even numbers", "[value for value in values if value % 2 == 0]"),
    ("keeps the odd numbers", "[value for value in values if value % 2 == 1]"),
    ("multiplies each number by {k}", "[value * {k} for value in values]"),
    ("adds {k} to each number", "[value + {k} for value in values]"),
    ("subtracts {k} from each number", "[value - {k} for value in values]"),
    ("squares each number", "[value * value for value in values]"),
    ("negates each number", "[-value for value in values]"),
    ("drops the first {k} numbers", "values[{k}:]"),
    ("takes the first {k} numbers", "values[:{k}]"),
    ("takes the last {k} numbers", "values[-{k}:]"),
    ("takes every second number", "values[::2]"),
    ("reverses the list", "values[::-1]"),
    ("sorts the list", "sorted(values)"),
    ("sorts the list in descending order", "sorted(values, reverse=True)"),
    ("drops repeated numbers", "list(dict.fromkeys(values))"),
]
TEXT = (
    "Write a Python function that takes a list of numbers, {first}, then {second}, and returns the "
    "list."
)
ASKED = (
    "{text}\nThe function is called `{name}` and must pass this test:\n\n"
    "```python\n{test}\n```\n\nAnswer with the code only."
)
NAME = "transform"
HELD_OUT = 0.2  # of the pairs
ROWS, ITEMS, TESTS = 1500, 48, 4
NUMBERS = range(-5, 40)


def task(draw: random.Random, pair: tuple[int, int]) -> dict[str, object]:
    """Return one task: text, code, tests that the code passes."""
    said, done = [], []
    for place in pair:
        k = draw.randint(2, 9)
        words, code = STEPS[place]
        said.append(words.format(k=k))
        done.append(code.format(k=k))
    code = f"def {NAME}(values):\n    values = {done[0]}\n    return {done[1]}\n"
    space: dict[str, object] = {}
    exec(code, space)  # noqa: S102  # of the lines above
    tests = []
    for _ in range(TESTS):
        values = [draw.choice(NUMBERS) for _ in range(12)]
        found = space[NAME](list(values))  # type: ignore[operator]
        tests.append(f"assert {NAME}({values}) == {found}")
    text = TEXT.format(first=said[0], second=said[1])
    return {"text": text, "code": code, "test_list": tests}


def main(directory: Path) -> None:
    """Write both files."""
    draw = random.Random(0)  # noqa: S311  # not for secrets
    pairs = [pair for pair in itertools.product(range(len(STEPS)), repeat=2) if pair[0] != pair[1]]
    draw.shuffle(pairs)
    kept = int(len(pairs) * HELD_OUT)
    held, trained = pairs[:kept], pairs[kept:]
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "suite.jsonl").open("w", encoding="utf-8") as file:
        for number in range(ITEMS):
            one = {"task_id": f"two-steps/{number}"} | task(draw, held[number])
            file.write(json.dumps(one) + "\n")
    with (directory / "train.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(ROWS):
            pair = draw.choice(trained)
            one = task(draw, pair)
            asked = ASKED.format(text=one["text"], name=NAME, test=one["test_list"][0])  # type: ignore[index]
            row = {"prompt": asked, "response": one["code"], "group": f"{pair[0]}-{pair[1]}"}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
