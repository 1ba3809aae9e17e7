"""The record of a quantizer in an adapter's manifest, and the levels of a codebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict, cast

import numpy as np

from mens_exp.errors import DataError, expected_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_KNOWN = {
    "compute_dtype": ("bf16", "f32"),
    "rounded_to": ("bf16", "f32"),
}


class _OfCodebook(TypedDict, total=False):
    levels: list[float]


class ModuleQuantizer(_OfCodebook):
    """The quantizer of one module's weight; attributes as in :class:`Quantizer`."""

    quant_type: str
    block_size: int
    double_quant: bool
    library: str


class _OfModules(_OfCodebook, total=False):
    modules: dict[str, ModuleQuantizer]


class Quantizer(_OfModules):
    """The quantizer that produced the values of a base's weights.

    Attributes:
        quant_type: its name, such as ``nf4``.
        block_size: number of weights that share a scale; without meaning for formats that have one
            scale for each row (``int8``, ``torchao8``).
        double_quant: whether the scales are quantized too.
        compute_dtype: ``bf16`` or ``f32``: the dtype to which dequantized values are rounded.
        rounded_to: ``bf16`` or ``f32``: the dtype of the weights when they were quantized.
        skip: paths of the decoder-layer projections that were left unquantized.
        library: name and version of the library.
        levels: the levels of a ``codebook``, ascending.
        modules: the quantizers of modules that have another one, by path.
    """

    quant_type: str
    block_size: int
    double_quant: bool
    compute_dtype: str
    rounded_to: str
    skip: list[str]
    library: str


def quantizer_of(quantizer: Quantizer, path: str) -> Quantizer:
    """Return the quantizer of one module's weight."""
    own = quantizer.get("modules", {}).get(path)
    return quantizer if own is None else cast("Quantizer", quantizer | own)


def levels_in(quantizer: Quantizer) -> list[float]:
    """Return the levels of the codebook that a base or any of its modules has."""
    found = [quantizer, *quantizer.get("modules", {}).values()]
    return next((one["levels"] for one in found if "levels" in one), [])


_FEWEST_LEVELS, _MOST_LEVELS = 2, 256


LEVELS_EXPECTED = "2 to 256 different numbers in ascending order, the largest from 1e-6 to 1e6"


def are_levels(numbers: Sequence[float]) -> bool:
    """Return whether numbers can be the levels of a codebook, which computes with them in f32."""
    levels = np.array(numbers, np.float64).astype(np.float32)
    return (
        _FEWEST_LEVELS <= len(levels) <= _MOST_LEVELS
        and bool((np.diff(levels) > 0).all())  # false for NaN
        and 1e-6 <= float(np.abs(levels).max()) <= 1e6  # noqa: PLR2004  # as the text says
    )


def _level_problems(stored: Mapping[str, Any], where: str) -> list[DataError]:
    levels = stored.get("levels", [])
    numbers = isinstance(levels, list) and all(type(one) in (int, float) for one in levels)
    if "levels" not in stored or not numbers or are_levels(levels):
        return []
    place = f"{where}.levels"
    return [DataError("wrong value", where=place, found=levels, expected=LEVELS_EXPECTED)]


def quantizer_problems(stored: Mapping[str, Any], header: str, where: str) -> list[DataError]:
    """List the problems of a quantizer record beyond its types.

    Args:
        stored: the record; values of the wrong type are skipped.
        header: the name of the quantizer that the header gives.
        where: the location of the record, for messages.
    """
    found = [
        DataError(
            "unknown",
            where=f"{where}.{name}",
            found=stored[name],
            expected=expected_name(stored[name], known),
        )
        for name, known in _KNOWN.items()
        if isinstance(stored.get(name), str) and stored[name] not in known
    ]
    name = stored.get("quant_type")
    if isinstance(name, str) and name != header:
        place, expected = f"{where}.quant_type", f"{header}, as quant.base_quant says"
        found.append(DataError("wrong value", where=place, found=name, expected=expected))
    modules = stored.get("modules")
    records = {where: stored}
    if isinstance(modules, dict):
        records |= {f"{where}.modules.{path}": one for path, one in modules.items()}
    for place, one in records.items():
        found += _level_problems(one, place) if isinstance(one, dict) else []
        block = one.get("block_size") if isinstance(one, dict) else None
        if type(block) is int and block < 1:
            key, expected = f"{place}.block_size", "1 or more"
            found.append(DataError("wrong value", where=key, found=block, expected=expected))
    return found
