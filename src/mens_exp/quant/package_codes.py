"""Codes and scales that another package computes: HQQ and torchao.

HQQ (Half-Quadratic Quantization, https://mobiusml.github.io/hqq_blog) needs no data: for each block
of weights, it optimizes a real-valued zero point under an error that gives outliers less weight.
torchao's integers are those of its weight-only quantization, so an adapter is trained against the
same weights that other programs get from torchao's ``quantize_``. The layers are
:class:`~mens_exp.quant.codebook.CodebookLinear`.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.model.quiet import quiet
from mens_exp.quant.codebook import WITH_ZERO, Affine, Codebook, CodesBinding

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


class _Integers(Codebook):
    """Signed integers, one more below zero than above; the package computes codes and scales."""

    def quantize_pieces(
        self, read: Callable[[int, int], torch.Tensor], shape: tuple[int, int], block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of a weight, read in one piece."""
        with quiet():
            from torchao.quantization import quantize_

            layer = torch.nn.Linear(*shape[::-1], bias=False, device="meta")
            layer.weight = torch.nn.Parameter(read(0, shape[0]), requires_grad=False)
            quantize_(torch.nn.Sequential(layer), self.package_config(block))
        found: Any = layer.weight
        codes_OI = (found.qdata.int() - int(self.levels[0])).to(torch.uint8)
        return self.packed(codes_OI), found.scale.float().reshape(shape[0], -1)

    def package_config(self, block: int) -> Any:
        """Return the package's configuration, with groups of ``block`` weights."""
        from torchao.quantization import IntxWeightOnlyConfig, PerGroup

        int4: torch.dtype = getattr(torch, "int4")  # noqa: B009  # torch's stubs lack it
        return IntxWeightOnlyConfig(weight_dtype=int4, granularity=PerGroup(block))


class _Rows(_Integers):
    """Integers with one scale per row."""

    def package_config(self, block: int) -> Any:
        """Return the package's configuration."""
        from torchao.quantization import Int8WeightOnlyConfig

        del block
        return Int8WeightOnlyConfig()


class _TorchaoCodes(CodesBinding):
    """Layers of torchao's integers."""

    @property
    def library(self) -> str:
        """The package."""
        return f"torchao {metadata.version('torchao')}"


TORCHAO4 = _TorchaoCodes("torchao4", _Integers(levels=tuple(map(float, range(-8, 8)))))
TORCHAO8 = _TorchaoCodes("torchao8", _Rows(levels=tuple(map(float, range(-128, 128)))))
