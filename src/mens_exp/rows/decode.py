"""Decode a file of rows (JSON Lines, JSON, CSV, Parquet or Arrow) to objects with their locations.

A null in a table column means that the row does not have the field, because a table cannot express
this otherwise. In a table many rows may share one value, through a dictionary or views of one
buffer, so that a few bytes in the file can become a value in each of millions of rows. Therefore
the size of the rows with separate values is measured before they are created. pyarrow is imported
only inside functions.
"""

from __future__ import annotations

import csv
import json
from collections import Counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal, NamedTuple

from mens_exp.errors import DataError, MissingExtra
from mens_exp.rows.files import (
    MAX_LINE_BYTES,
    Line,
    chunks,
    inner_suffix,
    lines,
    most_unpacked,
    open_file,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

_SPACE: Final = " \t\r\n"
_TABLES: Final[dict[str, Literal["parquet", "arrow"]]] = {".parquet": "parquet", ".arrow": "arrow"}


class Cell(str):
    """A cell of a CSV file, which has no types: numbers and lists are read where they are due."""

    __slots__ = ()


class Located(NamedTuple):
    """The value at one location in a file.

    Attributes:
        where: the location, as ``file:line``; in a table as ``file:row``, counted from 1.
        value: the decoded value, or the `DataError` that explains why there is none.
        raw: the line as read; empty if rows are not lines.
        ends: nothing after this location can be read.
    """

    where: str
    value: object
    raw: bytes = b""
    ends: bool = False


def has_lines(path: Path) -> bool:
    """Return whether a file, by its name, has one row per line (not a table or an array)."""
    return inner_suffix(path) not in {*_TABLES, ".json", ".csv"}


def decoded_rows(path: Path, field: str) -> Iterator[Located]:
    """Decode a file row by row.

    Args:
        path: UTF-8 (a byte order mark is tolerated); one object per line, or in a ``.json`` file
            an array of objects; or ``.csv`` with a line of names. Each may be compressed (``.gz``,
            ``.zst``). Or a table: ``.parquet``, ``.arrow``.
        field: the setting that names the file, for messages.

    Yields:
        Each row's location with its value, or with the `DataError` that prevented reading it. A
        line longer than `MAX_LINE_BYTES` is such an error.

    Raises:
        DataError: the file cannot be read, or is not a file of rows.
        MissingExtra: it is a table, and pyarrow is not installed.
    """
    suffix = inner_suffix(path)
    if suffix in _TABLES:
        for number, row in rows_of_file(path, _TABLES[suffix], field):
            yield Located(f"{path}:{number}", row)
        return
    pieces: Iterator[bytes] = chunks(path, field)
    if suffix == ".csv":
        yield from _csv_rows(pieces, path)
        return
    if suffix == ".json":
        data = b"".join(pieces)  # an array cannot be read line by line
        if data.lstrip().startswith(b"["):
            yield from _array(data, path)
            return
        pieces = iter([data])
    for number, line in enumerate(lines(pieces), start=1):
        yield decoded_line(line, f"{path}:{number}")


def _csv_rows(pieces: Iterator[bytes], path: Path) -> Iterator[Located]:
    """Decode a CSV file (RFC 4180) row by row; an empty cell means that the row lacks the field.

    Raises:
        DataError: the first line does not name the columns.
    """
    csv.field_size_limit(MAX_LINE_BYTES)
    numbered = enumerate(lines(pieces), start=1)
    reader = csv.reader((f"{_utf8(one, f'{path}:{n}')}\n" for n, one in numbered), strict=True)
    names: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            problem = DataError("is not valid CSV", where=where, found=str(error))
            yield Located(where, problem, ends=True)
            return
        except DataError as problem:  # behind it, quotes may be open
            yield Located(where, problem, ends=True)
            return
        if cells is None:
            return
        if names is None:
            names = _csv_names(cells, where)
        elif cells:  # a blank line is no row
            yield Located(where, _csv_row(names, cells, where))


def _csv_names(cells: list[str], where: str) -> list[str]:
    """Return the names of the columns, which the first line has."""
    names = [cell.strip() for cell in cells]
    if len(names) == 1 and (other := next((c for c in ";\t|" if c in names[0]), None)):
        raise DataError(
            "the columns are not separated by commas",
            where=where,
            found=repr(other),
            expected="a comma",
            remedy="save the file with commas, or as JSON Lines",
        )
    if len(set(names)) < len(names) or "" in names:
        raise DataError(
            "the first line does not name the columns",
            where=where,
            found=", ".join(map(repr, names)),
            expected="a name for each column, each once",
        )
    return names


def _csv_row(names: list[str], cells: list[str], where: str) -> object:
    if len(cells) != len(names):
        return DataError(
            "the row has another number of cells than there are columns",
            where=where,
            found=str(len(cells)),
            expected=str(len(names)),
            remedy="put cells that hold commas or line ends into double quotes",
        )
    return {name: Cell(cell) for name, cell in zip(names, cells, strict=True) if cell}


def decoded_line(line: Line, where: str) -> Located:
    """Decode one line, like `decoded_rows` does for a file."""
    try:
        return Located(where, _json(_text(line, where), where), line.raw)
    except DataError as problem:
        return Located(where, problem, line.raw)


def _text(line: Line, where: str) -> str:
    """Decode one line of JSON; each kind of failure has a separate message."""
    text = _utf8(line, where)
    if not text.strip():
        raise DataError("the line is blank", where=where, expected="one JSON object a line")
    return text


def _utf8(line: Line, where: str) -> str:
    """Decode one line without its end."""
    if line.size > MAX_LINE_BYTES:
        raise DataError(
            "the line is too long",
            where=where,
            found=f"{line.size:,} bytes",
            expected=f"at most {MAX_LINE_BYTES:,} bytes, one row a line",
        )
    raw = line.raw.removesuffix(b"\r")
    if b"\0" in raw:
        raise DataError(
            "the line holds NUL bytes",
            where=where,
            found=f"{raw.count(0)} of them, the first at byte {raw.index(0) + 1}",
            expected="UTF-8 text; a file cut off by a crash or saved as UTF-16 has NUL bytes",
        )
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            "the line is not UTF-8",
            where=where,
            found=f"byte 0x{raw[error.start]:02x} at byte {error.start + 1}",
            remedy="save the file as UTF-8",
        ) from error


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=lambda items: _object(items, where))
    except json.JSONDecodeError as error:
        raise DataError(
            f"the line is not JSON: {error.msg} at column {error.colno}",
            where=where,
            found=text[:60],
            expected="one JSON object a line",
        ) from error
    except (ValueError, RecursionError) as error:  # a number or a nesting beyond Python's limits
        raise DataError(f"the line is not usable JSON: {error}", where=where) from error


