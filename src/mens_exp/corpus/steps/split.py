"""The step split: whole groups to train, validate or hold out, and the proof that none leaks."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.config.corpus import SplitBy
from mens_exp.corpus.heads import Heads, bounds_of, distinct
from mens_exp.corpus.split import Side, group_of, head_of, project_of
from mens_exp.corpus.steps.step import RowWriter, StepInput, StepResult, read_rows
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mens_exp.config.corpus import SplitStepConfig
    from mens_exp.rows.schema import TrainingPair

__all__ = ["split"]


def split(step: StepInput) -> StepResult:
    """Part the rows as `corpus.split.split` does those of a run, in two passes over the files.

    The first pass hashes every group, eight bytes a row; the second writes. What was written is
    then read again: no group, and no row of the same content, may be on two sides.

    Raises:
        DataError: there are too few groups for the sides asked for, or a row is on two sides.
    """
    config = step.config.split
    key = project_of if config.by is SplitBy.project else group_of
    heads = array("Q", (head_of(key(pair)) for pair in read_rows(step.files)))
    groups = distinct(heads)
    bounds = bounds_of(groups, config.val_frac, config.heldout_frac)
    with RowWriter(step.directory) as writer:
        for pair in read_rows(step.files):
            writer.write(pair, bounds.side(head_of(key(pair))))
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
    """Read what was written and refuse a group or a content on two sides.

    Returns:
        How many groups each side has.

    Raises:
        DataError: a group or a content is on two sides; one row of it is named.
    """
    groups: dict[Side, Heads] = {}
    contents: dict[Side, Heads] = {}
    for side in Side:
        path = directory / f"{side}.jsonl"
        heads, ids = array("Q"), array("Q")
        for pair in read_rows([path] if path.exists() else []):
            heads.append(head_of(key(pair)))
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
        expected="rows of which no other side has anything",
        remedy="put the step dedupe before split: rows of two groups have one content",
    )
