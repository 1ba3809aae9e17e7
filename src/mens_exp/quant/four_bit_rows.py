"""The 4-bit values that stand for a weight, a block of rows at a time.

The same values, bit for bit, as bitsandbytes makes of the whole weight at once: a block of 4-bit
codes knows nothing of the next one, and the scales, which do under double quantization, are
quantized together. Its own way holds sixteen bytes for each weight meanwhile; this holds half a
byte, and a piece.

Shapes: O outputs and I inputs of a projection, N rows of a piece.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from mens_exp.errors import RequestError
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.artifacts.quantizer import Quantizer

__all__ = ["DTYPES", "FourBitRows"]

DTYPES = {"bf16": torch.bfloat16, "f32": torch.float32}
_PIECE = 1 << 20  # weights quantized at once: 4 MB of f32, near the processor
_SCALES_BLOCK = 256  # bitsandbytes' own block of scales under double quantization


class FourBitRows:
    """Half a byte for each weight, and its scales; rows come back on demand."""

    def __init__(
        self,
        read: Callable[[int, int], torch.Tensor],
        shape: tuple[int, int],
        quantizer: Quantizer,
        *,
        where: str,
    ) -> None:
        """Quantize a weight.

        Args:
            read: gives rows ``first`` to ``last`` of the weight, the last one excluded, ``[N, I]``.
            shape: ``(O, I)``.
            quantizer: what quantized the base.
            where: name of the weight, for messages.

        Raises:
            RequestError: blocks would run over the ends of rows.
        """
        with quiet():
            from bitsandbytes import functional
        outputs, self._width = shape
        self._quantizer, self._block = quantizer, quantizer["block_size"]
        if self._width % self._block:
            raise RequestError(
                "the width is no multiple of the quantizer's block",
                where=where,
                found=self._width,
                expected=f"a multiple of {self._block}",
                remedy="add merge.base=original",
            )
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
            offset = scales.mean()
            small, state = functional.quantize_blockwise(scales - offset, blocksize=_SCALES_BLOCK)
            scales = functional.dequantize_blockwise(small, state)
            scales += offset
        self._scales = scales

    def read(self, first: int, last: int) -> torch.Tensor:
        """Return what rows of the weight stand for, f32 ``[N, I]``, rounded as it is computed."""
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
