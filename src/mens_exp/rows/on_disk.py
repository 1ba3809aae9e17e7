"""Rows that stay in their files: only where each stands is held, and it is read when asked for.

A file is read whole once, and everything wrong with it is said then. Later a row is read again
where it stood: the file must be as it was (its size, time and inode), and so must the line (its
checksum), so that a file that was changed is an error and never other rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, overload

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.wait_lock import waiting
from mens_exp.errors import DataError, SetupError
from mens_exp.rows.decode import decoded_line
from mens_exp.rows.files import COMPRESSED
from mens_exp.rows.readers import RowReader
from mens_exp.rows.schema import TrainingPair
from mens_exp.rows.stored import Line, chunks, first_byte, lines, opened

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from mens_exp.rows.readers import FileOfRows, Reading

__all__ = ["RowsOnDisk", "read_on_disk"]

# What is held of a row: 20 bytes.
_PLACE: Final = np.dtype([("start", "<i8"), ("line", "<u4"), ("check", "<u4"), ("file", "<u4")])
_AT_ONCE: Final = 1_024  # rows in memory together while all are gone through; unverified guess
_State = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextFile:
    """A file of lines as it was when its rows were checked.

    Attributes:
        name: what messages call it.
        path: its text, or where it is compressed the copy that is not.
        how: how its rows are read.
        state: size, time of the last change, inode.
    """

    name: str
    path: Path
    how: Reading
    state: _State


class RowsOnDisk(Sequence[TrainingPair]):
    """Rows of files of lines, in any order; a part of them shares the files, and is as lazy."""

    def __init__(self, files: Sequence[_TextFile], places: np.ndarray) -> None:
        """Hold rows by their places, ``[rows]`` of file, byte, line and checksum."""
        self.files = tuple(files)
        self.places = places

    @classmethod
    def joined(cls, parts: Sequence[RowsOnDisk]) -> RowsOnDisk:
        """Return the rows of all parts, one part after the other."""
        moved: list[np.ndarray] = []
        files: list[_TextFile] = []
        for part in parts:
            places = part.places.copy()
            places["file"] += len(files)
            moved.append(places)
            files += part.files
        return cls(files, np.concatenate([np.zeros(0, _PLACE), *moved]))

    def __len__(self) -> int:
        """Count the rows."""
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> TrainingPair: ...
    @overload
    def __getitem__(self, index: slice) -> RowsOnDisk: ...
    def __getitem__(self, index: int | slice) -> TrainingPair | RowsOnDisk:
        """Read a row, or name several."""
        if isinstance(index, slice):
            return RowsOnDisk(self.files, self.places[index])
        number = range(len(self))[index]
        return self._read(self.places[number : number + 1])[0]

    def __iter__(self) -> Iterator[TrainingPair]:
        """Read all rows, some at a time."""
        for start in range(0, len(self), _AT_ONCE):
            yield from self._read(self.places[start : start + _AT_ONCE])

    def take(self, numbers: np.ndarray) -> RowsOnDisk:
        """Name rows by their numbers, or by a mask of all."""
        return RowsOnDisk(self.files, self.places[numbers])

    def _read(self, places: np.ndarray) -> list[TrainingPair]:
        """Read rows, each file opened once for those that stand together."""
        ends = np.flatnonzero(np.diff(places["file"])) + 1
        parts = np.split(places, ends)
        return [pair for part in parts for pair in _rows_of(self.files[part["file"][0]], part)]


def read_on_disk(
    path: Path, how: Reading, copies: Path, seen: Callable[[TrainingPair], None]
) -> FileOfRows:
    """Read a file of lines as `read_rows` does, and leave its rows there.

    Args:
        path: the file; of a compressed one a copy is kept that is not.
        how: how to read it.
        copies: the folder of these copies, each by the content of what it was made of.
        seen: is given each row as it passes.

    Raises:
        DataError: as `read_rows`, or the file was changed meanwhile.
        Problems: as `read_rows`.
        SetupError: the copy cannot be written.
    """
    with opened(path, how.setting) as file:
        before = _state(file)
    reader, found = RowReader(str(path), how), _Places()
    text = path
    with contextlib.ExitStack() as stack:
        pieces = stack.enter_context(contextlib.closing(chunks(path, how.setting)))
        if path.suffix.lower() in COMPRESSED:
            text = copies / f"{sha256_file(path)}.jsonl"
            stack.enter_context(waiting(copies / f".{text.name}.lock"))
            pieces = pieces if text.exists() else _copied(pieces, text)
        start = first_byte(path) if text is path else 0
        for number, line in enumerate(lines(pieces), start=1):
            reader.wrong.add(reader.take(decoded_line(line, f"{path}:{number}")))
            for pair in reader.pairs:
                found.add(start, number, line.raw)
                seen(pair)
            reader.pairs.clear()
            start += line.size + 1
    file_of_rows = reader.file(())
    kept = _TextFile(
        name=str(path),
        path=text.absolute(),
        how=dataclasses.replace(how, quarantine=False),
        state=_state_of(text),
    )
    if before != (kept.state if text is path else _state_of(path)):
        raise _changed(kept)
    return dataclasses.replace(file_of_rows, pairs=RowsOnDisk([kept], found.array()))


class _Places:
    """The places of the rows of one file, collected while they are read."""

    def __init__(self) -> None:
        self._starts, self._lines, self._checks = array("q"), array("I"), array("I")

    def add(self, start: int, line: int, raw: bytes) -> None:
        self._starts.append(start)
        self._lines.append(line)
        self._checks.append(zlib.crc32(raw))

    def array(self) -> np.ndarray:
        """Return them as `RowsOnDisk` holds them; the file is its first."""
        places = np.zeros(len(self._starts), _PLACE)
        places["start"], places["line"] = self._starts, self._lines
        places["check"] = self._checks
        return places


def _copied(pieces: Iterator[bytes], path: Path) -> Generator[bytes, None, None]:
    """Pass text on, and keep it once all of it is read.

    Raises:
        SetupError: the cache cannot be written.
    """
    atomic.remove_stale(path.parent)
    try:
        with atomic.stream(path) as file:
            for piece in pieces:
                file.write(piece)
                yield piece
    except OSError as error:
        raise SetupError(
            f"the cache cannot be written: {error.strerror or error}",
            where=str(path),
            remedy="decompress the rows, or name another cache with MENS_EXP_CACHE=<folder>",
        ) from error


def _rows_of(file: _TextFile, places: np.ndarray) -> list[TrainingPair]:
    """Read rows of one file."""
    try:
        with file.path.open("rb") as text:
            found = [_line_at(text, start) for start in places["start"].tolist()]
            state = _state(text)
    except OSError as error:
        raise _changed(file, error.strerror or type(error).__name__) from error
    if state != file.state or [zlib.crc32(raw) for raw in found] != places["check"].tolist():
        raise _changed(file)
    reader = RowReader(file.name, file.how)
    for raw, number in zip(found, places["line"].tolist(), strict=True):
        problems = reader.take(decoded_line(Line(raw, len(raw)), f"{file.name}:{number}"))
        assert not problems, "the line is one that was read"
    return reader.pairs


def _line_at(text: BinaryIO, start: int) -> bytes:
    text.seek(start)
    return text.readline().removesuffix(b"\n")


def _state(file: BinaryIO) -> _State:
    found = os.fstat(file.fileno())
    return found.st_size, found.st_mtime_ns, found.st_ino


def _state_of(path: Path) -> _State:
    with path.open("rb") as file:
        return _state(file)


def _changed(file: _TextFile, found: str = "another size, time, inode or content") -> DataError:
    is_copy = file.path.name != Path(file.name).name
    return DataError(
        "the file of rows was changed while it was in use",
        where=str(file.path),
        found=found,
        expected=f"what it was when the rows of {file.name} were read",
        remedy="delete this copy, and start again"
        if is_copy
        else "leave it alone, and start again",
    )
