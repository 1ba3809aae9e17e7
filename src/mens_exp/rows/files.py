"""File access for rows: resolving a setting to files, reading bytes and lines, storing arrays.

A setting names one file, a list or a glob. No file is held in memory as a whole: a gigabyte of
lines is streamed a megabyte at a time, decompressed if its name says so.

A directory of named arrays is either complete or absent: it is renamed into place, memory-mapped,
and verified when it is opened:

- ``meta.json`` contains its own hash; dtypes, shapes and file sizes must match those it states.
- The arrays' content must match the hash it states. It is read each time the directory is opened,
  so that silent disk corruption is detected too.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import hashlib
import json
import mmap
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple

import numpy as np

from mens_exp.artifacts import atomic
from mens_exp.artifacts.digest import digest
from mens_exp.errors import DataError, MensError, Problems, nearest_file

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

COMPRESSED = (".gz", ".zst")
_TEXT = (".jsonl", ".json", ".csv")
ROWS = (*_TEXT, *(f"{text}{end}" for text in _TEXT for end in COMPRESSED), ".parquet", ".arrow")


def inner_suffix(path: Path) -> str:
    """Return the suffix of a file name in lower case, ignoring a compression suffix."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def resolve_files(names: str | list[str], field: str) -> list[Path]:
    """Return the files that a setting names; a glob's are sorted by name.

    Args:
        names: a path, a glob, or a list of them; a tilde is the user's home directory.
        field: the setting's dotted path, for messages.

    Returns:
        Each file once, in the given order. A path without glob characters is returned as it is,
        even if it does not exist.

    Raises:
        DataError: a glob matches no file, or a file is named twice.
        Problems: several of these.
    """
    found: dict[Path, Path] = {}
    problems: list[MensError] = []
    for name in [names] if isinstance(names, str) else names:
        for path in _matches(name, field, problems):
            real = path.resolve()
            if real in found:
                problems.append(DataError("a file is named twice", where=field, found=str(path)))
            found[real] = path
    Problems.raise_if(problems)
    return list(found.values())


def _matches(name: str, field: str, problems: list[MensError]) -> list[Path]:
    path = Path(name).expanduser()
    if not glob.has_magic(name) or path.exists():  # a file may be called a[1].jsonl
        return [path]
    matched = sorted(Path(one) for one in glob.glob(str(path), recursive=True))  # noqa: PTH207  # an absolute pattern, which Path.glob refuses
    files = [one for one in matched if one.is_file()]
    if not files:
        problems.append(
            DataError(
                "no file matches",
                where=field,
                found=name,
                expected=f"a glob of files of rows{nearest_file(path.parent, path.name, ROWS)}",
                remedy="in a shell, quote the glob so that it arrives as written",
            )
        )
    return files


# About 16 million tokens; a longer line indicates a file without line breaks, or a mistake.
MAX_LINE_BYTES: Final = 64 * 2**20
_CHUNK: Final = 2**20
_FED: Final = 2**10  # bytes given to Zstandard at once; four may become 128 KiB
# JSON compresses to a tenth, rows that share a long system prompt to a fiftieth, a bomb to 1/1000.
_MOST_RATIO: Final = 100
_ALWAYS_BYTES: Final = 32 * 2**20  # uncompressed size that is always accepted
_KEPT: Final = 1_000  # bytes kept of a line over the limit, to help find it
_UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# Magic bytes of files whose name indicates another format.
_SIGNATURES: Final = {
    b"\x1f\x8b": (".jsonl.gz", "gzip"),
    b"\x28\xb5\x2f\xfd": (".jsonl.zst", "Zstandard"),
    b"PAR1": (".parquet", "Parquet"),
    b"ARROW1": (".arrow", "Arrow"),
}
_HEAD: Final = 8


class Line(NamedTuple):
    """One line without its newline; if it exceeds `MAX_LINE_BYTES`, only its start."""

    raw: bytes
    size: int


def glob_in(directory: Path) -> str:
    """Return a glob of the row files in a directory, or in the first subdirectory that has some.

    Plain JSON comes last, because it often describes the other files.
    """
    found = [file for file in directory.rglob("*") if file.name.lower().endswith(ROWS)]
    found.sort(key=lambda file: (file.suffix == ".json", len(file.parts), file))
    if not found:
        return f"{directory}/*.jsonl"
    end = max((end for end in ROWS if found[0].name.lower().endswith(end)), key=len)
    return f"{found[0].parent}/*{end}"


