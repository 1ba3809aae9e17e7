"""Files under the rows: the files of a setting, their bytes and lines, and arrays in folders.

A setting names one file, a list or a glob. Nothing here holds a whole file: a gigabyte of lines
passes through a megabyte at a time, decompressed where its name says so.

A folder of named arrays is whole or absent: it is put in place in one step, memory-mapped, and
verified when it is opened:

- ``meta.json`` carries its own hash; types, shapes and file sizes must be those it names.
- The arrays' content must have the hash it names. Up to 64 MiB the content is read each time it is
  opened. Beyond, it is read once for each state of the files: size, inode and the times of the last
  change to content and to inode are recorded after a verification, and while all of these stay,
  nothing was written to the files (the inode's time cannot be set back). What a disk forgets
  without writing is then not found again until the files are copied or touched.
"""

from __future__ import annotations

import codecs
import contextlib
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
_TEXT = (".jsonl", ".json")
ROWS = (*_TEXT, *(f"{text}{end}" for text in _TEXT for end in COMPRESSED), ".parquet", ".arrow")


def inner_suffix(path: Path) -> str:
    """Return how the name of a file ends, in lower case, less what says how it is compressed."""
    if path.suffix.lower() in COMPRESSED:
        path = path.with_suffix("")
    return path.suffix.lower()


def resolve_files(names: str | list[str], field: str) -> list[Path]:
    """Return the files that a setting names, a glob's in the order of their names.

    Args:
        names: a path, a glob, or a list of them; a tilde is the user's home.
        field: the setting's dotted path, for messages.

    Returns:
        Each file once, in the order given. A path without glob characters is returned as it is,
        whether it exists or not.

    Raises:
        DataError: a glob matches no file, or a file is named twice.
        Problems: several of them.
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


# Some 16 million tokens: a longer line is a file without line ends, or an accident.
MAX_LINE_BYTES: Final = 64 * 2**20
_CHUNK: Final = 2**20
_FED: Final = 2**10  # to Zstandard at once: four bytes of it may become 128 KiB
# JSON packs to a tenth, rows that share a long system prompt to a fiftieth; a bomb to a thousandth.
_MOST_RATIO: Final = 100
_ALWAYS_BYTES: Final = 32 * 2**20  # unpacked, however small the file
_KEPT: Final = 1_000  # bytes of a line over the limit, for whoever has to find it
_UTF16_MARKS: Final = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
# First bytes of files whose name says something else.
_SIGNATURES: Final = {
    b"\x1f\x8b": (".jsonl.gz", "gzip"),
    b"\x28\xb5\x2f\xfd": (".jsonl.zst", "Zstandard"),
    b"PAR1": (".parquet", "Parquet"),
    b"ARROW1": (".arrow", "Arrow"),
}
_HEAD: Final = 8


class Line(NamedTuple):
    """One line without its newline; of one over `MAX_LINE_BYTES` only the beginning."""

    raw: bytes
    size: int


def open_file(path: Path, field: str) -> BinaryIO:
    """Open a file of rows.

    Args:
        path: the file.
        field: the setting that names it, for messages.

    Raises:
        DataError: it is not there, is a directory or cannot be read.
    """
    try:
        # Asked first, because opening a directory is PermissionError on Windows.
        if path.is_dir():
            raise DataError(
                "this is a directory, not a file of rows",
                where=field,
                found=str(path),
                expected=f"a file of rows{nearest_file(path, path.name, ROWS)}",
                remedy=f"for all files in it: {field}='{path}/*.jsonl'",
            )
        return path.open("rb")
    except FileNotFoundError as error:
        raise DataError(
            "no such file",
            where=field,
            found=str(path),
            expected=f"an existing file of rows{nearest_file(path.parent, path.name, ROWS)}",
        ) from error
    except OSError as error:
        raise _unreadable(path, field, error) from error


def chunks(path: Path, field: str) -> Generator[bytes, None, None]:
    """Yield the text of a file in pieces, less its byte order mark.

    Args:
        path: UTF-8; compressed where its name ends in ``.gz`` or ``.zst``.
        field: the setting that names it, for messages.

    Raises:
        DataError: the file cannot be read, is empty, in UTF-16, of a kind that its name does not
            tell, or its compressed data is damaged or cut off.
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
    """Return how many bytes a compressed file may hold."""
    return _ALWAYS_BYTES + _MOST_RATIO * path.stat().st_size


