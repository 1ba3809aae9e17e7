"""Read the rows of a table: Parquet, Arrow, or batches of a dataset.

A null in a table column means that the row does not have the field, because a table cannot express
this otherwise. In a table many rows may share one value, through a dictionary or views of one
buffer, so that a few bytes in the file can become a value in each of millions of rows. Therefore
the size of the rows with separate values is measured before they are created. pyarrow is imported
only inside functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

from mens_exp.errors import DataError, MissingExtra
from mens_exp.rows.files import MAX_LINE_BYTES, most_unpacked, open_file

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

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
                f"the file is not a {kind.capitalize()} table, or it is damaged",
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
        raise DataError(f"the column {twice[0]!r} occurs twice in one table", where=where)
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
    yield from map(without_nulls, rows)


def without_nulls(value: Any) -> Any:
    """Return a value of a table without the keys whose value is null, at any depth.

    A column of objects has the keys of all of its rows, and null where a row lacks one.
    """
    if isinstance(value, Mapping):
        kept = value.items()
        return {name: without_nulls(one) for name, one in kept if one is not None}
    if isinstance(value, list):
        return [without_nulls(one) for one in value]
    return value


def _too_large(where: str, found: str, most: int) -> DataError:
    return DataError(
        "the table is larger than the size of its file allows",
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