def _array(data: bytes, path: Path) -> Iterator[Located]:
    """Decode the elements of an array, each with the line on which it starts.

    An error in the array itself ends decoding, because no element after it can be trusted.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problem = DataError("the file is not UTF-8", where=f"{path}:{line}")
        yield Located(f"{path}:{line}", problem, ends=True)
        return
    position, line, counted = _skip(text, text.index("[") + 1), 1, 0
    while not text.startswith("]", position):
        line, counted = line + text.count("\n", counted, position), position
        where = f"{path}:{line}"
        try:
            value, position = _element(text, position, where)
        except DataError as problem:
            yield Located(where, problem, ends=True)
            return
        yield Located(where, value)
    if counted == 0:
        empty = DataError("the array is empty", where=str(path), expected="a row")
        yield Located(f"{path}:1", empty, ends=True)
    elif rest := text[position + 1 :].strip():
        more = DataError("something follows the array", where=where, found=rest[:60])
        yield Located(where, more, ends=True)


def _element(text: str, position: int, where: str) -> tuple[object, int]:
    """Decode one element; return where the next one, or the closing bracket, starts."""
    decoder = json.JSONDecoder(object_pairs_hook=lambda items: _object(items, where))
    try:
        value, end = decoder.raw_decode(text, position)
    except json.JSONDecodeError as error:
        raise DataError(
            f"the array is not JSON: {error.msg} at line {error.lineno}, column {error.colno}",
            where=where,
            found=text[position : position + 60],
            expected="an array of objects",
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"the row is not usable JSON: {error}", where=where) from error
    end = _skip(text, end)
    if text.startswith("]", end):
        return value, end
    after = _skip(text, end + 1)
    if text.startswith(",", end) and not text.startswith("]", after):
        return value, after
    raise DataError(
        "the array is not JSON: after a row comes a comma and a row, or the closing bracket",
        where=where,
        found=text[end : end + 60],
        expected="an array of objects",
    )


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in _SPACE:
        position += 1
    return position


def _object(items: list[tuple[str, object]], where: str) -> dict[str, object]:
    """Build an object, rejecting repeated keys, of which `json` silently keeps the last."""
    row = dict(items)
    if len(row) < len(items):
        twice = Counter(key for key, _ in items).most_common(1)[0][0]
        raise DataError(f"the key {twice!r} stands twice in one object", where=where)
    return row


EXTRA: Final = "pip install 'mens-exp[datasets]'"
_AT_ONCE: Final = 1_000  # rows turned into Python objects at a time
_MAGIC: Final = b"ARROW1"  # magic of the file format; `datasets` writes the stream format


def rows_of_file(
    path: Path, kind: Literal["parquet", "arrow"], field: str
) -> Iterator[tuple[int, object]]:
    """Yield the rows of a table, numbered from 1.

    Args:
        path: the file.
        kind: kind of table; an Arrow file may be in the file or the stream format.
        field: the setting that names it, for messages.

    Yields:
        Each row's number with its fields, or with the `DataError` that prevented reading it.

    Raises:
        DataError: the file cannot be read, is not a table of this kind, has no rows, or has two
            columns of the same name.
        MissingExtra: pyarrow is not installed.
    """
    try:
        import pyarrow as pa
    except ImportError as error:
        raise MissingExtra(
            f"pyarrow is needed to read {kind} files",
            where=field,
            found=str(path),
            remedy=f"run: {EXTRA}",
        ) from error
    with open_file(path, field) as file:
        try:
            if kind == "parquet":
                table = _parquet(file, path)
                names, batches = table.schema_arrow.names, table.iter_batches(_AT_ONCE)
            else:
                whole = file.read(len(_MAGIC)) == _MAGIC
                file.seek(0)
                reader = pa.ipc.open_file(file) if whole else pa.ipc.open_stream(file)
                names, batches = reader.schema.names, _arrow_batches(reader)
            number = 0
            most = most_unpacked(path)
            for number, row in rows_of_batches(names, batches, str(path), most):
                yield number, row
        except (pa.ArrowException, OSError, MemoryError, UnicodeDecodeError) as error:
            raise DataError(
                f"the file is no {kind.capitalize()} table, or a damaged one",
                where=str(path),
                found=" ".join(str(error).split())[:200] or "it asks for more memory than there is",
                remedy="make or download the file again",
            ) from error
    if number == 0:
        raise DataError("the table is empty", where=str(path), expected="at least one row")


def _parquet(file: BinaryIO, path: Path) -> Any:
    """Open a Parquet file so that a value shared by many rows is decoded once.

    Raises:
        DataError: its metadata declares more values than the file can hold.
    """
    import pyarrow.parquet as pq

    about = pq.ParquetFile(file)
    columns = [about.schema.column(number) for number in range(len(about.schema.names))]
    groups = [about.metadata.row_group(number) for number in range(about.num_row_groups)]
    # pyarrow (26.0) aborts the process on some damaged descriptions of a column in a group, so
    # only those of lists are inspected; only lists can have more values than rows.
    values = sum(
        group.column(number).num_values if column.max_repetition_level else group.num_rows
        for group in groups
        for number, column in enumerate(columns)
    )
    if values > most_unpacked(path):
        raise _too_large(str(path), f"{values:,} values", most_unpacked(path))
    # Strings within lists are decoded one by one, because pyarrow does not share them.
    texts = [
        one.path for one in columns if one.physical_type == "BYTE_ARRAY" and "." not in one.path
    ]
    file.seek(0)
    return pq.ParquetFile(file, read_dictionary=texts)


def rows_of_batches(
    names: list[str], batches: Iterable[Any], where: str, most: int | None = None
) -> Iterator[tuple[int, object]]:
    """Yield the rows of Arrow batches, numbered from 1, each an object without its nulls.

    Args:
        names: the columns.
        batches: record batches.
        where: name of their container, for messages.
        most: maximum total bytes; None if their source has no known size.

    Raises:
        DataError: two columns have the same name and are ambiguous, or the limit is exceeded.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"the column {twice[0]!r} stands twice in one table", where=where)
    number = size = 0
    for batch in batches:
        for column in batch.columns:
            _refuse_damaged(column)
        for start in range(0, len(batch), _AT_ONCE):
            rows = batch.slice(start, _AT_ONCE)
            size += batch_bytes(rows, where)
            if most is not None and size > most:
                raise _too_large(where, f"more than {most:,} bytes", most)
            for row in _values(rows, f"{where}:{{}}", number):
                number += 1
                yield number, row


