"""The bytes that rows of an Arrow batch take once each has values of its own.

In a table many rows may share one value: by a dictionary, or by views of one buffer. A few bytes
in the file then become a value in each of millions of rows.
"""

from __future__ import annotations

from typing import Any, Final

from mens_exp.errors import DataError

__all__ = ["of_batch"]

_VIEW_BYTES: Final = 16  # of a view of a text: its length in the first four
_VALUE_BYTES: Final = 8


def of_batch(batch: Any, where: str) -> int:
    """Return the size of a batch's rows.

    Args:
        batch: a record batch, or a table.
        where: what holds it, for messages.

    Raises:
        DataError: a column is of a type that no row of text is written in.
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
    """Return the size of values that rows have by number."""
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
