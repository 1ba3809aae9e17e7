"""Stored weights of a base model: one tensor at a time, a block of rows at a time, or mapped.

A memory map reads only the touched pages, but they count as the process's own memory while it is
open. Blocks of rows are therefore read instead of mapped: the caller owns the result, and nothing
else is kept in memory.

Shapes: I inputs and O outputs of a module.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from mens_exp.errors import ModelFileError
from mens_exp.layout import prequantized
from mens_exp.layout.checkpoint_files import ITEM_BYTES, data_start, read_directory, read_header
from mens_exp.layout.shape import base_key
from mens_exp.model.stored_codes import stored_codes

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.layout.checkpoint_files import TensorInfo
    from mens_exp.layout.families import Family
    from mens_exp.model.stored_codes import StoredCodes


class StoredTensors:
    """Reader of tensors by key; keeps nothing between calls.

    Attributes:
        directory: the checkpoint; a layer stored as codes is listed as one weight.
    """

    def __init__(self, directory: Path) -> None:
        """Find the file of each tensor.

        Raises:
            ModelFileError: a file is missing or truncated.
        """
        self.directory = read_directory(directory)
        self._shard_of = {
            key: shard for shard in self.directory.shards for key in read_header(shard)
        }

    def tensor(self, key: str) -> torch.Tensor:
        """Return a tensor as it is in its file.

        Raises:
            ModelFileError: the safetensors library cannot read the file.
        """
        shard = self._shard_of[key]
        try:
            with safe_open(shard, framework="pt") as file:
                found: torch.Tensor = file.get_tensor(key)
        except SafetensorError as error:
            raise ModelFileError(
                "cannot be read by the safetensors library",
                where=f"{shard}: {key}",
                found=str(error),
                remedy="download the model again",
            ) from error
        return found

    def codes(self, key: str, device: torch.device) -> StoredCodes:
        """Return the codes of a layer that was published quantized.

        Args:
            key: key of the layer's weight in `directory`.
            device: the target device.

        Raises:
            ModelFileError: the layer's tensors are not those of the checkpoint's format.
        """
        where, path = str(self.directory.path), key.removesuffix(".weight")
        stored = prequantized.format_of(self.directory.config, where)
        assert stored is not None, "the directory has weights of codes"

        def read(suffix: str) -> torch.Tensor | None:
            name = f"{path}.{suffix}"
            return self.tensor(name).to(device) if name in self._shard_of else None

        width = self.directory.tensors[key].shape[-1]
        return stored_codes(stored, read, f"{where}: {path}", width)


class StoredWeights:
    """Reader of weights by module path; keeps nothing between calls."""

    def __init__(self, directory: Path, family: Family) -> None:
        """Find the file of each tensor.

        Raises:
            ModelFileError: a file is missing or truncated.
        """
        self.family = family
        self._stored = StoredTensors(directory)

    def read(self, module_path: str, device: torch.device) -> torch.Tensor:
        """Return a module's weight in the layout of torch's ``Linear``, ``[O, I]``, in f32.

        Args:
            module_path: such as ``model.layers.3.mlp.up_proj``.
            device: the target device.

        Raises:
            ModelFileError: the checkpoint has no such weight.
        """
        key = base_key(module_path, self.family, self._stored.directory.tensors)
        if self._stored.directory.tensors[key].dtype == prequantized.CODES:
            codes = self._stored.codes(key, device)
            return codes.rows(0, len(codes.codes_OI))
        weight = self._stored.tensor(key).to(device).float()
        return weight.T.contiguous() if self.family.transposed else weight

    def codes(self, module_path: str, device: torch.device) -> StoredCodes:
        """Return the codes of a layer that was published quantized.

        Args:
            module_path: as in :meth:`read`.
            device: the target device.

        Raises:
            ModelFileError: the checkpoint has no such layer, or its tensors are not the format's.
        """
        key = base_key(module_path, self.family, self._stored.directory.tensors)
        return self._stored.codes(key, device)

    @property
    def coded_weights(self) -> list[str]:
        """The keys of weights that were published as codes, in the order of the files."""
        found = self._stored.directory.tensors
        return [name for name, info in found.items() if info.dtype == prequantized.CODES]


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
    """Reader of the rows of one tensor; a zero-dimensional tensor has one row."""

    def __init__(self, shard: Path, name: str, info: TensorInfo) -> None:
        """Locate the tensor in its file.

        Args:
            shard: the safetensors file.
            name: name of the tensor, for messages.
            info: its entry in the file's header.

        Raises:
            ModelFileError: its dtype is not supported.
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
        """Return rows ``first`` to ``last`` (exclusive) in their stored format.

        Raises:
            ModelFileError: the file is truncated.
        """
        raw = torch.empty((last - first) * self._row_bytes, dtype=torch.uint8)
        with self._shard.open("rb", buffering=0) as file:
            file.seek(self._start + first * self._row_bytes)
            view, done = raw.numpy().data, 0
            while done < len(view):
                more = file.readinto(view[done:])  # at most 2 GiB per call
                if not more:
                    raise ModelFileError("ended while it was read", where=str(self._shard))
                done += more
        return raw.view(self.dtype).view(last - first, *self.inner)


class CodedRows:
    """Reader of the rows of a weight that was published as codes, like `StoredRows`."""

    def __init__(self, shard: Path, name: str) -> None:
        """Read all codes into memory.

        Args:
            shard: a file of the checkpoint.
            name: name of the weight.

        Raises:
            ModelFileError: the tensors are not those of the checkpoint's format.
        """
        self._codes = StoredTensors(shard.parent).codes(name, torch.device("cpu"))
        self.rows, width = self._codes.codes_OI.shape
        self.inner = (width,)

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return rows ``first`` to ``last`` (exclusive), dequantized to f32."""
        return self._codes.rows(first, last)


_FORMATS = {
    "F32": (np.float32, torch.float32),
    "F16": (np.float16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),  # numpy has no bf16; the bits are reinterpreted
}


def mapped(directory: Path, key: str) -> torch.Tensor:
    """Return a memory-mapped tensor of a checkpoint in its stored format.

    The mapping is private: changes to the tensor do not reach the file.

    Args:
        directory: directory of the model.
        key: key of the tensor.

    Raises:
        ModelFileError: no file contains it, or its format is not floating-point.
    """
    for shard in read_directory(directory).shards:
        info = read_header(shard).get(key)
        if info is None:
            continue
        if info.dtype not in _FORMATS:
            raise ModelFileError(
                "cannot be used as weights",
                where=f"{shard}: {key}",
                found=info.dtype,
                expected=f"one of {', '.join(_FORMATS)}",
            )
        stored, meant = _FORMATS[info.dtype]
        start = data_start(shard) + info.start
        if start % np.dtype(stored).itemsize:  # unaligned data, which the format allows
            return _read(shard, start, info.shape, stored, meant)
        values = np.memmap(shard, dtype=stored, mode="c", offset=start, shape=info.shape)
        return torch.from_numpy(values).view(meant)
    raise ModelFileError("the checkpoint has no such weight", where=str(directory), found=key)


def _read(
    shard: Path, start: int, shape: tuple[int, ...], stored: type, meant: torch.dtype
) -> torch.Tensor:
    with shard.open("rb") as file:
        file.seek(start)
        values: np.ndarray = np.fromfile(file, dtype=stored, count=math.prod(shape))
    return torch.from_numpy(values.reshape(shape)).view(meant)
