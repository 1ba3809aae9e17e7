"""Steps that arrange rows: split by group, mix sources by weight, and curriculum by difficulty.

split verifies that no group is on two sides. mix gives each source its exact share and reads rows
from disk by number. curriculum is an external merge sort. If a row states no difficulty, it is
estimated from its answer.
"""

from __future__ import annotations

import ast
import heapq
import json
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, BinaryIO, Final, overload

import numpy as np

from mens_exp.artifacts.atomic import json_line
from mens_exp.config.corpus import DifficultyOrder, MixBy, SplitBy
from mens_exp.corpus.mix import Drawing, draw, record_of
from mens_exp.corpus.python_source import parse
from mens_exp.corpus.split import (
    HashPrefixes,
    Side,
    bounds_of,
    distinct,
    group_of,
    hash_prefix,
    project_of,
)
from mens_exp.corpus.steps.step import (
    RowWriter,
    StepInput,
    StepResult,
    read_rows,
    read_sides,
    side_of_file,
)
from mens_exp.errors import DataError, MensError, Problems, expected_name
from mens_exp.rows.files import inner_suffix
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import TrainingPair, to_json

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from mens_exp.config.corpus import SplitStepConfig


def split(step: StepInput) -> StepResult:
    """Split the rows as `corpus.split.split` does for a run, in two passes over the files.

    The first pass hashes every group, at eight bytes per row; the second writes. The output is then
    read again to verify that no group, and no row content, is on two sides.

    Raises:
        DataError: there are too few groups for the requested sides, or a row is on two sides.
    """
    config = step.config.split
    key = project_of if config.by is SplitBy.project else group_of
    heads = array("Q", (hash_prefix(key(pair)) for pair in read_rows(step.files)))
    groups = distinct(heads)
    bounds = bounds_of(groups, config.val_frac, config.heldout_frac)
    with RowWriter(step.directory) as writer:
        for pair in read_rows(step.files):
            writer.write(pair, bounds.side(hash_prefix(key(pair))))
        rows = {name: writer.rows.get(f"{name}.jsonl", 0) for name in Side}
        total = writer.total
    _refuse_empty(rows, len(groups), config)
    checked = _leakage(step.directory, key)
    return StepResult(
        rows_in=len(heads),
        rows_out=total,
        facts={
            "groups": checked,
            "rows": {str(name): count for name, count in rows.items()},
            "by": config.by.value,
            "by_rank": bounds.ranked,
            "leakage": {"groups_on_two_sides": 0, "contents_on_two_sides": 0},
        },
    )


def _refuse_empty(rows: dict[Side, int], groups: int, config: SplitStepConfig) -> None:
    wanted = {Side.TRAIN: 1.0, Side.VAL: config.val_frac, Side.HELDOUT: config.heldout_frac}
    empty = [str(side) for side, share in wanted.items() if share > 0 and not rows[side]]
    if empty:
        raise DataError(
            f"no row is left for {' and '.join(empty)}",
            where="corpus.split",
            found=f"{groups} groups by {config.by.value}",
            expected="a group for every side whose share is above 0",
            remedy="add rows of other groups, set a share to 0, or choose another corpus.split.by",
        )


def _leakage(directory: Path, key: Callable[[TrainingPair], str]) -> dict[str, int]:
    """Read the written files, and refuse a key (group or content) that is on two sides.

    Returns:
        The number of groups on each side.

    Raises:
        DataError: a group or a content is on two sides; the first one is named by its hash.
    """
    groups: dict[Side, HashPrefixes] = {}
    contents: dict[Side, HashPrefixes] = {}
    for side in Side:
        path = directory / f"{side}.jsonl"
        heads, ids = array("Q"), array("Q")
        for pair in read_rows([path] if path.exists() else []):
            heads.append(hash_prefix(key(pair)))
            ids.append(int(pair.id, 16))
        groups[side], contents[side] = distinct(heads), distinct(ids)
    for what, of_side in (("a group", groups), ("the same row", contents)):
        for one, other in ((a, b) for a in Side for b in Side if a < b):
            shared = np.intersect1d(of_side[one], of_side[other], assume_unique=True)
            if len(shared):
                raise _leak(what, one, other, len(shared), f"{int(shared[0]):016x}")
    return {str(side): len(of_side) for side, of_side in groups.items()}


