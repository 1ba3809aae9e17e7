"""The optimizer that the configuration names, on the parameters themselves."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from hydra.utils import get_class

from mens_exp.config.optim import PagedAdamw8bitConfig
from mens_exp.errors import SetupError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from mens_exp.config.optim import OptimizerConfig

__all__ = ["build_optimizer"]

_OURS = {"_target_", "name"}  # what says which optimizer it is; the rest are its arguments


def build_optimizer(
    config: OptimizerConfig, parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Build the optimizer over the trained parameters, which lie on their device already.

    Raises:
        SetupError: a paged optimizer without a CUDA device. bitsandbytes would take an ordinary
            one there, with a warning.
    """
    device = parameters[0].device.type
    if isinstance(config, PagedAdamw8bitConfig) and device != "cuda":
        raise SetupError(
            "paged memory is CUDA's own",
            where="optim",
            found=f"{config.name} on {device}",
            expected="a CUDA device",
            remedy="use optim=adamw_8bit, which is the same arithmetic, or optim=adamw",
        )
    arguments = {
        field.name: getattr(config, field.name)
        for field in dataclasses.fields(config)
        if field.name not in _OURS
    }
    cls: Any = get_class(config._target_)  # Hydra's own spelling
    optimizer: torch.optim.Optimizer = cls(parameters, **arguments)
    return optimizer
