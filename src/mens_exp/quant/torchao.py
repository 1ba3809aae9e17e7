"""Integers of torchao's weight-only quantization, by the torchao package.

Codes and scales are the package's own, so an adapter is trained against the same weights that other
programs get from torchao's ``quantize_``. The layers are codebook layers.
"""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.model.quiet import quiet
from mens_exp.quant.codebook import Codebook, CodesBinding

if TYPE_CHECKING:
    from collections.abc import Callable


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
