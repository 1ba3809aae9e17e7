"""Quantize a weight to 4 bits and back, whole or in blocks of rows, and measure the error.

In blocks of rows, the values are bit-for-bit those that bitsandbytes computes from the whole weight
at once. Blocks of 4-bit codes are independent of each other; their scales, which double
quantization couples, are quantized together. bitsandbytes needs sixteen bytes per weight for this;
this code needs half a byte, plus one piece.

Shapes: O outputs and I inputs of a projection, N rows of a piece, or tokens of a batch of inputs.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mens_exp.config.quant import QUANTIZERS, QuantConfig, QuantType
from mens_exp.errors import RequestError
from mens_exp.model.quiet import quiet
from mens_exp.quant.binding import DTYPES, RoundTrip, binding_of, compute_dtype
from mens_exp.quant.codebook import NestedScales

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mens_exp.artifacts.quantizer_record import Quantizer


def round_trip(weight: torch.Tensor, quant: QuantConfig) -> RoundTrip:
    """Quantize and dequantize a weight, on its own device.

    Args:
        weight: f32; its last dimension is a multiple of the block.
        quant: the `quant` group, of a quantizer that has a round trip.
    """
    return binding_of(quant.spec).round_trip(weight, quant)


_PIECE = 1 << 20  # weights quantized at once: 4 MB of f32, which fits the processor's cache


def quantized_rows(
    read: Callable[[int, int], torch.Tensor],
    shape: tuple[int, int],
    quantizer: Quantizer,
    *,
    where: str,
) -> Callable[[int, int], torch.Tensor]:
    """Quantize a weight and return a reader of its dequantized rows, f32 ``[N, I]``.

    Args:
        read: returns rows ``first`` to ``last`` (exclusive) of the weight, ``[N, I]``.
        shape: ``(O, I)``.
        quantizer: the quantizer of the base.
        where: name of the weight, for messages.

    Raises:
        RequestError: blocks would extend across row boundaries.
    """
    _, width = shape
    block = quantizer["block_size"]
    if width % block:
        raise RequestError(
            "the width is not a multiple of the quantizer's block",
            where=where,
            found=width,
            expected=f"a multiple of {block}",
            remedy="add merge.base=original",
        )
    return binding_of(QUANTIZERS.named(quantizer["quant_type"])).rows(read, shape, quantizer)


class FourBitRows:
    """A weight in 4-bit codes and f32 scales, whose rows are dequantized on demand."""

    def __init__(
        self,
        read: Callable[[int, int], torch.Tensor],
        shape: tuple[int, int],
        quantizer: Quantizer,
    ) -> None:
        """Quantize a weight.

        Args:
            read: returns rows ``first`` to ``last`` (exclusive) of the weight, ``[N, I]``.
            shape: ``(O, I)``; blocks divide the width.
            quantizer: the quantizer of the base.
        """
        with quiet():
            from bitsandbytes import functional
        outputs, self._width = shape
        self._quantizer, self._block = quantizer, quantizer["block_size"]
        self._dtype = DTYPES[quantizer["rounded_to"]]
        self._codes = torch.empty(outputs * self._width // 2, dtype=torch.uint8)
        scales = torch.empty(outputs * self._width // self._block)
        step = max(1, _PIECE // self._width)
        for first in range(0, outputs, step):
            last = min(first + step, outputs)
            codes, state = functional.quantize_4bit(
                read(first, last).to(self._dtype).contiguous(),
                blocksize=self._block,
                quant_type=quantizer["quant_type"],
            )
            self._codes[self._halves(first, last)] = codes.flatten()
            scales[self._blocks(first, last)] = state.absmax
        if quantizer["double_quant"]:
            scales = NestedScales.of(scales).values()
        self._scales = scales

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return dequantized rows of the weight, f32 ``[N, I]``, rounded to the compute dtype."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        state = QuantState(
            absmax=self._scales[self._blocks(first, last)],
            shape=(last - first, self._width),
            dtype=self._dtype,
            blocksize=self._block,
            quant_type=self._quantizer["quant_type"],
        )
        codes = self._codes[self._halves(first, last)].unsqueeze(1)
        out_NI: torch.Tensor = dequantize_4bit(codes, state)
        return out_NI.to(DTYPES[self._quantizer["compute_dtype"]]).float()

    def _halves(self, first: int, last: int) -> slice:
        return slice(first * self._width // 2, last * self._width // 2)

    def _blocks(self, first: int, last: int) -> slice:
        return slice(first * self._width // self._block, last * self._width // self._block)


_OTHER = {QuantType.nf4: QuantType.fp4, QuantType.fp4: QuantType.nf4}


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A quantization variant, under its name in records (``nf4_double``, ``fp4``)."""

    name: str
    quant: QuantConfig


def variants_of(quant: QuantConfig) -> tuple[Variant, ...]:
    """Return the configured variant, the one with double_quant flipped, and the other 4-bit type.

    Args:
        quant: the `quant` group. For a quantizer other than NF4 and FP4, the only other variant is
            NF4 with double quantization.
    """
    if quant.quant_type not in _OTHER:
        usual = QuantConfig(compute_dtype=quant.compute_dtype, skip=quant.skip)
        return tuple(map(variant_of, (quant, usual)))
    flipped = dataclasses.replace(quant, double_quant=not quant.double_quant)
    other = dataclasses.replace(quant, quant_type=_OTHER[quant.quant_type])
    return tuple(map(variant_of, (quant, flipped, other)))


def variant_of(quant: QuantConfig) -> Variant:
    """Return the variant of a `quant` group, with its name."""
    name = f"{quant.quant_type.value}{'_double' if quant.double_quant else ''}"
    return Variant(name=name, quant=quant)


def stored_as(weight_OI: torch.Tensor, quant: QuantConfig) -> RoundTrip:
    """Return the values that a quantized layer of the model computes with, f32.

    The loader rounds weights to the compute dtype before it quantizes them, and a layer
    dequantizes to that dtype.

    Args:
        weight_OI: f32.
        quant: the `quant` group.
    """
    dtype = compute_dtype(quant)
    made = round_trip(weight_OI.to(dtype).float(), quant)
    return dataclasses.replace(made, values=made.values.to(dtype).float())


def sqnr_db(weight_OI: torch.Tensor, stored_OI: torch.Tensor) -> float | None:
    """Return ``10 log10(‖W‖² / ‖W−Ŵ‖²)``, in dB; None if either is zero. Sums are in f64."""
    signal, noise = _energy(weight_OI), _energy(weight_OI - stored_OI)
    return 10 * math.log10(signal / noise) if signal and noise else None


def activation_error(
    weight_OI: torch.Tensor, stored_OI: torch.Tensor, inputs_NI: Iterable[torch.Tensor]
) -> float | None:
    """Return ``‖(W−Ŵ)X‖² / ‖WX‖²`` over the tokens of all batches; None if WX is zero."""
    lost_OI = weight_OI - stored_OI
    signal = noise = 0.0
    for x_NI in inputs_NI:
        signal += _energy(torch.nn.functional.linear(x_NI, weight_OI))
        noise += _energy(torch.nn.functional.linear(x_NI, lost_OI))
    return noise / signal if signal else None


def _energy(values: torch.Tensor) -> float:
    return float(values.double().square().sum())
