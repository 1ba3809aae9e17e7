"""The delta that an adapter adds to each weight, for every adapter format.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest

    Array = npt.NDArray[np.float32]

__all__ = ["deltas", "portable"]


def deltas(
    manifest: AdapterManifest, tensors: Mapping[str, Array]
) -> dict[str, tuple[Array, Array, float]]:
    """Return A_RI [r, in], B_OR [out, r] and the factor before ``B @ A`` of each logical layer.

    Both float32 as they are stored, in the order of the manifest.

    Raises:
        DataError: the adapter is a DoRA, whose update depends on the weight that it changes.
    """
    if manifest.variant == "dora":
        raise _no_delta()
    return {
        layer: (
            tensors[f"{layer}.lora_a"],
            tensors[f"{layer}.lora_b"],
            manifest.scale_of(layer),
        )
        for layer in manifest.layer_order
    }


def portable(
    manifest: AdapterManifest, tensors: Mapping[str, Array]
) -> tuple[AdapterManifest, dict[str, Array]]:
    """Return the same deltas under the header's own scale, ``alpha / rank`` in every layer.

    B is multiplied by what a layer's scale is more than that (rsLoRA, patterns of alpha or rank);
    where it is not, the bytes stay. A layer of another rank keeps it.

    Raises:
        DataError: the adapter is a DoRA, which is no delta.
    """
    if manifest.variant == "dora":
        raise _no_delta()
    usual, folded = manifest.alpha / manifest.rank, dict(tensors)
    for layer in manifest.layer_order:
        factor = manifest.scale_of(layer) / usual
        if factor != 1:
            B_OR = tensors[f"{layer}.lora_b"].astype(np.float64) * factor
            folded[f"{layer}.lora_b"] = B_OR.astype(np.float32)
    ours = dict(manifest.mens_exp or {})
    ours.pop("alpha_pattern", None)
    if "variant" in ours:
        ours["variant"] = "lora"
    if ours.get("rank_pattern"):
        ours["scale"] = "header"
    return replace(manifest, mens_exp=ours or None), folded


def _no_delta() -> DataError:
    return DataError(
        "DoRA is no delta: it sets the length of each row of the weight that it changes",
        where="mens_exp.variant",
        found="dora",
        expected="lora or rslora",
        remedy="export it with format=peft, or train with lora.variant=lora",
    )
