"""A block that leaves a model and the random generators as they were."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from mens_exp.lora.keyed import KeyedDropout

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["untouched"]

_DROPOUTS = (KeyedDropout, torch.nn.modules.dropout._DropoutNd)  # noqa: SLF001  # no other name


@contextmanager
def untouched(model: torch.nn.Module) -> Iterator[None]:
    """Work on a model inside the block with nothing dropped, and put everything back.

    Put back are the mode of every module, the gradients, and the generators of torch, NumPy and
    Python. All but dropout keeps its mode, so that passes are those of training: with AVX512-BF16
    one in evaluation mode and without gradients would spoil 4-bit layers (DESIGN.md).
    """
    modes = {module: module.training for module in model.modules()}
    gradients = {parameter: parameter.grad for parameter in model.parameters()}
    deterministic = torch.are_deterministic_algorithms_enabled()
    drawn, shuffled = random.getstate(), np.random.get_state()  # noqa: NPY002  # kept, not used
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        try:
            for parameter in gradients:
                parameter.grad = None  # or passes would add to those that are kept
            for module in modes:
                if isinstance(module, _DROPOUTS):
                    module.eval()
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            torch.use_deterministic_algorithms(deterministic)
            random.setstate(drawn)
            np.random.set_state(shuffled)  # noqa: NPY002
