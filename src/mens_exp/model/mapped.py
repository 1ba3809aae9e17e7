"""Weights of a base model by memory map: what is not touched is never read."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import torch

from mens_exp.errors import ModelFileError
from mens_exp.layout.directory import read_directory
from mens_exp.layout.safetensors_header import data_start, read_header

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["mapped"]

_FORMATS = {
    "F32": (np.float32, torch.float32),
    "F16": (np.float16, torch.float16),
    "BF16": (np.int16, torch.bfloat16),  # numpy has no bf16; the bits are taken as they are
}


def mapped(directory: Path, key: str) -> torch.Tensor:
    """Return a tensor of a checkpoint in its stored format, its bytes left in the file.

    The mapping is private: nothing that is done to the tensor reaches the file.

    Args:
        directory: of the model.
        key: of the tensor.

    Raises:
        ModelFileError: no file has it, or its format is no floating-point one.
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
        if start % np.dtype(stored).itemsize:  # a header of odd length; the format allows it
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
