"""Half-Quadratic Quantization (https://mobiusml.github.io/hqq_blog), by the hqq package.

It needs no data: for each block of weights, it optimizes a real-valued zero point under an error
that gives outliers less weight. The layers are :class:`~mens_exp.quant.codebook.CodebookLinear`.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

import torch

from mens_exp.quant.codebook import WITH_ZERO, Affine, CodesBinding

if TYPE_CHECKING:
    from collections.abc import Callable


class _HalfQuadratic(Affine):
    """Unsigned integers; the package computes scales and zero points."""

    def quantize_pieces(
        self, read: Callable[[int, int], torch.Tensor], shape: tuple[int, int], block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of a weight, read in one piece."""
        from hqq.core.quantize import Quantizer

        weight_OI = read(0, shape[0]).float()
        codes, found = Quantizer.quantize(
            weight_OI,
            nbits=(len(self.levels) - 1).bit_length(),
            group_size=block,
            axis=1,
            bitpack=False,
            device=str(weight_OI.device),
        )
        scales = torch.stack([found["scale"], found["zero"]], -1).float()
        return self.packed(codes.to(torch.uint8).view(shape)), scales.view(shape[0], -1, 2)


class _HqqCodes(CodesBinding):
    """Layers of HQQ."""

    def __init__(self, bits: int) -> None:
        """Bind HQQ with a number of bits."""
        levels = tuple(map(float, range(2**bits)))
        super().__init__(f"hqq{bits}", _HalfQuadratic(levels=levels, scaling=WITH_ZERO))

    @property
    def library(self) -> str:
        """The package."""
        return f"hqq {metadata.version('hqq')}"


HQQ2, HQQ3, HQQ4, HQQ8 = (_HqqCodes(bits) for bits in (2, 3, 4, 8))