def _refuse_damaged(column: Any) -> None:
    """Check that a column's offsets and indices are in range, because pyarrow does not check them.

    Strings that are not UTF-8 are accepted if their row can be named later, which is not possible
    inside another column.

    Raises:
        ArrowInvalid: they are out of range.
    """
    import pyarrow as pa

    column.validate()  # validates the sizes used by the next line
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        as_bytes = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary()}
        if "UTF8" not in str(error) or column.type not in as_bytes:
            raise
        column.view(as_bytes[column.type]).validate(full=True)


def _arrow_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)


def _values(batch: Any, where: str, before: int) -> Iterator[object]:
    """Convert a batch to objects; if one row cannot be converted, convert rows one by one."""
    size = batch_bytes(batch, where)
    if size > MAX_LINE_BYTES and len(batch) > 1:
        half = len(batch) // 2
        yield from _values(batch.slice(0, half), where, before)
        yield from _values(batch.slice(half), where, before + half)
        return
    if size > MAX_LINE_BYTES:
        yield DataError(
            "the row is too long",
            where=where.format(before + 1),
            found=f"{size:,} bytes",
            expected=f"at most {MAX_LINE_BYTES:,} bytes",
        )
        return
    try:
        rows = batch.to_pylist()
    except ValueError as error:  # UnicodeDecodeError, or a repeated field of an object
        if len(batch) > 1:
            for index in range(len(batch)):
                yield from _values(batch.slice(index, 1), where, before + index)
            return
        reason = "is not UTF-8" if isinstance(error, UnicodeDecodeError) else f"is none: {error}"
        yield DataError(f"the row {reason}", where=where.format(before + 1))
        return
    for row in rows:
        yield {name: value for name, value in row.items() if value is not None}


