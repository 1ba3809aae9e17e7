"""The step mix: rows of several sources, each with its exact share."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.corpus import MixBy
from mens_exp.corpus.mix import Drawing, draw, record_of
from mens_exp.corpus.split import Side, project_of
from mens_exp.corpus.steps.row_store import RowStore
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_sides, side_of_file
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.rows.files import inner_suffix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from mens_exp.rows.schema import TrainingPair

__all__ = ["mix"]

_NODE: Final = "corpus.mix"
_TOLD: Final = 5  # sources told by name
_OF_ROW: Final[dict[MixBy, Callable[[TrainingPair], str]]] = {
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
        # By name: neither the order of files nor of weights moves a draw.
        corpora = {
            name: RowStore(step.scratch / f"source-{number:06d}.jsonl")
            for number, name in enumerate(sorted(config.weights))
        }
        for store in corpora.values():
            stack.callback(store.close)
        unweighted: Counter[str] = Counter()
        for source, side, pair in _told_apart(step):
            rows_in += 1
            if side not in {None, Side.TRAIN}:
                writer.write(pair, side)
            elif source in corpora:
                corpora[source].append(pair)
            else:
                unweighted[source] += 1
        _check(corpora, unweighted)
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


def _check(corpora: Mapping[str, RowStore], unweighted: Counter[str]) -> None:
    """Refuse sources without a weight, and weights without a source.

    Raises:
        DataError: there are some.
        Problems: there are some of both.
    """
    problems: list[MensError] = []
    known = {*unweighted, *(name for name, store in corpora.items() if store)}
    if unweighted:
        told = [
            f"{name or 'no name'} ({rows} rows)" for name, rows in unweighted.most_common(_TOLD)
        ]
        more = f" and {len(unweighted) - _TOLD} more" if len(unweighted) > _TOLD else ""
        problems.append(
            DataError(
                "sources have no weight" if len(unweighted) > 1 else "a source has no weight",
                where=f"{_NODE}.weights",
                found=f"{', '.join(told)}{more}",
                expected="a weight for every source",
                remedy=f"add one, leave the source out of the input, or choose another {_NODE}.by",
            )
        )
    problems += [
        DataError(
            "a weight has no source",
            where=f"{_NODE}.weights.{name}",
            found=name,
            expected=expected_name(name, known),
        )
        for name in corpora
        if name not in known
    ]
    Problems.raise_if(problems)
