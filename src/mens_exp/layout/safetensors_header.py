"""Read and check a safetensors header without reading the tensors.

Format: eight bytes of little-endian header length, a JSON header, then the data
(https://huggingface.co/docs/safetensors/index#format).
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mens_exp.errors import ModelFileError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["ITEM_BYTES", "TensorInfo", "data_start", "read_header"]

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the reference implementation's own limit
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
_REMEDY = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor's entry: its type, shape, and place in the data (bytes)."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file by name, without reading their data.

    Raises:
        ModelFileError: the file is absent, truncated, or its header contradicts itself.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            _check_length(path, length, size)
            raw = file.read(length)
    except OSError as error:
        raise ModelFileError("cannot be read", where=str(path), found=str(error)) from error
    tensors = _parse(path, raw)
    _check_extent(path, tensors, size - _LENGTH_BYTES - length)
    return tensors


def data_start(path: Path) -> int:
    """Return the offset, in bytes, of the data of a safetensors file whose header was read."""
    with path.open("rb") as file:
        return _LENGTH_BYTES + int.from_bytes(file.read(_LENGTH_BYTES), "little")


def _check_length(path: Path, length: int, size: int) -> None:
    if length > _MAX_HEADER_BYTES:
        raise ModelFileError(
            "header length is not credible",
            where=str(path),
            found=f"{length} bytes",
            expected=f"at most {_MAX_HEADER_BYTES}",
            remedy=_REMEDY,
        )
    if _LENGTH_BYTES + length > size or length == 0:
        raise ModelFileError(
            "the file is truncated inside its header",
            where=str(path),
            found=f"{size} bytes",
            expected=f"more than {_LENGTH_BYTES + length}",
            remedy=_REMEDY,
        )


def _parse(path: Path, raw: bytes) -> dict[str, TensorInfo]:
    try:
        header: Any = json.loads(raw)
        entries = {k: v for k, v in header.items() if k != "__metadata__"}
        return {name: _entry(path, name, value) for name, value in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ModelFileError(
            "the header is no safetensors header",
            where=str(path),
            found=str(error),
            remedy=_REMEDY,
        ) from error


def _entry(path: Path, name: str, value: dict[str, Any]) -> TensorInfo:
    start, end = (operator.index(offset) for offset in value["data_offsets"])
    shape = tuple(operator.index(n) for n in value["shape"])
    info = TensorInfo(value["dtype"], shape, start, end)
    if info.dtype not in ITEM_BYTES:
        raise ModelFileError("unknown dtype", where=f"{path}: {name}", found=info.dtype)
    needed = math.prod(info.shape) * ITEM_BYTES[info.dtype]
    if end - start != needed:
        raise ModelFileError(
            "offsets disagree with shape and dtype",
            where=f"{path}: {name}",
            found=f"{end - start} bytes",
            expected=f"{needed} for {list(info.shape)} {info.dtype}",
            remedy=_REMEDY,
        )
    return info


def _check_extent(path: Path, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    expected = 0
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != expected:
            raise ModelFileError(
                "tensors overlap or leave a hole",
                where=f"{path}: {name}",
                found=f"start {info.start}",
                expected=f"start {expected}",
                remedy=_REMEDY,
            )
        expected = info.end
    if expected != data_bytes:
        raise ModelFileError(
            "the file is truncated" if data_bytes < expected else "the file has bytes to spare",
            where=str(path),
            found=f"{data_bytes} bytes of data",
            expected=f"{expected}",
            remedy=_REMEDY,
        )
