"""The bytes of a file of rows: opened, decompressed where its name says so, and cut into lines.

Nothing here holds a whole file: a gigabyte of lines passes through a megabyte at a time.
"""

from __future__ import annotations

import codecs
import gzip
import zlib
from typing import TYPE_CHECKING, BinaryIO, Final, NamedTuple

from mens_exp.artifacts.nearest import nearest_file
from mens_exp.errors import DataError
from mens_exp.rows.files import ROWS, inner_suffix

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

__all__ = [
    "MAX_LINE_BYTES",
    "Line",
    "bounded",
    "chunks",
    "first_byte",
    "lines",
    "most_unpacked",
    "opened",
]

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


def opened(path: Path, field: str) -> BinaryIO:
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
    with opened(path, field) as file:
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
