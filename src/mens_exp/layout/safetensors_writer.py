"""Write a safetensors file one tensor after the other, without holding any of them.

The header stands first, so every name, type and shape is known before the first byte of data. The
same tensors given in the same order make the same bytes.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.layout.safetensors_header import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import BinaryIO

__all__ = ["Outline", "SafetensorsWriter"]

_ALIGNMENT = 8  # what the reference implementation pads its header to


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """One tensor of a file that is yet to be written: safetensors' type name, and its shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class SafetensorsWriter:
    """Writes the header at once, then takes the data of each tensor in turn.

    Attributes:
        order: the names in the order in which their data is wanted: wide types first, so that every
            tensor is aligned, and within a type as they were given.
    """

    def __init__(
        self,
        file: BinaryIO,
        outlines: Mapping[str, Outline],
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        """Write the header.

        Args:
            file: open and empty.
            outlines: every tensor of the file by name.
            metadata: free text in the header; None leaves its key out.
        """
        self.order = sorted(outlines, key=lambda name: -ITEM_BYTES[outlines[name].dtype])
        self._file = file
        header: dict[str, object] = {} if metadata is None else {"__metadata__": {**metadata}}
        self._ends: dict[str, int] = {}
        end = 0
        for name in self.order:
            start, end = end, end + outlines[name].nbytes
            header[name] = {
                "dtype": outlines[name].dtype,
                "shape": list(outlines[name].shape),
                "data_offsets": [start, end],
            }
            self._ends[name] = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        text += b" " * (-len(text) % _ALIGNMENT)
        file.write(len(text).to_bytes(8, "little") + text)
        self._written = 0
        self._left = list(reversed(self.order))

    def write(self, name: str, piece: bytes | memoryview) -> None:
        """Append bytes to a tensor; tensors come in `order`, each whole before the next."""
        self._pass_whole()
        assert self._left, "every tensor is whole"
        assert name == self._left[-1], f"{self._left[-1]} comes first"
        self._written += self._file.write(piece)
        assert self._written <= self._ends[name], f"{name} has more bytes than its header says"

    def close(self) -> None:
        """See that every tensor is whole; the file itself is its opener's to close."""
        self._pass_whole()
        assert not self._left, f"{self._left[-1]} is not whole"

    def _pass_whole(self) -> None:
        """Go on to the next tensor, past those of no elements."""
        while self._left and self._written == self._ends[self._left[-1]]:
            self._left.pop()
