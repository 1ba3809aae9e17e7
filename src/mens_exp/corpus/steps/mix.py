"""The step mix: rows of several sources, each with its exact share."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.corpus import MixBy
from mens_exp.corpus.mix import Drawing, draw, record_of
from mens_exp.corpus.split import Side, project_of
from mens_exp.corpus.steps.row_store import RowStore
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_sides, side_of_file
from mens_exp.errors import DataError, Problems
from mens_exp.rows.files import inner_suffix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from mens_exp.rows.schema import TrainingPair

__all__ = ["mix"]

_NODE = "corpus.mix"
_OF_ROW: dict[MixBy, Callable[[TrainingPair], str]] = {
    MixBy.category: lambda pair: pair.category or "",
    MixBy.language: lambda pair: pair.language or "",
    MixBy.project: project_of,
}


def mix(step: StepInput) -> StepResult:
    """Draw rows of each source by its weight; after a split, those of train.

    Raises:
        DataError: a source has no weight, or a weight no rows; or a source would be repeated too
            often.
        Problems: several of these.
    """
    config = step.config.mix
    how = Drawing(
        weights=config.weights,
        stop=config.stop,
        budget_tokens=config.budget_tokens,
        seed=config.seed,
        settings=(_NODE, f"{_NODE}.weights"),
    )
    counts: Counter[str] = Counter()
    rows_in = 0
    with ExitStack() as stack, RowWriter(step.directory) as writer:
        stores = _Stores(step.scratch, stack)
        for source, side, pair in _told_apart(step):
            rows_in += 1
            if side in {None, Side.TRAIN}:
                stores.of(source).append(pair)
            else:
                writer.write(pair, side)
        sources = stores.by_name
        _check(how.weights, sources)
        # In the order of the weights: neither the order of files nor of rows moves a draw.
        corpora = {name: sources[name] for name in sorted(sources)}
        drawn_side = Side.TRAIN if any(map(side_of_file, step.files)) else None
        for pair in draw(corpora, how, counts):
            writer.write(pair, drawn_side)
        total = writer.total
        record = record_of(corpora, how, counts)
    return StepResult(rows_in=rows_in, rows_out=total, facts={"sources": record})


def _told_apart(step: StepInput) -> Iterator[tuple[str, Side | None, TrainingPair]]:
    by = step.config.mix.by
    for path in step.files:
        for side, pair in read_sides([path]):
            yield _stem(path) if by is MixBy.file else _OF_ROW[by](pair), side, pair


def _stem(path: Path) -> str:
    """Return the name of a file less its endings, `.jsonl.gz` say."""
    suffix = inner_suffix(path)
    return path.name[: path.name.lower().rfind(suffix)] if suffix else path.name


class _Stores:
    """A file of rows for each source."""

    def __init__(self, scratch: Path, stack: ExitStack) -> None:
        self.by_name: dict[str, RowStore] = {}
        self._scratch = scratch
        self._stack = stack

    def of(self, source: str) -> RowStore:
        if source not in self.by_name:
            store = RowStore(self._scratch / f"source-{len(self.by_name):06d}.jsonl")
            self._stack.callback(store.close)
            self.by_name[source] = store
        return self.by_name[source]


def _check(weights: Mapping[str, float], sources: Mapping[str, RowStore]) -> None:
    """Refuse sources without a weight, and weights without a source.

    Raises:
        DataError: there is one.
        Problems: there are several.
    """
    unweighted = [
        DataError(
            "a source has no weight",
            where=f"{_NODE}.weights",
            found=f"{name or 'rows that name none'} ({len(sources[name])} rows)",
            expected="a weight for every source",
            remedy="add one, or leave the source out of the input",
        )
        for name in sources
        if name not in weights
    ]
    empty = [
        DataError(
            "a weight has no source",
            where=f"{_NODE}.weights.{name}",
            found=name,
            expected=expected_name(name, sources),
        )
        for name in weights
        if name not in sources
    ]
    Problems.raise_if([*unweighted, *empty])
