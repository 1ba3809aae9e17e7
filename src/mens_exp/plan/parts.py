"""The share of a sharded base that one process holds (trainer=fsdp); torch-free.

Codes of decoder layers are shared out, their scales are not: bitsandbytes keeps these beside the
weight. Embedding, last norm, head and all that is trained are whole in every process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.trainer import Strategy

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig

__all__ = ["EXPERTS_DENSE", "WHOLE", "in_parts", "is_in_parts"]

EXPERTS_DENSE = "experts, not quantized"

WHOLE = "base, whole while it is loaded or scored"
_CODE_BITS = 4
# Layers that are whole at one time: the one that computes, the one fetched ahead of it, and the
# buffer that its parts arrive in. By PyTorch's code (fully_shard); not measured on a GPU.
_AT_ONCE = 3
_RESTING = ("base weights", EXPERTS_DENSE, "embedding and head", "adapter", "framework")


def is_in_parts(config: RunConfig) -> bool:
    """Whether several processes share out the base."""
    return config.trainer.strategy is Strategy.fsdp and config.trainer.world_size > 1


def in_parts(
    config: RunConfig, components: dict[str, int], *, bits: float, layers: int, kind: str
) -> dict[str, int]:
    """Return the components of one of several processes from those of one that holds all.

    Args:
        config: the whole configuration.
        components: bytes by component, the base whole.
        bits: of a weight of the base, its share of the scales among them.
        layers: decoder layers.
        kind: "cpu" or "cuda".
    """
    whole, share = components["base weights"], _CODE_BITS / bits
    codes = round(whole * share) if config.quant.is_four_bit else whole
    dense = components.get(EXPERTS_DENSE, 0)
    many = config.trainer.world_size
    parts = {
        **components,
        "base weights": whole - codes + -(-codes // many),
        **({EXPERTS_DENSE: -(-dense // many)} if dense else {}),
        "gathered layers": min(_AT_ONCE, layers) * (codes + dense) // layers,
    }
    alone = sum(components.get(name, 0) for name in _RESTING)
    if kind == "cpu":  # at the least, one process of a machine loads while others hold their part
        many, resting = config.trainer.devices, sum(parts.get(name, 0) for name in _RESTING)
        peak = (alone + (many - 1) * resting) // many
    else:  # it is loaded in the host's memory, and scored by the first process alone
        peak = alone if config.suite.name != "none" else 0
    return parts | {WHOLE: max(0, peak - sum(parts.values()))}
