"""Rows of tables: Parquet and Arrow files, and whatever else comes as Arrow batches.

A null in a column is a field that the row does not have: a table has no other way to say it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Literal

from mens_exp.errors import DataError, MissingExtra
from mens_exp.rows import table_size
from mens_exp.rows.stored import MAX_LINE_BYTES, most_unpacked, opened

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = ["EXTRA", "rows_of_batches", "rows_of_file"]

EXTRA: Final = "pip install 'mens-exp[datasets]'"
_AT_ONCE: Final = 1_000  # rows turned into Python objects at a time
_MAGIC: Final = b"ARROW1"  # of the file format; `datasets` writes the stream format


def rows_of_file(
    path: Path, kind: Literal["parquet", "arrow"], field: str
) -> Iterator[tuple[int, object]]:
    """Yield the rows of a table, numbered from 1.

    Args:
        path: the file.
        kind: what it is; an Arrow file may be in the file or the stream format.
        field: the setting that names it, for messages.

    Yields:
        Each row's number with its fields, or with the `DataError` that kept it from being read.

    Raises:
        DataError: the file cannot be read, is no such table, has no rows, or two columns of one
            name.
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
    with opened(path, field) as file:
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
    """Open a Parquet file so that a value that many rows share is decoded once.

    Raises:
        DataError: it says of itself that it holds more values than it has room for.
    """
    import pyarrow.parquet as pq

    about = pq.ParquetFile(file)
    columns = [about.schema.column(number) for number in range(len(about.schema.names))]
    groups = [about.metadata.row_group(number) for number in range(about.num_row_groups)]
    # pyarrow (26.0) aborts the process over some damaged descriptions of a column in a group, so
    # only those of lists are looked at, which alone may hold more values than rows.
    values = sum(
        group.column(number).num_values if column.max_repetition_level else group.num_rows
        for group in groups
        for number, column in enumerate(columns)
    )
    if values > most_unpacked(path):
        raise _too_large(str(path), f"{values:,} values", most_unpacked(path))
    # Texts within lists are decoded one by one: pyarrow does not share those.
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
        where: what holds them, for messages.
        most: bytes that they may hold in all; None where what they come from has no size.

    Raises:
        DataError: two columns have one name: which one is meant cannot be told. Or they hold more.
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
            size += table_size.of_batch(rows, where)
            if most is not None and size > most:
                raise _too_large(where, f"more than {most:,} bytes", most)
            for row in _values(rows, f"{where}:{{}}", number):
                number += 1
                yield number, row


def _refuse_damaged(column: Any) -> None:
    """Check that a column's offsets and indices lie within it: pyarrow reads them unchecked.

    A text that is not UTF-8 passes where its row can be named later, which it can not inside of
    another column.

    Raises:
        ArrowInvalid: they do not.
    """
    import pyarrow as pa

    column.validate()  # the sizes that the next line goes by
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
    """Turn a batch into objects; where one row cannot be, one by one."""
    size = table_size.of_batch(batch, where)
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
    except ValueError as error:  # UnicodeDecodeError, or a field of an object twice
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
