"""Written weights against ``W + s · B A`` in f64, tensor by tensor.

It sees what a text does not: a delta put into one layer the wrong way round, after a few steps, is
far below the noise of bf16 products. And it is all there is where no model can run. The base's
4-bit values are bitsandbytes' own, of a whole weight at once, and the sum is taken in f64; nothing
of the code that writes merges is used.

Shapes: O outputs and I inputs of a projection, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safetensors import safe_open

from mens_exp.artifacts.certificate import TensorError
from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.errors import ModelFileError
from mens_exp.quant.four_bit_rows import DTYPES
from mens_exp.quant.round_trip import round_trip

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch

    from mens_exp.artifacts.quantizer import Quantizer
    from mens_exp.layout.merge_map import Place
    from mens_exp.lora.merge import Delta

__all__ = ["row_lengths", "tensor_errors"]


def tensor_errors(
    written: Mapping[str, Path],
    places: Iterable[Place],
    deltas: Mapping[str, Delta],
    quantizer: Quantizer | None,
) -> dict[str, TensorError]:
    """Compare every tensor that an adapter was to be merged into, one at a time.

    The sum is rounded to the format that was written before it is compared, since that is the best
    that could be written; the error is a share of what the adapter was to change.

    Args:
        written: file of each tensor of the output, by its name there.
        places: where each tensor of the output should come from.
        deltas: of the adapter, by logical name.
        quantizer: what made 4-bit values of the base; None for the published weights.

    Raises:
        ModelFileError: a merged tensor is not there, or of another shape.
    """
    errors = {}
    for place in places:
        if place.logical is None:
            continue
        if place.name not in written:
            raise ModelFileError("a merged tensor is not in the output", found=place.name)
        found_OI, base_OI = _read(written[place.name], place.name), _read(place.shard, place.key)
        if found_OI.shape != base_OI.shape:
            raise ModelFileError(
                "a merged tensor has another shape than its base",
                where=f"{written[place.name]}: {place.name}",
                found=str(list(found_OI.shape)),
                expected=str(list(base_OI.shape)),
            )
        if place.transposed:
            found_OI, base_OI = found_OI.T, base_OI.T
        weight_OI = _base(base_OI, place, deltas[place.logical], quantizer)
        expected_OI = _merged(weight_OI, deltas[place.logical])
        apart_OI = found_OI.double() - expected_OI.to(found_OI.dtype).double()
        changed = float((expected_OI - weight_OI).norm()) or float(weight_OI.norm())
        errors[place.name] = TensorError(
            max_abs=float(apart_OI.abs().max()), relative=float(apart_OI.norm()) / changed
        )
    return errors


def row_lengths(place: Place, delta: Delta, quantizer: Quantizer | None) -> torch.Tensor:
    """Return the length of each row of a weight as an adapter met it, ``[out]``, f64.

    PEFT takes them in the number format of a 4-bit layer's products, and so they are rounded here.

    Args:
        place: of the weight, which an adapter sits on.
        delta: of the adapter.
        quantizer: what made 4-bit values of the base; None for the published weights.
    """
    stored = _read(place.shard, place.key)
    stored_OI = stored.T if place.transposed else stored
    lengths_O: torch.Tensor = _base(stored_OI, place, delta, quantizer).norm(dim=1)
    if quantizer is not None:
        lengths_O = lengths_O.to(DTYPES[quantizer["compute_dtype"]]).double()
    return lengths_O


def _read(path: Path, name: str) -> torch.Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _base(
    stored_OI: torch.Tensor, place: Place, delta: Delta, quantizer: Quantizer | None
) -> torch.Tensor:
    """Return the weight as the adapter met it, f64; without a quantizer, as it was published."""
    if quantizer is None:
        return stored_OI.double()
    if not place.quantized:
        return stored_OI.to(DTYPES[quantizer["compute_dtype"]]).double()
    return _four_bit(stored_OI, delta, quantizer)


def _merged(weight_OI: torch.Tensor, delta: Delta) -> torch.Tensor:
    """Return ``W + s · B A``, f64; in DoRA rows get their lengths (arXiv:2402.09353, eq. 5)."""
    sum_OI = weight_OI + delta.scale * (delta.B_OR.double() @ delta.A_RI.double())
    if delta.magnitude_O is None:
        return sum_OI
    length_O: torch.Tensor = delta.magnitude_O.double() / sum_OI.norm(dim=1)
    return sum_OI * length_O[:, None]


def _four_bit(stored_OI: torch.Tensor, delta: Delta, quantizer: Quantizer) -> torch.Tensor:
    values_OI = stored_OI.double()
    if delta.taken is not None:
        A_RI, B_OR = delta.taken
        values_OI = values_OI - delta.scale * (B_OR.double() @ A_RI.double())
    quant = QuantConfig(
        quant_type=QuantType(quantizer["quant_type"]),
        double_quant=quantizer["double_quant"],
        block_size=quantizer["block_size"],
    )
    rounded_OI = values_OI.float().to(DTYPES[quantizer["rounded_to"]])
    there = round_trip(rounded_OI.contiguous(), quant).values
    return there.to(DTYPES[quantizer["compute_dtype"]]).double()