def open_file(path: Path, field: str) -> BinaryIO:
    """Open a file of rows.

    Args:
        path: the file.
        field: the setting that names it, for messages.

    Raises:
        DataError: it does not exist, is a directory or cannot be read.
    """
    try:
        # Checked first, because opening a directory is PermissionError on Windows.
        if path.is_dir():
            raise DataError(
                "this is a directory, not a file of rows",
                where=field,
                found=str(path),
                expected=f"a file of rows{nearest_file(path, path.name, ROWS)}",
                remedy=f"for all files in it: {field}='{glob_in(path)}'",
            )
        if path.exists() and not path.is_file():  # a pipe waits, a device may never end
            raise DataError(
                "this is not a file on a disk, and rows are read more than once",
                where=field,
                found=str(path),
                expected="a file of rows",
                remedy="write the rows into a file first",
            )
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(
            "no such file",
            where=field,
            found=str(path),
            expected=f"an existing file of rows{nearest_file(path.parent, path.name, ROWS)}",
            remedy=f"write {field}=<file>, of JSON Lines, JSON, CSV, Parquet or Arrow",
        ) from error
    except OSError as error:
        raise _unreadable(path, field, error) from error


def chunks(path: Path, field: str) -> Generator[bytes, None, None]:
    """Yield the text of a file in pieces, without its byte order mark.

    Args:
        path: UTF-8; compressed if its name ends in ``.gz`` or ``.zst``.
        field: the setting that names it, for messages.

    Raises:
        DataError: the file cannot be read, is empty, in UTF-16, or of a kind that its name does
            not indicate, or its compressed data is damaged or truncated.
    """
    with open_file(path, field) as file:
        try:
            pieces = _decompressed(file, path)
            if path.name.lower().endswith((".gz", ".zst")):
                pieces = bounded(pieces, path)
            head = b""
            for piece in pieces:
                head += piece
                if len(head) >= _HEAD:
                    break
            yield _begun(head, path)
            yield from pieces
        except (gzip.BadGzipFile, zlib.error) as error:
            raise _damaged(path, str(error)) from error
        except EOFError as error:
            raise _damaged(path, "it ends too early") from error
        except OSError as error:
            raise _unreadable(path, field, error) from error


def most_unpacked(path: Path) -> int:
    """Return the maximum uncompressed size of a compressed file, in bytes."""
    return _ALWAYS_BYTES + _MOST_RATIO * path.stat().st_size