def _leak(what: str, one: Side, other: Side, count: int, first: str) -> DataError:
    return DataError(
        f"{what} is on two sides of the split",
        where="corpus.split",
        found=f"{count} on {one} and {other}, the first {first}",
        expected="rows that share nothing with the other sides",
        remedy="put the step dedupe before split: rows of two groups have one content",
    )


class RowStore(Sequence[TrainingPair]):
    """Rows of one source, appended once and then read in any order."""

    def __init__(self, path: Path) -> None:
        """Store the rows in a new file."""
        self._name = str(path)
        self._file: BinaryIO = path.open("x+b")
        self._starts = array("Q")
        self._end = 0

    def append(self, pair: TrainingPair) -> None:
        """Add a row; all rows must be added before one is read."""
        line = json_line(to_json(pair), self._name)
        self._starts.append(self._end)
        self._end += self._file.write(line)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> TrainingPair: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TrainingPair]: ...

    def __getitem__(self, index: int | slice) -> TrainingPair | Sequence[TrainingPair]:
        """Read one row, or several."""
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        self._file.seek(self._starts[index])
        return parse_row(json.loads(self._file.readline()), self._name)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


_NODE: Final = "corpus.mix"
_MOST_NAMED: Final = 5  # sources named in a message
_OF_ROW: Final[dict[MixBy, Callable[[TrainingPair], str]]] = {
    MixBy.category: lambda pair: pair.category or "",
    MixBy.language: lambda pair: pair.language or "",
    MixBy.project: project_of,
}


