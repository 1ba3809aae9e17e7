"""Four-bit quantization in plain torch: an independent reference for what bitsandbytes stores.

A tensor is cut, flattened, into blocks; each is divided by its largest magnitude and every weight
takes the nearest of 16 levels. Double quantization stores those magnitudes, less their mean, as
8-bit codes in blocks of 256 (QLoRA, arXiv:2305.14314, section 3).

Shapes: N weights, K blocks of them, S blocks of 256 magnitudes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = [
    "BLOCK_SIZES",
    "CPU_SCALE_GRID",
    "FP4_LEVELS",
    "NF4_LEVELS",
    "FourBit",
    "dynamic_levels",
    "quantize",
]

# arXiv:2305.14314, appendix E: quantiles of N(0, 1), normalized to [-1, 1], including zero.
NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
# Sign, two exponent bits and one mantissa bit, normalized by the largest: bitsandbytes' 4-bit
# float. A code's upper bit is its sign; -0 is never chosen, as 0 comes first.
_FP4_MAGNITUDES = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4_LEVELS = (*_FP4_MAGNITUDES, *(-level for level in _FP4_MAGNITUDES))
BLOCK_SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
_SCALE_BLOCK = 256
# measured: bitsandbytes 0.50.2's CPU kernel gives all of 512,000 drawn values the code of the
# nearest of this many evenly spaced points in [-1, 1]; 1 code in 1,000 is then not the nearest
CPU_SCALE_GRID = 65536
_SMALLEST = 1e-38  # used as the magnitude of a block of zeros


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBit:
    """A quantized tensor.

    Attributes:
        codes_N: uint8, 0 to 15.
        levels: f32 ``[16]``.
        shape: of the tensor.
        block_size: weights that share a magnitude.
        scales_K: f32 magnitudes; uint8 codes of them under double quantization.
        scale_scales_S: f32, magnitudes of the magnitudes; None without double quantization.
        offset: f32 scalar, mean of the magnitudes; None likewise.
    """

    codes_N: torch.Tensor
    levels: torch.Tensor
    shape: torch.Size
    block_size: int
    scales_K: torch.Tensor
    scale_scales_S: torch.Tensor | None
    offset: torch.Tensor | None

    def packed(self) -> torch.Tensor:
        """Return two codes per byte, the first in the upper half, ``[ceil(N / 2)]``."""
        pairs = torch.nn.functional.pad(self.codes_N, (0, self.codes_N.numel() % 2))
        return (pairs[0::2] << 4) | pairs[1::2]

    def magnitudes(self) -> torch.Tensor:
        """Return the magnitude of each block as used in dequantization, float32 ``[K]``."""
        if self.scale_scales_S is None or self.offset is None:
            return self.scales_K
        coarse = dynamic_levels()[self.scales_K.long()]
        spread = self.scale_scales_S.repeat_interleave(_SCALE_BLOCK)[: coarse.numel()]
        return coarse * spread + self.offset

    def dequantize(self) -> torch.Tensor:
        """Return the dequantized weights, float32 in the tensor's shape."""
        spread = self.magnitudes().repeat_interleave(self.block_size)[: self.codes_N.numel()]
        return (self.levels[self.codes_N.long()] * spread).view(self.shape)

    def bits_per_parameter(self) -> float:
        """Return the bits stored for this tensor, divided by its number of weights."""
        stored = [self.packed(), self.scales_K, self.scale_scales_S, self.offset]
        size = sum(part.numel() * part.element_size() for part in stored if part is not None)
        return 8 * size / self.codes_N.numel()


def quantize(
    weight: torch.Tensor,
    *,
    levels: tuple[float, ...] = NF4_LEVELS,
    block_size: int = 64,
    double_quant: bool = False,
    scale_grid: int | None = CPU_SCALE_GRID,
) -> FourBit:
    """Quantize a tensor to four bits; ties go to the lower level.

    Args:
        weight: any shape; computed in f32.
        levels: the 16 levels in the order of their codes.
        block_size: weights that share a magnitude, one of :data:`BLOCK_SIZES`.
        double_quant: store the magnitudes in 8 bits too.
        scale_grid: points that a normalized magnitude is rounded to before its nearest level is
            looked up, as bitsandbytes' CPU kernel does; None takes the nearest level itself.
    """
    assert block_size in BLOCK_SIZES
    table = torch.tensor(levels, dtype=torch.float32)
    blocks, count = _blocks(weight, block_size), weight.numel()
    magnitudes_K = blocks.abs().amax(1)
    codes_N = _nearest(_normalized(blocks, magnitudes_K), table).view(-1)[:count]
    scales_K, scale_scales_S, offset = magnitudes_K, None, None
    if double_quant:
        offset = magnitudes_K.mean()
        spread = _blocks(magnitudes_K - offset, _SCALE_BLOCK)
        scale_scales_S = spread.abs().amax(1)
        scales_K = _scale_codes(spread, scale_scales_S, grid=scale_grid).view(-1)
        scales_K = scales_K[: magnitudes_K.numel()]
    return FourBit(
        codes_N=codes_N,
        levels=table,
        shape=weight.shape,
        block_size=block_size,
        scales_K=scales_K,
        scale_scales_S=scale_scales_S,
        offset=offset,
    )


def _scale_codes(
    spread: torch.Tensor, magnitudes: torch.Tensor, *, grid: int | None
) -> torch.Tensor:
    """Return the 8-bit codes of magnitudes, uint8 in their shape."""
    values = _normalized(spread, magnitudes)
    if grid is None:
        return _nearest(values, dynamic_levels())
    last = grid - 1
    points = ((values + 1) * 0.5 * last + 0.5).floor() * 2 / last - 1
    codes = _nearest(points, dynamic_levels())
    return codes.masked_fill(magnitudes[:, None] == 0, 0)  # as the kernel does for such a block


def _blocks(values: torch.Tensor, size: int) -> torch.Tensor:
    """Return ``[blocks, size]`` with the last block padded."""
    flat = values.detach().reshape(-1).to(torch.float32)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)


def _normalized(blocks: torch.Tensor, magnitudes: torch.Tensor) -> torch.Tensor:
    """Multiply with the reciprocal, as the kernels do, since the last bit depends on it."""
    return (blocks * (1.0 / magnitudes.clamp(min=_SMALLEST))[:, None]).clamp(-1, 1)


def _nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Return the code of the nearest level, uint8."""
    ordered, codes = levels.sort(stable=True)
    midpoints = (ordered[:-1] + ordered[1:]) / 2
    place = torch.bucketize(values.reshape(-1), midpoints)  # a midpoint goes to the lower level
    return codes[place].to(torch.uint8).view(values.shape)


def dynamic_levels() -> torch.Tensor:
    """Return the 256 levels of the signed dynamic 8-bit type, f32 in ascending order.

    Seven decades of exponent; in decade ``e`` lie the means of ``2**e`` equal parts of
    ``[0.1, 1]``; with both signs, zero and one (arXiv:2110.02861, section 2.1).
    """
    positive = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, dtype=torch.float32)
        means = (edges[:-1] + edges[1:]) / 2
        positive += (math.pow(10, decade - 6) * means).tolist()
    return torch.tensor(sorted([*positive, *(-x for x in positive), 0.0, 1.0]))
