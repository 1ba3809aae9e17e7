"""An adapter's tensors into a graph that has exactly those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np

__all__ = ["load_into"]

_LISTED = 8


def load_into(
    parameters: Mapping[str, torch.nn.Parameter], tensors: Mapping[str, np.ndarray]
) -> None:
    """Copy tensors into the parameters of the same names.

    Raises:
        ConfigError: names or shapes differ; nothing is copied. Copying would stretch a matrix of
            rank 1 to any rank, in silence.
    """
    theirs = {(name, tuple(values.shape)) for name, values in tensors.items()}
    ours = {(name, tuple(values.shape)) for name, values in parameters.items()}
    if theirs != ours:
        odd = [f"{name} {list(shape)}" for name, shape in sorted(theirs ^ ours)]
        raise ConfigError(
            "the adapter's matrices are not the graph's",
            where="adapter",
            found=", ".join(odd[:_LISTED]),
            expected="the layers and the rank of the run's own configuration",
        )
    with torch.no_grad():
        for name, values in tensors.items():
            parameters[name].copy_(torch.from_numpy(values))
