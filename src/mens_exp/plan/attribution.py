"""The peak memory of task=attribute: two copies of the base, and what its layers gave."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.quant import ComputeDtype
from mens_exp.plan.memory import Memory, bits_per_weight

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape

__all__ = ["attribution_memory"]

_F32 = 4  # bytes
_FRAMEWORK = 500_000_000  # interpreter, torch, transformers, loaded kernels: as for training
_SPREAD = 0.3  # unverified guess


def attribution_memory(config: RunConfig, shape: Shape) -> Memory:
    """Estimate it by formula, in bytes."""
    compute = 2 if config.quant.compute_dtype is ComputeDtype.bf16 else _F32
    weights = shape.linear_parameters + shape.embedding_parameters
    kept = config.attribute.tokens * shape.num_hidden_layers * shape.hidden_size
    components = {
        "base in f32": _F32 * weights,
        "base in 4 bits": round(shape.linear_parameters * bits_per_weight(config.quant) / 8)
        + compute * shape.embedding_parameters,
        "layer outputs": _F32 * kept,
        "framework": _FRAMEWORK,
    }
    total = sum(components.values())
    return Memory(
        components=components,
        low=total,
        high=round(total * (1 + _SPREAD)),
        outside=0,
        basis="formula",
    )
