"""``data=synthetic``: generated rows, kept in the cache.

Each side has its own task families, so that validation and held-out rows are never variants of
training rows. The name of the cache file covers everything the rows depend on: the settings, the
generator's source, and the interpreter, whose error messages are quoted in repair rows.
"""

from __future__ import annotations

import functools
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.corpus import generator
from mens_exp.corpus.row_files import load_stored_rows, store_rows
from mens_exp.corpus.split import Side

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mens_exp.config.data import SyntheticData
    from mens_exp.rows.schema import TrainingPair

CACHE_FORMAT: Final = "mens_exp_synthetic"
CACHE_VERSION: Final = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The rows of all sides.

    Attributes:
        pairs: train, validation, held-out rows, with each side's families interleaved.
        dropped: draws of the generator that produced no row, by reason.
    """

    pairs: list[TrainingPair]
    dropped: dict[str, int]


def load(config: SyntheticData, cache: Path) -> Corpus:
    """Return the configured rows, from the cache if possible.

    Args:
        config: the `data` group.
        cache: the cache directory; created if it is missing.

    Raises:
        DataError: the families do not have that many different tasks.
        SetupError: the cache cannot be written.
    """
    content = _content(config)
    path = _path(cache, content)
    header, pairs = load_stored_rows(path, content) or ({}, [])
    if isinstance(header.get("dropped"), dict):
        return Corpus(pairs=pairs, dropped=header["dropped"])
    from mens_exp.corpus.generator.generate import generate

    made = {
        side: generate(side, count, config.generator_seed, config.repair_frac)
        for side, count in counts(config).items()
    }
    dropped: dict[str, int] = {}
    for each in made.values():
        for reason, count in each.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    corpus = Corpus(
        pairs=[task.pair for each in made.values() for task in each.tasks], dropped=dropped
    )
    header = {
        "format": CACHE_FORMAT,
        "version": CACHE_VERSION,
        "content_sha256": content,
        "dropped": dropped,
    }
    store_rows(path, header, corpus.pairs)
    return corpus


def counts(config: SyntheticData) -> dict[Side, int]:
    """Return the number of rows on each side."""
    train, val, heldout = config.rows_by_side()
    return {Side.TRAIN: train, Side.VAL: val, Side.HELDOUT: heldout}


def is_cached(config: SyntheticData, cache: Path) -> bool:
    """Return whether `load` would find its cache file, without reading it."""
    return _path(cache, _content(config)).is_file()


def sides_of(pairs: Iterable[TrainingPair]) -> dict[Side, list[TrainingPair]]:
    """Assign each row of `load` to the side of its family; fractions do not matter."""
    from mens_exp.corpus.generator.generate import SIDES

    sides: dict[Side, list[TrainingPair]] = {side: [] for side in Side}
    for pair in pairs:
        sides[SIDES[pair.group]].append(pair)
    return sides


def made_by() -> str:
    """Identify the generator and interpreter that produced the rows."""
    return f"generator {generator_sha256()[:12]}, Python {_python()}"


@functools.cache
def generator_sha256() -> str:
    """Hash the generator's source files."""
    root = Path(generator.__file__).parent
    files = sorted(root.rglob("*.py"))
    return digest([(file.relative_to(root).as_posix(), sha256_file(file)) for file in files])


def _python() -> str:
    return ".".join(platform.python_version_tuple()[:2])


def _content(config: SyntheticData) -> str:
    return digest(
        {
            "made_by": [generator_sha256(), _python()],
            "rows": counts(config),
            "seed": config.generator_seed,
            "repair_frac": config.repair_frac,
        }
    )


def _path(cache: Path, content: str) -> Path:
    return cache / f"synthetic-{content[:12]}-v{CACHE_VERSION}.jsonl"
