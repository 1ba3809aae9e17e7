"""The quantization of an adapter's base, as the adapter's manifest records it.

Key `mens_exp.quantizer` of schema v3: enough to make the base's 4-bit values again, bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from mens_exp.artifacts.nearest import expected_name
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Quantizer", "quantizer_problems"]

_KNOWN = {
    "quant_type": ("nf4", "fp4"),
    "compute_dtype": ("bf16", "f32"),
    "rounded_to": ("bf16", "f32"),
}


class Quantizer(TypedDict):
    """The quantizer that made 4-bit values of a base's weights.

    Attributes:
        quant_type: ``nf4`` or ``fp4``.
        block_size: weights that share a scale.
        double_quant: whether the scales are quantized too.
        compute_dtype: ``bf16`` or ``f32``: what values are rounded to before they are used.
        rounded_to: ``bf16`` or ``f32``: what weights were rounded to before they were quantized.
        skip: paths of the projections of decoder layers that were left unquantized.
        library: its name and version.
    """

    quant_type: str
    block_size: int
    double_quant: bool
    compute_dtype: str
    rounded_to: str
    skip: list[str]
    library: str


def quantizer_problems(stored: Mapping[str, Any], where: str) -> list[DataError]:
    """List what is wrong with a record beyond its types.

    Args:
        stored: the record; a value of the wrong type is passed over.
        where: its place, for the messages.
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
    block = stored.get("block_size")
    if type(block) is int and block < 1:
        place = f"{where}.block_size"
        found.append(DataError("wrong value", where=place, found=block, expected="1 or more"))
    return found
