"""Rows of tables: Parquet and Arrow files, and whatever else comes as Arrow batches.

A null in a column is a field that the row does not have: a table has no other way to say it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final, Literal

from mens_exp.errors import DataError, MissingExtra
from mens_exp.rows.stored import opened

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
        import pyarrow.parquet as pq
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
                table = pq.ParquetFile(file)
                names, batches = table.schema_arrow.names, table.iter_batches(_AT_ONCE)
            else:
                whole = file.read(len(_MAGIC)) == _MAGIC
                file.seek(0)
                reader = pa.ipc.open_file(file) if whole else pa.ipc.open_stream(file)
                names, batches = reader.schema.names, _arrow_batches(reader)
            number = 0
            for number, row in rows_of_batches(names, batches, str(path)):
                yield number, row
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"the file is no {kind.capitalize()} table, or a damaged one",
                where=str(path),
                found=" ".join(str(error).split())[:200],
                remedy="make or download the file again",
            ) from error
    if number == 0:
        raise DataError("the table is empty", where=str(path), expected="at least one row")


def rows_of_batches(
    names: list[str], batches: Iterable[Any], where: str
) -> Iterator[tuple[int, object]]:
    """Yield the rows of Arrow batches, numbered from 1, each an object without its nulls.

    Args:
        names: the columns.
        batches: record batches.
        where: what holds them, for messages.

    Raises:
        DataError: two columns have one name: which one is meant cannot be told.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise DataError(f"the column {twice[0]!r} stands twice in one table", where=where)
    number = 0
    for batch in batches:
        for start in range(0, len(batch), _AT_ONCE):
            for row in _values(batch.slice(start, _AT_ONCE), f"{where}:{{}}", number):
                number += 1
                yield number, row


def _arrow_batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        return (reader.get_batch(index) for index in range(reader.num_record_batches))
    return iter(reader)


def _values(batch: Any, where: str, before: int) -> Iterator[object]:
    """Turn a batch into objects; where one row cannot be, one by one."""
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
