"""What the tensors of an adapter must be, given its manifest."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.adapter_v3 import AdapterManifest

__all__ = ["HALVES", "MAGNITUDE", "disagreements", "kind_of"]

_MATRIX_RANK = 2
HALVES = {"lora_a": "[{rank}, in]", "lora_b": "[out, {rank}]"}
MAGNITUDE = "lora_magnitude"


def disagreements(
    manifest: AdapterManifest,
    shapes: Mapping[str, tuple[int, ...]],
    kinds: Mapping[str, str],
    where: str,
) -> list[DataError]:
    """List the tensors that are absent, of no layer, of another type or of another shape.

    Args:
        manifest: what the tensors belong to.
        shapes: of each tensor by name.
        kinds: type of each tensor by name, as safetensors calls it.
        where: the file, for the messages.
    """
    found = [
        DataError("wrong type", where=f"{where}: {name}", found=kind, expected="F32")
        for name, kind in kinds.items()
        if kind != "F32"
    ]
    expected = {f"{layer}.{half}" for layer in manifest.layer_order for half in manifest.parts()}
    for name in sorted(set(shapes) - expected):
        known = expected_name(name, expected)
        found.append(DataError("a tensor of no layer", where=where, found=name, expected=known))
    found += [
        DataError("a tensor is missing", where=where, expected=name)
        for name in sorted(expected - set(shapes))
    ]
    for layer in manifest.layer_order:
        found += _shape_problems(layer, manifest.rank_of(layer), shapes, where)
    return found


def _shape_problems(
    layer: str, rank: int, shapes: Mapping[str, tuple[int, ...]], where: str
) -> list[DataError]:
    found = []
    for axis, (half, form) in enumerate(HALVES.items()):
        name = f"{layer}.{half}"
        shape = shapes.get(name)
        if shape is not None and (len(shape) != _MATRIX_RANK or shape[axis] != rank):
            expected = form.format(rank=rank)
            place = f"{where}: {name}"
            found.append(
                DataError("wrong shape", where=place, found=list(shape), expected=expected)
            )
    magnitude, out = shapes.get(f"{layer}.{MAGNITUDE}"), shapes.get(f"{layer}.lora_b", ())[:1]
    if magnitude is not None and magnitude != out:
        found.append(
            DataError(
                "wrong shape",
                where=f"{where}: {layer}.{MAGNITUDE}",
                found=list(magnitude),
                expected=f"{list(out)}, the rows of lora_b",
            )
        )
    return found


def kind_of(dtype: np.dtype[Any]) -> str:
    """Return safetensors' name of float32, and numpy's of any other type."""
    return "F32" if dtype == np.float32 else str(dtype)
