"""A weight quantized to 4 bits by bitsandbytes and taken back: what a 4-bit layer computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    import torch

    from mens_exp.config.quant import QuantConfig

__all__ = ["RoundTrip", "round_trip"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundTrip:
    """A weight after quantization and back.

    Attributes:
        values: in the weight's shape, f32.
        stored_bytes: of the codes and their scales.
    """

    values: torch.Tensor
    stored_bytes: int


def round_trip(weight: torch.Tensor, quant: QuantConfig) -> RoundTrip:
    """Quantize a weight and take it back, on the device that it is on.

    Args:
        weight: f32, its last dimension a multiple of the block, which bitsandbytes needs.
        quant: the `quant` group.
    """
    with quiet():
        from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    codes, state = quantize_4bit(
        weight.contiguous(),
        blocksize=quant.block,
        compress_statistics=quant.double_quant,
        quant_type=quant.quant_type.value,
    )
    stored = [codes, state.absmax]
    if state.nested:
        stored += [state.state2.absmax, state.offset]
    return RoundTrip(
        values=dequantize_4bit(codes, state),
        stored_bytes=sum(part.numel() * part.element_size() for part in stored),
    )
