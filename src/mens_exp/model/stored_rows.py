"""One tensor of a checkpoint, a block of rows at a time.

It is read and not mapped: pages of a map count as the reader's own memory for as long as it is
open. What was read is the caller's, and nothing else is held.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from mens_exp.errors import ModelFileError
from mens_exp.layout.safetensors_header import ITEM_BYTES, data_start

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.layout.safetensors_header import TensorInfo

__all__ = ["TORCH_DTYPES", "StoredRows"]

TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class StoredRows:
    """Reads the rows of one tensor; a tensor of no dimension has one."""

    def __init__(self, shard: Path, name: str, info: TensorInfo) -> None:
        """Find its place.

        Args:
            shard: the safetensors file.
            name: of the tensor, for messages.
            info: its entry in the file's header.

        Raises:
            ModelFileError: numbers of its type cannot be read.
        """
        if info.dtype not in TORCH_DTYPES:
            raise ModelFileError(
                "cannot be read as a tensor",
                where=f"{shard}: {name}",
                found=info.dtype,
                expected=f"one of {', '.join(TORCH_DTYPES)}",
            )
        self.dtype = TORCH_DTYPES[info.dtype]
        self.rows = info.shape[0] if info.shape else 1
        self.inner = info.shape[1:]
        self._shard = shard
        self._start = data_start(shard) + info.start
        self._row_bytes = math.prod(self.inner) * ITEM_BYTES[info.dtype]

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return rows ``first`` to ``last``, the last one excluded, in their stored format.

        Raises:
            ModelFileError: the file ends before them.
        """
        raw = torch.empty((last - first) * self._row_bytes, dtype=torch.uint8)
        with self._shard.open("rb", buffering=0) as file:
            file.seek(self._start + first * self._row_bytes)
            view, done = raw.numpy().data, 0
            while done < len(view):
                more = file.readinto(view[done:])  # at most 2 GiB a call
                if not more:
                    raise ModelFileError("ended while it was read", where=str(self._shard))
                done += more
        return raw.view(self.dtype).view(last - first, *self.inner)
