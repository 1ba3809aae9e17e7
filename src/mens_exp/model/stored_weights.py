"""The unquantized weights of a base model, one tensor at a time from its files.

Shapes: I inputs and O outputs of a module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import safe_open

from mens_exp.layout.directory import read_directory
from mens_exp.layout.names import base_key
from mens_exp.layout.safetensors_header import read_header

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from mens_exp.layout.families import Family

__all__ = ["StoredWeights"]


class StoredWeights:
    """Reads weights by module path; nothing is held between two calls."""

    def __init__(self, directory: Path, family: Family) -> None:
        """Find out which file holds what.

        Raises:
            ModelFileError: a file is missing or truncated.
        """
        self.family = family
        shards = read_directory(directory).shards
        self._shard_of = {key: shard for shard in shards for key in read_header(shard)}

    def read(self, module_path: str, device: torch.device) -> torch.Tensor:
        """Return a module's weight as torch's ``Linear`` has it, ``[O, I]``, in f32.

        Args:
            module_path: such as ``model.layers.3.mlp.up_proj``.
            device: where to put it.

        Raises:
            ModelFileError: the checkpoint has no such weight.
        """
        key = base_key(module_path, self.family, self._shard_of)
        with safe_open(self._shard_of[key], framework="pt") as file:
            stored: torch.Tensor = file.get_tensor(key)
        weight = stored.to(device).float()
        return weight.T.contiguous() if self.family.transposed else weight
