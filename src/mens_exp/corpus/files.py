"""Rows from the files that a configuration names, and the files as a record has them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.digest import sha256_file
from mens_exp.config.data import ColumnsConfig
from mens_exp.corpus.split import group_of
from mens_exp.errors import DataError, MensError, Problems
from mens_exp.rows.files import resolve_files
from mens_exp.rows.readers import FileOfRows, Reading, read_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mens_exp.config.data import JsonlData
    from mens_exp.rows.schema import TrainingPair

__all__ = ["RowsFile", "described", "pairs_of", "read_files", "records", "refuse_leakage"]

_MOST_LEAKS = 5  # told in full; the rest is counted


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsFile:
    """One file of rows as the record has it."""

    path: str
    role: str
    form: str
    rows: int
    ignored: dict[str, int]
    sha256: str


def records(files: Sequence[RowsFile]) -> dict[str, Any]:
    """Return files for a manifest or a plan, by path; columns left out only where there are any."""
    found = {}
    for file in files:
        record = dataclasses.asdict(file)
        if not file.ignored:
            del record["ignored"]
        found[record.pop("path")] = record
    return found


def read_files(config: JsonlData) -> tuple[list[FileOfRows], list[FileOfRows]]:
    """Read the files of `data.path`, and those of `data.val_path`.

    Raises:
        DataError: a file or a row in it is wrong.
        Problems: several are; of all files.
    """
    problems: list[MensError] = []
    columns = {
        field.name: column
        for field in dataclasses.fields(ColumnsConfig)
        if (column := getattr(config.columns, field.name)) is not None
    }
    sides = []
    for setting, names in (("data.path", config.path), ("data.val_path", config.val_path)):
        how = Reading(
            form=config.format,
            columns=columns,
            group_column=config.group_column,
            setting=setting,
        )
        sides.append([] if names is None else _read(names, how, problems))
    Problems.raise_if(problems)
    return sides[0], sides[1]


def _read(names: Any, how: Reading, problems: list[MensError]) -> list[FileOfRows]:
    files = []
    try:
        paths = resolve_files(names, how.setting)
    except (DataError, Problems) as error:
        problems += getattr(error, "problems", [error])
        return []
    for path in paths:
        try:
            files.append(read_rows(path, how))
        except (DataError, Problems) as error:
            problems += getattr(error, "problems", [error])
    return files


def pairs_of(files: Sequence[FileOfRows]) -> list[TrainingPair]:
    """Return the rows of files, one file after the other."""
    return [pair for file in files for pair in file.pairs]


def described(files: Sequence[FileOfRows], role: str) -> Iterator[RowsFile]:
    """Yield what the record says of each file.

    Args:
        files: the files.
        role: what their rows are for.
    """
    for file in files:
        yield RowsFile(
            path=str(file.path),
            role=role,
            form=file.form.value,
            rows=len(file.pairs),
            ignored=file.ignored,
            sha256=sha256_file(file.path),
        )


def refuse_leakage(rows: Sequence[TrainingPair], val: Sequence[TrainingPair]) -> None:
    """Refuse validation rows that the other rows answer already.

    Args:
        rows: the rows of `data.path`.
        val: the rows of `data.val_path`.

    Raises:
        DataError: a validation row is also a row of `data.path`, or shares its group (its
            prompt, where it has no group); both places are named.
        Problems: several do.
    """
    known = {pair.id: pair for pair in reversed(rows)}
    groups = {group_of(pair): pair for pair in reversed(rows)}
    leaks: list[MensError] = []
    for pair in val:
        same, near = known.get(pair.id), groups.get(group_of(pair))
        first = same or near
        if first is None:
            continue
        shared = f"group {pair.group!r}" if pair.group else "prompt"
        leaks.append(
            DataError(
                "a validation row is trained on"
                if same
                else f"a validation row shares its {shared} with a row of data.path",
                where=pair.place,
                found=f"the same in {first.place}",
                expected="rows that data.path has nothing of",
                remedy="take it out of one of the two files",
            )
        )
    if len(leaks) > _MOST_LEAKS:
        more = DataError(f"{len(leaks) - _MOST_LEAKS} more such rows", where="data.val_path")
        leaks = [*leaks[:_MOST_LEAKS], more]
    Problems.raise_if(leaks)