def bounded(pieces: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Pass through the content of a compressed file.

    Raises:
        DataError: it is larger than rows in a file of this size can be.
    """
    most = most_unpacked(path)
    size = 0
    for piece in pieces:
        size += len(piece)
        if size > most:
            raise DataError(
                "the compressed file holds more than its size allows",
                where=str(path),
                found=f"more than {most:,} bytes in {path.stat().st_size:,}",
                expected=f"at most {_MOST_RATIO} times its size and {_ALWAYS_BYTES:,} bytes",
                remedy="if you trust it, decompress it and give the path of the decompressed file",
            )
        yield piece


def first_byte(path: Path) -> int:
    """Return the offset of the text of a plain file: after its byte order mark, if any."""
    with path.open("rb") as file:
        return len(codecs.BOM_UTF8) if file.read(_HEAD).startswith(codecs.BOM_UTF8) else 0


def lines(pieces: Iterator[bytes]) -> Iterator[Line]:
    """Split pieces of text into lines.

    Only a newline ends a line: a lone carriage return does not, and the last newline of a file
    does not start another line.
    """
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for end in whole:
            yield _line(held, end, size)
            held, size = [], 0
        size += len(rest)
        if rest and size - len(rest) <= MAX_LINE_BYTES:
            held.append(rest)
    if size:
        yield _line(held, b"", size)


def _line(held: list[bytes], end: bytes, size: int) -> Line:
    size += len(end)
    raw = b"".join([*held, end])
    return Line(raw if size <= MAX_LINE_BYTES else raw[:_KEPT], size)


def _decompressed(file: BinaryIO, path: Path) -> Iterator[bytes]:
    name = path.name.lower()
    if name.endswith(".zst"):
        yield from _zstandard(file, path)
        return
    with gzip.open(file) if name.endswith(".gz") else file as plain:
        while piece := plain.read(_CHUNK):
            yield piece


def _zstandard(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Decompress frame by frame, because the library's reader accepts truncated files."""
    import zstandard

    frame = None
    while piece := file.read(_CHUNK):
        rest = memoryview(piece)
        while rest:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            fed, rest = rest[:_FED], rest[_FED:]
            try:
                text = frame.decompress(fed)
            except zstandard.ZstdError as error:
                raise _damaged(path, str(error)) from error
            if text:
                yield text
            if frame.eof:
                unused = len(frame.unused_data)
                rest = memoryview(piece)[len(piece) - len(rest) - unused :]
                frame = None
    if frame is not None:
        raise _damaged(path, "it ends too early")


def _begun(head: bytes, path: Path) -> bytes:
    """Return the first bytes of a text, without a byte order mark."""
    if head.startswith(_UTF16_MARKS):
        raise DataError(
            "the file is UTF-16", where=str(path), expected="UTF-8", remedy="save it as UTF-8"
        )
    for signature, (ending, kind) in _SIGNATURES.items():
        if head.startswith(signature):
            raise DataError(
                f"the file is {kind}, which its name does not say",
                where=str(path),
                found=inner_suffix(path) or "a name without an ending",
                expected=f"a name that ends in {ending}",
                remedy="rename the file",
            )
    head = head.removeprefix(codecs.BOM_UTF8)
    if not head:
        raise DataError(
            "the file is empty", where=str(path), expected="at least one row, one JSON object"
        )
    return head


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(
        "the compressed data is damaged",
        where=str(path),
        found=reason,
        remedy="make or download the file again",
    )


def _unreadable(path: Path, field: str, error: OSError) -> DataError:
    reason = error.strerror or type(error).__name__
    return DataError(f"the file cannot be read: {reason}", where=field, found=str(path))


_META = "meta.json"
_PIECE: Final = 2**20


def store_arrays(
    directory: Path,
    arrays: Mapping[str, Sequence[np.ndarray]],
    meta: Callable[[str], Mapping[str, Any]],
) -> None:
    """Write arrays, each from pieces, and rename the directory into place.

    Args:
        directory: the directory; an existing one is replaced.
        arrays: pieces of each array, one-dimensional and of one dtype, at least one piece each.
            They are iterated over twice, one at a time.
        meta: returns further metadata, given the SHA-256 of all arrays' content in order.
    """
    state = hashlib.sha256()
    with atomic.directory(directory) as temporary:
        about = []
        for name, pieces in arrays.items():
            path = temporary / f"{name}.npy"
            dtype, length = _write_array(path, pieces, state)
            about.append([name, dtype.str, length, path.stat().st_size])
        content = state.hexdigest()
        record = {**meta(content), "arrays": about, "content_sha256": content}
        atomic.write_json(temporary / _META, {**record, "meta_sha256": digest(record)})


def arrays_meta(directory: Path) -> dict[str, Any] | None:
    """Return the metadata stored with the arrays; None if missing or damaged."""
    try:
        record: dict[str, Any] = json.loads((directory / _META).read_text("utf-8"))
        stored = record.pop("meta_sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return record if digest(record) == stored else None


def open_arrays(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Memory-map the arrays, read-only, after verifying their content.

    Returns:
        The arrays and their metadata; None if the directory is missing or damaged.
    """
    meta = arrays_meta(directory)
    if meta is None:
        return None
    try:
        arrays = {name: _mapped(directory / f"{name}.npy") for name, *_ in meta["arrays"]}
        found = [
            [name, one.dtype.str, one.size, (directory / f"{name}.npy").stat().st_size]
            for name, one in arrays.items()
        ]
        if found != meta["arrays"] or _content(directory, arrays) != meta["content_sha256"]:
            return None
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None
    return arrays, meta


def release_pages(*arrays: np.ndarray) -> None:
    """Release the pages of memory-mapped arrays; they are read again on access."""
    for array in arrays:
        if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            array.base.madvise(mmap.MADV_DONTNEED)


def _write_array(
    path: Path, pieces: Sequence[np.ndarray], state: hashlib._Hash
) -> tuple[np.dtype[Any], int]:
    """Write an array, one piece in memory at a time; return its dtype and length."""
    about = [(piece.dtype, piece.ndim, len(piece)) for piece in pieces]
    dtype, length = about[0][0], sum(one for *_, one in about)
    assert {one[:2] for one in about} == {(dtype, 1)}, "of one array"
    header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False}
    with path.open("xb") as file:
        np.lib.format.write_array_header_1_0(file, {**header, "shape": (length,)})
        for piece in pieces:
            data = np.ascontiguousarray(piece).data.cast("B") if len(piece) else b""
            file.write(data)
            state.update(data)
    return dtype, length


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.load(path, mmap_mode="r")  # type: ignore[no-any-return]
    except ValueError:  # an empty file cannot be mapped
        array: np.ndarray = np.load(path)
        if array.size:
            raise
        return array


def _content(directory: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Hash the content through file reads, as mapped pages would count as this process's memory."""
    state = hashlib.sha256()
    for name, array in arrays.items():
        with (directory / f"{name}.npy").open("rb") as file:
            file.seek(-array.nbytes, 2)
            while piece := file.read(_PIECE):
                state.update(piece)
    return state.hexdigest()
