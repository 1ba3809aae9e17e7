"""Rows on disk that are asked for by number: eight bytes of memory a row."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, BinaryIO, overload

from mens_exp.artifacts.atomic import json_line
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import TrainingPair, to_json

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["RowStore"]


class RowStore(Sequence[TrainingPair]):
    """Rows of one source, appended once and then read in any order."""

    def __init__(self, path: Path) -> None:
        """Keep the rows in a file that is not there yet."""
        self._name = str(path)
        self._file: BinaryIO = path.open("x+b")
        self._starts = array("Q")
        self._end = 0

    def append(self, pair: TrainingPair) -> None:
        """Add a row; all are added before one is asked for."""
        line = json_line(to_json(pair), self._name)
        self._starts.append(self._end)
        self._end += self._file.write(line)

    def __len__(self) -> int:
        """Return how many rows there are."""
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