def mix(step: StepInput) -> StepResult:
    """Draw rows from each source by its weight; after a split, only rows of train.

    Raises:
        DataError: a source has no weight, a weight has no rows, or a source would be repeated too
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
        # By name, so that the draw does not depend on the order of files or weights.
        corpora = {
            name: RowStore(step.scratch / f"source-{number:06d}.jsonl")
            for number, name in enumerate(sorted(config.weights))
        }
        for store in corpora.values():
            stack.callback(store.close)
        unweighted: Counter[str] = Counter()
        for source, side, pair in _with_source(step):
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


def _with_source(step: StepInput) -> Iterator[tuple[str, Side | None, TrainingPair]]:
    by = step.config.mix.by
    for path in step.files:
        for side, pair in read_sides([path]):
            yield _stem(path) if by is MixBy.file else _OF_ROW[by](pair), side, pair


def _stem(path: Path) -> str:
    """Return the name of a file without suffixes such as `.jsonl.gz`."""
    suffix = inner_suffix(path)
    return path.name[: path.name.lower().rfind(suffix)] if suffix else path.name


def _check(corpora: Mapping[str, RowStore], unweighted: Counter[str]) -> None:
    """Refuse sources without a weight, and weights without a source.

    Raises:
        DataError: there is one kind of problem.
        Problems: there are both.
    """
    problems: list[MensError] = []
    known = {*unweighted, *(name for name, store in corpora.items() if store)}
    if unweighted:
        named = [
            f"{name or 'no name'} ({rows} rows)"
            for name, rows in unweighted.most_common(_MOST_NAMED)
        ]
        more = f" and {len(unweighted) - _MOST_NAMED} more" if len(unweighted) > _MOST_NAMED else ""
        problems.append(
            DataError(
                "sources have no weight" if len(unweighted) > 1 else "a source has no weight",
                where=f"{_NODE}.weights",
                found=f"{', '.join(named)}{more}",
                expected="a weight for every source",
                remedy=f"add one, leave the source out of the input, or choose another {_NODE}.by",
            )
        )
    problems += [
        DataError(
            "a weight does not belong to any source",
            where=f"{_NODE}.weights.{name}",
            found=name,
            expected=expected_name(name, known),
        )
        for name in corpora
        if name not in known
    ]
    Problems.raise_if(problems)


RUN_BYTES: Final = 64 * 2**20  # of lines in memory; some 100 MB with Python's overhead
_MOST_RUNS: Final = 200  # merged at once; each is an open file


def sorted_lines(
    lines: Iterable[bytes], scratch: Path, run_bytes: int = RUN_BYTES
) -> Iterator[bytes]:
    """Yield lines sorted by their bytes.

    Args:
        lines: lines that start with their sort key and end with their only newline.
        scratch: an existing directory for the sorted runs.
        run_bytes: bytes per run sorted in memory.
    """
    runs: list[Path] = []
    held: list[bytes] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= run_bytes:
            runs.append(_written(sorted(held), scratch, len(runs)))
            held, size = [], 0
    if not runs:
        yield from sorted(held)
        return
    runs.append(_written(sorted(held), scratch, len(runs)))
    held, made = [], len(runs)
    while len(runs) > _MOST_RUNS:
        first, runs = runs[:_MOST_RUNS], runs[_MOST_RUNS:]
        runs.append(_written(_merged(first), scratch, made))
        made += 1
    yield from _merged(runs)


def _written(lines: Iterable[bytes], scratch: Path, number: int) -> Path:
    path = scratch / f"run-{number:06d}"
    with path.open("xb") as file:
        file.writelines(lines)
    return path


def _merged(runs: list[Path]) -> Iterator[bytes]:
    """Merge sorted files, and remove them."""
    with ExitStack() as stack:
        files = [stack.enter_context(run.open("rb")) for run in runs]
        yield from heapq.merge(*files)
    for run in runs:
        run.unlink()


LOWEST: Final = 1
HIGHEST: Final = 10
# Unverified guesses: an answer of up to 32 characters has difficulty 1, and each doubling adds 1,
# so that 16 KiB give 10; a tree of three levels (module, statement, name) has difficulty 1, and
# every two levels add 1.
_SHORTEST: Final = 32
_SHALLOWEST: Final = 3
_LEVELS: Final = 2


def estimated(pair: TrainingPair) -> int:
    """Estimate a row's difficulty from its answer.

    Returns:
        1 to 10, from the length of the response; for Python that parses, the mean of the values
        from its length and from the depth of its syntax tree, rounded up.
    """
    by_length = _within(1 + math.log2(max(len(pair.response), 1) / _SHORTEST))
    if (pair.language or "").casefold() != "python":
        return math.ceil(by_length)
    tree = parse(pair.response)
    if tree is None:
        return math.ceil(by_length)
    by_depth = _within(1 + (_depth(tree) - _SHALLOWEST) / _LEVELS)
    return math.ceil((by_length + by_depth) / 2)


def _within(value: float) -> float:
    return min(max(value, LOWEST), HIGHEST)


def _depth(tree: ast.AST) -> int:
    """Return the depth of a tree, without contexts such as `Load`."""
    deepest = 0
    waiting = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        deepest = max(deepest, depth)
        waiting += [
            (child, depth + 1)
            for child in ast.iter_child_nodes(node)
            if not isinstance(child, ast.expr_context)
        ]
    return deepest


_DIGITS: Final = 12  # of a length and of a row number, which keeps the sort stable
_MOST: Final = 10**_DIGITS - 1


def curriculum(step: StepInput) -> StepResult:
    """Sort rows by difficulty, then by response length; the sort is stable.

    After a split only train is sorted; the other sides are unchanged.
    """
    counts = _Counts(hardest_first=step.config.curriculum.order is DifficultyOrder.hardest_first)
    with RowWriter(step.directory) as writer:
        sorted_side = None

        def keyed() -> Iterator[bytes]:
            nonlocal sorted_side
            for side, pair in read_sides(step.files):
                if side in {None, Side.TRAIN}:
                    sorted_side = side
                    yield counts.key(pair) + json_line(to_json(pair), "curriculum")
                else:
                    writer.write(pair, side)

        for line in sorted_lines(keyed(), step.scratch):
            writer.write_line(line[_Counts.width :], sorted_side)
        total = writer.total
    return StepResult(
        rows_in=total,
        rows_out=total,
        facts={
            "rows_by_difficulty": dict(sorted(counts.by_difficulty.items())),
            "estimated": counts.estimated,
        },
    )


class _Counts:
    """Computes the sort keys of rows, and counts their difficulties."""

    width: Final = len(str(HIGHEST)) + 2 * _DIGITS

    def __init__(self, *, hardest_first: bool) -> None:
        self.by_difficulty: Counter[str] = Counter()
        self.estimated = 0
        self._hardest_first = hardest_first
        self._number = 0

    def key(self, pair: TrainingPair) -> bytes:
        difficulty, size = pair.difficulty, min(len(pair.response), _MOST)
        if difficulty is None:
            difficulty = estimated(pair)
            self.estimated += 1
        self.by_difficulty[f"{difficulty:02d}"] += 1
        if self._hardest_first:
            difficulty, size = HIGHEST - difficulty, _MOST - size
        number, self._number = self._number, self._number + 1
        return f"{difficulty:02d}{size:0{_DIGITS}d}{number:0{_DIGITS}d}".encode("ascii")
