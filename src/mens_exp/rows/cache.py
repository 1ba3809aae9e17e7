"""The cache of encoded documents, and lazy access to rows in their files.

Encoded documents are keyed by the content of everything that affects them.

For rows on disk, only the location of each is kept in memory. A file is read in full once, and all
its problems are reported then. Later a row is read again from its location. The file must be
unchanged (size, time and inode), and so must the line (checksum), so that a changed file is an
error and never yields other rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, overload

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.host import file_lock
from mens_exp.errors import DataError, SetupError
from mens_exp.rows import files
from mens_exp.rows.decode import decoded_line
from mens_exp.rows.documents import Encoded, Labelling, arrays_of, opened
from mens_exp.rows.encode import ENCODING_VERSION
from mens_exp.rows.files import COMPRESSED, Line, chunks, first_byte, lines, open_file
from mens_exp.rows.readers import RowReader
from mens_exp.rows.schema import TrainingPair

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from mens_exp.rows.readers import FileOfRows, Reading

_OF_PARTS = ("truncated", "dropped", "unrolled", "short")
_COUNTS = ("documents", "tokens", "longest", "squares", "supervised_tokens", *_OF_PARTS)


def cache_root() -> Path:
    """Return the cache directory: MENS_EXP_CACHE, else XDG_CACHE_HOME/mens_exp, else ~/.cache."""
    named = os.environ.get("MENS_EXP_CACHE")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "mens_exp"


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheKey:
    """Everything on which ids and masks depend."""

    rows_sha256: str
    tokenizer_sha256: str
    template_sha256: str
    special_tokens_sha256: str
    date: str | None
    allow_control_text: bool
    labelling: Labelling

    def directory(self, root: Path) -> Path:
        """Return the directory of this key."""
        name = digest({**self.record(), "version": ENCODING_VERSION})
        return root / "encoded" / name[:32]

    def record(self) -> dict[str, Any]:
        """Return the parts of the key as plain JSON."""
        return asdict(self) | {"labelling": self.labelling.record()}


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenCounts:
    """Document counts of a cache entry, available without opening the documents.

    ``longest`` is the length of the longest document, ``squares`` the sum of the squared lengths.
    """

    documents: int
    tokens: int
    longest: int
    squares: int
    supervised_tokens: int
    truncated: int
    dropped: int
    unrolled: int
    short: int
    sha256: str


def peek(root: Path, key: CacheKey) -> TokenCounts | None:
    """Return the counts of a cached encoding; None if it is missing or incomplete."""
    meta = files.arrays_meta(key.directory(root))
    return None if meta is None else _counts_in(meta)


def peek_units(root: Path, key: CacheKey, counts: TokenCounts) -> np.ndarray | None:
    """Return the room that each cached unit of documents takes, without opening the documents.

    A unit is the documents that stay together. Its room includes virtual tokens.

    Returns:
        None if they do not match their counts.
    """
    try:
        offsets = np.load(key.directory(root) / "offsets.npy", mmap_mode="r")
    except (OSError, ValueError, EOFError):
        return None
    together = key.labelling.rows.together
    if (offsets.dtype, offsets.shape) != (np.int64, (counts.documents + 1,)):
        return None
    lengths = np.diff(offsets)
    found = [lengths.sum(), lengths.max(initial=0), (lengths**2).sum()]
    if found != [counts.tokens, counts.longest, counts.squares] or lengths.min(initial=1) < 1:
        return None
    units: np.ndarray = lengths.reshape(-1, together).sum(axis=1)
    units += together * key.labelling.virtual_tokens
    return units if units.max(initial=0) <= key.labelling.seq_len else None


def encoded(root: Path, key: CacheKey, build: Callable[[], Encoded]) -> tuple[Encoded, TokenCounts]:
    """Open the cached documents of a key; build and store them if missing or damaged."""
    return encoded_parts(root, key, lambda _: [build()])


def encoded_parts(
    root: Path, key: CacheKey, build: Callable[[Path], Sequence[Encoded]]
) -> tuple[Encoded, TokenCounts]:
    """Open the cached documents of a key, memory-mapped; build them if missing or damaged.

    One process builds them while the others wait for the result.

    Args:
        root: the cache directory.
        key: everything that the documents depend on.
        build: returns the documents in parts; it may store finished parts in the directory it is
            given, which is deleted once all of them are stored.

    Raises:
        SetupError: the stored documents cannot be read back.
    """
    directory = key.directory(root)
    found = _open(directory, key)
    if found is not None:
        return found
    with file_lock(root / f".{directory.name}.lock"):
        atomic.remove_stale(directory.parent)  # this process holds the lock
        found = _open(directory, key)  # another process may have built it
        if found is None:
            kept = directory.with_suffix(".parts")
            _store(directory, key, build(kept))
            shutil.rmtree(kept, ignore_errors=True)
            found = _open(directory, key)
    if found is None:
        raise SetupError(
            "encoded documents changed when they were read back",
            where=str(directory),
            remedy="check the disk, or give another one with MENS_EXP_CACHE=<folder>",
        )
    return found


def _open(directory: Path, key: CacheKey) -> tuple[Encoded, TokenCounts] | None:
    found = files.open_arrays(directory)
    counts = None if found is None else _counts_in(found[1])
    if found is None or counts is None:
        return None
    of_parts = {name: getattr(counts, name) for name in _OF_PARTS}
    return opened(found[0], of_parts, together=key.labelling.rows.together), counts


def _counts_in(meta: dict[str, Any]) -> TokenCounts | None:
    try:
        return TokenCounts(**meta["counts"])
    except (KeyError, TypeError):
        return None


def _store(directory: Path, key: CacheKey, parts: Sequence[Encoded]) -> None:
    offsets, counts = _summed(parts)
    pieces: dict[str, Sequence[np.ndarray]] = {
        name: _Pieces(parts, name) for name in arrays_of(parts[0])
    }
    pieces["offsets"] = offsets
    files.store_arrays(
        directory,
        pieces,
        lambda sha256: {"key": key.record(), "counts": asdict(replace(counts, sha256=sha256))},
    )


class _Pieces(Sequence[np.ndarray]):
    """One array of each part; a part may be opened on access."""

    def __init__(self, parts: Sequence[Encoded], name: str) -> None:
        self._parts, self._name = parts, name

    def __len__(self) -> int:
        return len(self._parts)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> _Pieces: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | _Pieces:
        if isinstance(index, slice):
            return _Pieces(self._parts[index], self._name)
        return arrays_of(self._parts[index])[self._name]


def _summed(parts: Sequence[Encoded]) -> tuple[list[np.ndarray], TokenCounts]:
    """Return the document offsets over all parts, one piece per part, and their counts."""
    offsets = [np.zeros(1, np.int64)]
    counts = dict.fromkeys(_COUNTS, 0)
    for part in parts:
        offsets.append(part.offsets[1:] + counts["tokens"])
        counts["documents"] += len(part)
        counts["tokens"] += len(part.ids)
        lengths = np.diff(part.offsets)
        counts["longest"] = max(counts["longest"], int(lengths.max(initial=0)))
        counts["squares"] += int(np.square(lengths.astype(np.int64)).sum())
        counts["supervised_tokens"] += int(part.supervised.sum())
        for name in _OF_PARTS:
            counts[name] += getattr(part, name)
    return offsets, TokenCounts(**counts, sha256="")


# In-memory size of a row's location: 20 bytes.
_PLACE: Final = np.dtype([("start", "<i8"), ("line", "<u4"), ("check", "<u4"), ("file", "<u4")])
_AT_ONCE: Final = 1_024  # rows in memory together during iteration; unverified guess
_State = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class _TextFile:
    """A file of lines, in the state in which its rows were checked.

    Attributes:
        name: name of the file in messages.
        path: the text, or an uncompressed copy of a compressed file.
        how: the settings for reading its rows.
        state: size, modification time, inode.
    """

    name: str
    path: Path
    how: Reading
    state: _State


class RowsOnDisk(Sequence[TrainingPair]):
    """Rows of line-based files, in any order; slices share the files and are equally lazy."""

    def __init__(self, files: Sequence[_TextFile], places: np.ndarray) -> None:
        """Store the locations of rows, ``[rows]`` of file, byte, line and checksum."""
        self.files = tuple(files)
        self.places = places

    @classmethod
    def joined(cls, parts: Sequence[RowsOnDisk]) -> RowsOnDisk:
        """Return the concatenated rows of all parts."""
        moved: list[np.ndarray] = []
        files: list[_TextFile] = []
        for part in parts:
            places = part.places.copy()
            places["file"] += len(files)
            moved.append(places)
            files += part.files
        return cls(files, np.concatenate([np.zeros(0, _PLACE), *moved]))

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> TrainingPair: ...
    @overload
    def __getitem__(self, index: slice) -> RowsOnDisk: ...
    def __getitem__(self, index: int | slice) -> TrainingPair | RowsOnDisk:
        """Read a row, or select several lazily."""
        if isinstance(index, slice):
            return RowsOnDisk(self.files, self.places[index])
        number = range(len(self))[index]
        return self._read(self.places[number : number + 1])[0]

    def __iter__(self) -> Iterator[TrainingPair]:
        """Read all rows, a batch at a time."""
        for start in range(0, len(self), _AT_ONCE):
            yield from self._read(self.places[start : start + _AT_ONCE])

    def take(self, numbers: np.ndarray) -> RowsOnDisk:
        """Select rows by their indices, or by a boolean mask."""
        return RowsOnDisk(self.files, self.places[numbers])

    def _read(self, places: np.ndarray) -> list[TrainingPair]:
        """Read rows, opening each file once per consecutive group."""
        ends = np.flatnonzero(np.diff(places["file"])) + 1
        parts = np.split(places, ends)
        return [pair for part in parts for pair in _rows_of(self.files[part["file"][0]], part)]


def read_on_disk(
    path: Path, how: Reading, copies: Path, seen: Callable[[TrainingPair], None]
) -> FileOfRows:
    """Read a file of lines like `read_rows`, but keep only the locations of its rows.

    Args:
        path: the file; an uncompressed copy is kept of a compressed one.
        how: the settings for reading it.
        copies: the directory of these copies, named by the content of their originals.
        seen: called with each row as it is read.

    Raises:
        DataError: as in `read_rows`, or the file was changed in the meantime.
        Problems: as in `read_rows`.
        SetupError: the copy cannot be written.
    """
    with open_file(path, how.setting) as file:
        before = _state(file)
    reader, found = RowReader(str(path), how), _Places()
    text = path
    with contextlib.ExitStack() as stack:
        pieces = stack.enter_context(contextlib.closing(chunks(path, how.setting)))
        if path.suffix.lower() in COMPRESSED:
            text = copies / f"{sha256_file(path)}.jsonl"
            stack.enter_context(file_lock(copies / f".{text.name}.lock"))
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
    """The locations of the rows of one file, collected during reading."""

    def __init__(self) -> None:
        self._starts, self._lines, self._checks = array("q"), array("I"), array("I")

    def add(self, start: int, line: int, raw: bytes) -> None:
        self._starts.append(start)
        self._lines.append(line)
        self._checks.append(zlib.crc32(raw))

    def array(self) -> np.ndarray:
        """Return them in the form used by `RowsOnDisk`, with file index 0."""
        places = np.zeros(len(self._starts), _PLACE)
        places["start"], places["line"] = self._starts, self._lines
        places["check"] = self._checks
        return places


def _copied(pieces: Iterator[bytes], path: Path) -> Generator[bytes, None, None]:
    """Pass text through, and store it once all of it has been read.

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
