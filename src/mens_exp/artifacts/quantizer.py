"""How the base under an adapter was quantized, as the adapter's manifest records it.

Key `mens_exp.quantizer` of schema v3: enough to make the base's 4-bit values again, bit for bit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from mens_exp.artifacts.nearest import expected_name
from mens_exp.artifacts.typed_json import check_keys
from mens_exp.errors import DataError, Problems

if TYPE_CHECKING:
    from mens_exp.artifacts.adapter_v3 import AdapterManifest

__all__ = ["Quantizer", "quantizer_of"]

_KNOWN = {
    "quant_type": ("nf4", "fp4"),
    "compute_dtype": ("bf16", "f32"),
    "rounded_to": ("bf16", "f32"),
}
_WHERE = "adapter_manifest.json: mens_exp.quantizer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantizer:
    """What made 4-bit values of a base's weights.

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

    def record(self) -> dict[str, Any]:
        """Return it as plain JSON."""
        return asdict(self)


def quantizer_of(manifest: AdapterManifest) -> Quantizer | None:
    """Return what quantized an adapter's base, or None where the manifest does not say.

    Raises:
        DataError: the record breaks a rule.
        Problems: it breaks several.
    """
    stored = (manifest.mens_exp or {}).get("quantizer")
    if stored is None:
        return None
    hints = get_type_hints(Quantizer)
    names = [field.name for field in fields(Quantizer)]
    problems = check_keys(stored, {name: hints[name] for name in names}, names, _WHERE)
    problems += [
        DataError(
            "unknown",
            where=f"{_WHERE}.{name}",
            found=stored[name],
            expected=expected_name(stored[name], known),
        )
        for name, known in _KNOWN.items()
        if isinstance(stored, dict) and isinstance(stored.get(name), str)
        if stored[name] not in known
    ]
    if not problems and stored["block_size"] < 1:
        place = f"{_WHERE}.block_size"
        found = stored["block_size"]
        problems.append(DataError("wrong value", where=place, found=found, expected="1 or more"))
    Problems.raise_if(problems)
    return Quantizer(**stored)