def bounded(pieces: Iterator[bytes], path: Path) -> Iterator[bytes]:
    """Pass on the content of a compressed file.

    Raises:
        DataError: it is more than rows of a file of this size can be.
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
    """Return where the text of a plain file begins: behind its byte order mark, if it has one."""
    with path.open("rb") as file:
        return len(codecs.BOM_UTF8) if file.read(_HEAD).startswith(codecs.BOM_UTF8) else 0


def lines(pieces: Iterator[bytes]) -> Iterator[Line]:
    """Cut pieces of text into lines.

    Only a newline ends one: a lone carriage return does not, and the last newline of a file
    begins no other line.
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
    """Decompress frame by frame: the library's own reader takes a cut-off file for a whole one."""
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
    """Return the first bytes of a text, less a byte order mark."""
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


_META, _VERIFIED = "meta.json", "verified.json"
_ALWAYS_READ: Final = 64 * 2**20  # bytes; measured: 0.05 s to hash on one core
_PIECE: Final = 2**20


def store_arrays(
    directory: Path,
    arrays: Mapping[str, Sequence[np.ndarray]],
    meta: Callable[[str], Mapping[str, Any]],
) -> None:
    """Write arrays, each from its pieces, and put the folder in place.

    Args:
        directory: the folder; an earlier one is replaced.
        arrays: pieces of each array, one-dimensional and of one type; at least one piece each. They
            are gone through twice, one at a time.
        meta: returns what else to keep, from the SHA-256 of all arrays' content in their order.
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
    """Return what was kept beside the arrays, or None where it is absent or damaged."""
    try:
        record: dict[str, Any] = json.loads((directory / _META).read_text("utf-8"))
        stored = record.pop("meta_sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return record if digest(record) == stored else None


def open_arrays(directory: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]] | None:
    """Map the arrays into memory, read-only, once their content is verified.

    Returns:
        The arrays and what was kept beside them; None where the folder is absent or damaged.
    """
    meta = arrays_meta(directory)
    if meta is None:
        return None
    try:
        arrays = {name: _mapped(directory / f"{name}.npy") for name, *_ in meta["arrays"]}
        states = {name: _state(directory / f"{name}.npy") for name in arrays}
        found = [[name, one.dtype.str, one.size, states[name][0]] for name, one in arrays.items()]
        if found != meta["arrays"]:
            return None
        if not _is_verified(directory, states):
            if _content(directory, arrays) != meta["content_sha256"]:
                return None
            _put_down(directory, states)
    except (OSError, ValueError, EOFError, KeyError, TypeError):
        return None
    return arrays, meta


def release_pages(*arrays: np.ndarray) -> None:
    """Let go of what was read of arrays that are mapped; it is read again when asked for."""
    for array in arrays:
        if isinstance(array.base, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            array.base.madvise(mmap.MADV_DONTNEED)


def _write_array(
    path: Path, pieces: Sequence[np.ndarray], state: hashlib._Hash
) -> tuple[np.dtype[Any], int]:
    """Write an array, a piece in memory at a time, and return its type and length."""
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
    except ValueError:  # there is no map of nothing
        array: np.ndarray = np.load(path)
        if array.size:
            raise
        return array


def _state(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _is_verified(directory: Path, states: Mapping[str, list[int]]) -> bool:
    if sum(state[0] for state in states.values()) <= _ALWAYS_READ:
        return False
    try:
        return bool(json.loads((directory / _VERIFIED).read_text("utf-8")) == states)
    except (OSError, ValueError):
        return False


def _put_down(directory: Path, states: Mapping[str, list[int]]) -> None:
    if sum(state[0] for state in states.values()) > _ALWAYS_READ:
        with contextlib.suppress(OSError):  # somebody else's cache: it is verified each time
            atomic.write_json(directory / _VERIFIED, states)


def _content(directory: Path, arrays: Mapping[str, np.ndarray]) -> str:
    """Hash the content through the files: pages of a map would count as this process's memory."""
    state = hashlib.sha256()
    for name, array in arrays.items():
        with (directory / f"{name}.npy").open("rb") as file:
            file.seek(-array.nbytes, 2)
            while piece := file.read(_PIECE):
                state.update(piece)
    return state.hexdigest()