def _too_large(where: str, found: str, most: int) -> DataError:
    return DataError(
        "the table holds more than the size of its file allows",
        where=where,
        found=found,
        expected=f"at most {most:,}",
        remedy="if you trust it, write its rows as JSON Lines",
    )


_VIEW_BYTES: Final = 16  # size of a string view; the length is in the first four
_VALUE_BYTES: Final = 8


def batch_bytes(batch: Any, where: str) -> int:
    """Return the size of a batch's rows.

    Args:
        batch: a record batch, or a table.
        where: name of its container, for messages.

    Raises:
        DataError: a column has a type that text rows cannot have.
    """
    chunks = (chunk for column in batch.columns for chunk in getattr(column, "chunks", [column]))
    return sum(_size(chunk, where) for chunk in chunks)


def _size(array: Any, where: str) -> int:
    import pyarrow as pa
    import pyarrow.compute as pc

    kind, types = array.type, pa.types
    size: int = len(array) * _VALUE_BYTES
    if types.is_dictionary(kind):
        size = _shared(array, where)
    elif types.is_string_view(kind) or types.is_binary_view(kind):
        size = _viewed(array)
    elif _is_text(kind):
        size = pc.sum(pc.binary_length(array)).as_py() or 0
    elif types.is_struct(kind):
        size = sum(_size(child, where) for child in array.flatten())
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        size += _size(array.flatten(), where)
    elif types.is_map(kind):
        size = _size(array.keys, where) + _size(array.items, where)
    elif types.is_nested(kind) or types.is_run_end_encoded(kind):
        raise DataError("a column is of a type that is not read", where=where, found=str(kind))
    elif isinstance(array, pa.ExtensionArray):
        size = _size(array.storage, where)
    return size


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    tests = (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    return any(test(kind) for test in tests)


def _shared(array: Any, where: str) -> int:
    """Return the size of values that rows reference by index."""
    import pyarrow as pa
    import pyarrow.compute as pc

    values = array.dictionary
    if _is_text(values.type):
        lengths = pc.binary_length(values)
        return pc.sum(pc.take(lengths, array.indices.cast(pa.int64()))).as_py() or 0
    return len(array) * _size(values, where)


def _viewed(array: Any) -> int:
    import numpy as np

    buffer = array.buffers()[1]
    lengths = np.frombuffer(buffer, np.int32)[:: _VIEW_BYTES // 4]
    return int(lengths[array.offset : array.offset + len(array)].astype(np.int64).sum())
