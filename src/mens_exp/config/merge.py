"""Settings of merging an adapter into its base."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mens_exp.config.fields import setting

__all__ = ["MergeBase", "MergeConfig", "MergeDtype", "MergeMode"]


class MergeMode(Enum):
    """The part of the model that a merge writes."""

    full = "full"
    subset = "subset"


class MergeDtype(Enum):
    """Number format of merged weights."""

    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


class MergeBase(Enum):
    """The weights that the delta is added to."""

    original = "original"
    dequantized = "dequantized"


@dataclass(kw_only=True, slots=True)
class MergeConfig:
    """The output of task=merge; `out` names the directory, or in a subset the file."""

    mode: MergeMode | None = setting(
        None,
        "full: a complete Hugging Face directory; subset: one safetensors file of the merged "
        "tensors alone. null is full, but subset for base_shard and for proxy adapters.",
    )
    dtype: MergeDtype | None = setting(
        None,
        "Format of what is written: f32, bf16 or f16. Sums are taken in f32 and rounded once, to "
        "the nearest. null is bf16 for a base in bf16, else f32.",
    )
    base: MergeBase | None = setting(
        None,
        "original: the published weights; dequantized: the 4-bit values that the adapter was "
        "trained against. null is dequantized for an adapter of a quantized base, else original, "
        "as for base_shard where the adapter does not say what quantized its base.",
    )
    untie: bool = setting(
        True,  # the value of the setting, named by its position in the schema
        "Give a tied head with a delta a weight of its own, in weights and config.json; false "
        "merges it into the embedding table, as the seeds' merge does. The input embedding then "
        "moves too: the result is not the trained model, and the certificate measures how far off.",
    )
    any_base: bool = setting(
        False,  # as above
        "Merge even where the base's content hash is not the one that the adapter was trained on.",
    )
