"""Quantized values of a module's weight, and their distance from the original.

Shapes: O outputs and I inputs of a module, N tokens.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mens_exp.config.quant import QuantConfig, QuantType
from mens_exp.quant.bnb import compute_dtype
from mens_exp.quant.round_trip import RoundTrip, round_trip

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Variant", "activation_error", "sqnr_db", "stored_as", "variants_of"]

_OTHER = {QuantType.nf4: QuantType.fp4, QuantType.fp4: QuantType.nf4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One way to quantize, under the name that records have for it (``nf4_double``, ``fp4``)."""

    name: str
    quant: QuantConfig


def variants_of(quant: QuantConfig) -> tuple[Variant, ...]:
    """Return the configured way, the same with the other double_quant, and the other 4-bit type.

    Args:
        quant: the `quant` group, nf4 or fp4.
    """
    flipped = dataclasses.replace(quant, double_quant=not quant.double_quant)
    other = dataclasses.replace(quant, quant_type=_OTHER[quant.quant_type])
    return tuple(
        Variant(name=f"{one.quant_type.value}{'_double' if one.double_quant else ''}", quant=one)
        for one in (quant, flipped, other)
    )


def stored_as(weight_OI: torch.Tensor, quant: QuantConfig) -> RoundTrip:
    """Return what a 4-bit layer of the model computes with instead of a weight, f32.

    The loader rounds weights to the compute format before it quantizes them, and a layer
    dequantizes to that format.

    Args:
        weight_OI: f32.
        quant: the `quant` group, nf4 or fp4.
    """
    dtype = compute_dtype(quant)
    made = round_trip(weight_OI.to(dtype).float(), quant)
    return dataclasses.replace(made, values=made.values.to(dtype).float())


def sqnr_db(weight_OI: torch.Tensor, stored_OI: torch.Tensor) -> float | None:
    """Return ``10 log10(‖W‖² / ‖W−Ŵ‖²)``, in dB; None where either is zero. Sums are f64."""
    signal, noise = _energy(weight_OI), _energy(weight_OI - stored_OI)
    return 10 * math.log10(signal / noise) if signal and noise else None


def activation_error(
    weight_OI: torch.Tensor, stored_OI: torch.Tensor, inputs_NI: Iterable[torch.Tensor]
) -> float | None:
    """Return ``‖(W−Ŵ)X‖² / ‖WX‖²`` over the tokens of all batches; None where WX is zero."""
    lost_OI = weight_OI - stored_OI
    signal = noise = 0.0
    for x_NI in inputs_NI:
        signal += _energy(torch.nn.functional.linear(x_NI, weight_OI))
        noise += _energy(torch.nn.functional.linear(x_NI, lost_OI))
    return noise / signal if signal else None


def _energy(values: torch.Tensor) -> float:
    return float(values.double().square().sum())
