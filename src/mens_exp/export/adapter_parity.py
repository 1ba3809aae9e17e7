"""Two forms of an adapter against each other: what each adds to every weight, in f64.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mens_exp.artifacts.adapter_tensors import MAGNITUDE
from mens_exp.artifacts.certificate import TensorError
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from mens_exp.artifacts.adapter_v3 import AdapterManifest

    Tensors = Mapping[str, npt.NDArray[np.float32]]

__all__ = ["adapter_errors"]


def adapter_errors(
    manifest: AdapterManifest, tensors: Tensors, after: AdapterManifest, after_tensors: Tensors
) -> dict[str, TensorError]:
    """Compare ``s · B A``, and in DoRA the lengths of rows, layer by layer.

    Args:
        manifest: of the adapter as it was.
        tensors: of the same.
        after: of the form that was written, read back.
        after_tensors: of the same.

    Returns:
        The errors by logical layer, ``….lora_magnitude`` beside them in DoRA.

    Raises:
        DataError: the forms have other layers.
    """
    if set(manifest.layer_order) != set(after.layer_order):
        odd = sorted(set(manifest.layer_order) ^ set(after.layer_order))
        raise DataError("the written adapter has other layers", found=", ".join(odd[:8]))
    errors = {}
    for layer in manifest.layer_order:
        before_OI, after_OI = _delta(manifest, tensors, layer), _delta(after, after_tensors, layer)
        errors[layer] = _error(before_OI, after_OI)
        name = f"{layer}.{MAGNITUDE}"
        if name in tensors or name in after_tensors:
            errors[name] = _error(_values(tensors, name), _values(after_tensors, name))
    return errors


def _delta(manifest: AdapterManifest, tensors: Tensors, layer: str) -> npt.NDArray[np.float64]:
    A_RI, B_OR = _values(tensors, f"{layer}.lora_a"), _values(tensors, f"{layer}.lora_b")
    return manifest.scale_of(layer) * (B_OR @ A_RI)


def _values(tensors: Tensors, name: str) -> npt.NDArray[np.float64]:
    if name not in tensors:
        raise DataError("the two forms have other tensors", found=f"no {name} in one of them")
    return tensors[name].astype(np.float64)


def _error(before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]) -> TensorError:
    if before.shape != after.shape:
        raise DataError(
            "the written adapter has another shape", found=after.shape, expected=str(before.shape)
        )
    apart, size = after - before, float(np.linalg.norm(before))
    return TensorError(
        max_abs=float(np.abs(apart).max()),
        relative=float(np.linalg.norm(apart)) / (size or 1.0),
    )
