"""Input and result of a corpus step, and its rows on disk.

A step reads and writes files, holding one row at a time in memory. The pipeline names the files,
renames the complete directory into place, and records both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Self, TypeAlias

from mens_exp.artifacts.atomic import json_line
from mens_exp.corpus.split import Side
from mens_exp.errors import DataError, MensError
from mens_exp.rows.decode import decoded_rows
from mens_exp.rows.parse import parse_row
from mens_exp.rows.schema import to_json

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from types import TracebackType

    from mens_exp.config.corpus import CorpusConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.rows.schema import TrainingPair

INPUT: Final = "corpus.input"  # named in messages about unreadable files
# The row files that a step may write, in the order in which the next one reads them. Other files in
# its directory are records (duplicates.jsonl, quarantine.jsonl).
ROW_FILES: Final = ("rows.jsonl", *(f"{side}.jsonl" for side in Side))


@dataclass(frozen=True, kw_only=True, slots=True)
class StepInput:
    """The input of a step.

    files: the row files of the previous step, in order. For the first step, those named by
        corpus.input: any row files; for extract a directory, a file or a git checkout; for
        generate none.
    directory: the step's output directory; initially empty, renamed into place when complete.
    scratch: an empty directory for temporary files such as sorted runs, deleted afterwards.
    config: the settings; a step reads its own node, ``config.<step>``.
    run: the whole command, for the tokenizer and the sequence length; None if a step is called
        separately, and values that depend on them are then unknown.
    """

    files: tuple[Path, ...]
    directory: Path
    scratch: Path
    config: CorpusConfig
    run: RunConfig | None = None


@dataclass(kw_only=True, slots=True)
class StepResult:
    """The result of a step.

    Attributes:
        rows_in: rows read, including dropped ones.
        rows_out: rows written, over all sides.
        dropped: number of dropped rows or candidates, by reason.
        facts: additional facts: plain JSON, sorted by key in step.json.
    """

    rows_in: int
    rows_out: int
    dropped: dict[str, int] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


Step: TypeAlias = Callable[[StepInput], StepResult]


def read_rows(files: Iterable[Path]) -> Iterator[TrainingPair]:
    """Yield the rows of files, in file order, line by line.

    A JSON array is read whole, and a table in batches.

    Raises:
        DataError: a file cannot be read, or a row in it is invalid; the first one is reported.
    """
    for _, pair in read_sides(files):
        yield pair


def read_sides(files: Iterable[Path]) -> Iterator[tuple[Side | None, TrainingPair]]:
    """Yield the rows of files as `read_rows` does, each with the side of its file.

    Yields:
        The side, None before a split, and the row.
    """
    for path in files:
        side = side_of_file(path)
        for located in decoded_rows(path, INPUT):
            try:
                if isinstance(located.value, DataError):
                    raise located.value
                pair = parse_row(located.value, located.where)
            except MensError as error:
                first = getattr(error, "problems", [error])[0]
                raise DataError(
                    first.what,
                    where=first.where,
                    found=first.found,
                    expected=first.expected,
                    remedy="fix the row, or begin with the step validate, which sets bad rows "
                    "aside with corpus.validate.on_bad_row=quarantine",
                ) from error
            yield side, pair


def side_of_file(path: Path) -> Side | None:
    """Return the side of a row file; None before a split."""
    return next((side for side in Side if path.name == f"{side}.jsonl"), None)


class RowWriter:
    """Writes the rows of a step as JSON Lines into its directory.

    Attributes:
        rows: number of rows by file name.
    """

    def __init__(self, directory: Path) -> None:
        """Write into an existing directory; a file is created with its first row."""
        self.rows: dict[str, int] = {}
        self._directory = directory
        self._files: dict[str, BinaryIO] = {}

    @property
    def total(self) -> int:
        """Rows written, over all sides."""
        return sum(self.rows.values())

    def write(self, pair: TrainingPair, side: Side | None = None) -> None:
        """Append a row to ``rows.jsonl`` or, after a split, to the file of its side."""
        self.write_line(json_line(to_json(pair), "a row"), side)

    def write_line(self, line: bytes, side: Side | None = None) -> None:
        """Append a row given as a JSON line with its newline."""
        name = "rows.jsonl" if side is None else f"{side}.jsonl"
        file = self._files.get(name)
        if file is None:
            file = self._files[name] = (self._directory / name).open("xb")
            self.rows[name] = 0
        file.write(line)
        self.rows[name] += 1

    def __enter__(self) -> Self:
        """Return the writer."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()
