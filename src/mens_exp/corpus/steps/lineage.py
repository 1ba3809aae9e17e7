"""The steps that made a step's input, as their own records tell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from mens_exp.artifacts.corpus_record import StepRecord
from mens_exp.artifacts.corpus_report import Before, Mixed
from mens_exp.errors import MensError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["steps_before"]

_RECORD: Final = "step.json"


def steps_before(files: Sequence[Path]) -> list[Before]:
    """Return the steps that made some files, oldest first.

    A step is taken for the maker of another's input if it stands before it, by the number in its
    directory's name, and its files have that content: what an earlier corpus left in the same place
    is none.

    Args:
        files: row files of one step, or any others.

    Returns:
        As many steps as their records tell; none for files that no step made.
    """
    found: list[Before] = []
    directory = files[0].parent if files else None
    wanted: set[str] | None = None
    while directory is not None:
        record = _record(directory)
        if record is None or (wanted is not None and wanted != _row_hashes(record)):
            break
        found.append(_before(record))
        wanted = set(record.inputs.values())
        directory = _previous(directory)
    return found[::-1]


def _row_hashes(record: StepRecord) -> set[str]:
    return {file["sha256"] for file in record.outputs.values() if file["rows"] is not None}


def _previous(directory: Path) -> Path | None:
    """Return the directory of the step before, ``02-…`` of ``03-…``."""
    number = directory.name.partition("-")[0]
    if not number.isdecimal() or int(number) < 2:  # noqa: PLR2004 - the first has none before it
        return None
    return next(iter(sorted(directory.parent.glob(f"{int(number) - 1:02d}-*"))), None)


def _record(directory: Path) -> StepRecord | None:
    if not (directory / _RECORD).is_file():
        return None
    try:
        return StepRecord.read(directory / _RECORD)
    except MensError:
        return None


def _before(record: StepRecord) -> Before:
    mixed: dict[str, Any] | None = record.facts.get("sources") if record.step == "mix" else None
    return Before(
        step=record.step,
        rows_in=record.rows_in,
        rows_out=record.rows_out,
        dropped=record.dropped,
        sources=None
        if mixed is None
        else {
            name: Mixed(
                share_asked=one["share_asked"],
                share=one["share"],
                rows=one["rows"],
                passes=one["passes"],
            )
            for name, one in mixed.items()
        },
    )
