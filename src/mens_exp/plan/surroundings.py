"""The surroundings of a contract on this machine, read without weights and without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.model import HfModel
from mens_exp.errors import MensError
from mens_exp.layout import hub
from mens_exp.layout.shape import family_for, shape_of
from mens_exp.plan.kernels import KERNELS, PROXY, available
from mens_exp.plan.planner import Surroundings

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape

__all__ = ["surroundings_of"]


def surroundings_of(config: RunConfig) -> Surroundings:
    """Look around; what a model's files do not tell is None, and told by their own check."""
    kernel = KERNELS.get(config.backend.name)
    model_type, layers, keys = None, None, None
    is_proxy = kernel is not None and kernel.targets == PROXY
    try:
        model_type = family_for(config.model).model_type
        shape = shape_of(config.model)
        layers = shape.num_hidden_layers
        keys = _keys(config, shape) if is_proxy else None
    except (MensError, ArithmeticError):
        pass  # the check of the model's files names it
    return Surroundings(
        kernels=available() | {config.backend.name if kernel is None else ""} - {""},
        model_type=model_type,
        device=config.trainer.accelerator,
        forced=config.backend.name,
        keys=keys,
        layers=layers,
    )


def _keys(config: RunConfig, shape: Shape) -> frozenset[str] | None:
    """Return a checkpoint's keys; a model that is made here has every projection."""
    if isinstance(config.model, HfModel):
        return frozenset(hub.describe(config.model).tensors) or None
    return frozenset(
        f"{shape.family.layers}.{layer}.{path}.weight"
        for layer in range(shape.num_hidden_layers)
        for path in shape.projections(layer)
    )
