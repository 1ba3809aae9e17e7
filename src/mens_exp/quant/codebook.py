"""Weights as codes into a list of levels, with a scale for each block, in plain torch.

NormalFloat of k bits (QLoRA, arXiv:2305.14314, section 3), symmetric integers, integers with a zero
point (arXiv:1712.05877, section 2.1), and the 4-bit floats of OCP's microscaling formats (MXFP4,
v1.0, sections 5.3 and 6.3) and of NVIDIA (NVFP4: blocks of 16, scales in E4M3 and one f32 scale per
tensor). They run on every torch device, as a reference; dedicated kernels are faster.

Shapes: O outputs and I inputs of a layer, N blocks of a row, C codes per byte.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Final

import torch

from mens_exp.config.quant import NESTED_BLOCK
from mens_exp.model.offload import codes_of
from mens_exp.model.quiet import quiet
from mens_exp.model.stored_codes import E2M1_MAGNITUDES
from mens_exp.quant.binding import DTYPES, Binding, RoundTrip, as_linear

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from mens_exp.artifacts.quantizer_record import Quantizer
    from mens_exp.config.quant import QuantConfig

_E2M1_EXPONENT: Final = 2  # exponent of the largest level, 1.5 · 2²
_MOST_E4M3: Final = 448.0
_LEAST_E4M3: Final = 2.0**-9  # the smallest above zero
_BITS_OF_BYTE: Final = 8
_BITS_OF_WORD: Final = 12  # of three bytes, two words: whole codes of three and of six bits
_TOGETHER: Final = 8  # codes that take whole bytes, however many bits each has
_PIECE: Final = 1 << 20  # weights processed at once, at about 40 bytes of memory each


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """A rule that computes the scales of blocks; they are stored in f32, whatever their format.

    Attributes:
        name: the format, in records.
        find: returns scales, f32 ``[..., N]``, from the largest magnitude of each block, the
            largest magnitude of the whole tensor, and the largest level.
    """

    name: str
    find: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]


def _by_magnitude(most_N: torch.Tensor, of_all: torch.Tensor, top: float) -> torch.Tensor:
    del of_all
    return most_N / top


def _power_of_two(most_N: torch.Tensor, of_all: torch.Tensor, top: float) -> torch.Tensor:
    """Return 2 to the power of a block's exponent minus the exponent of the largest level."""
    del of_all, top
    _, exponent_N = torch.frexp(most_N)  # the mantissa is in [0.5, 1)
    power_N = (exponent_N - 1 - _E2M1_EXPONENT).clamp(-127, 127)
    return torch.ldexp(torch.ones_like(most_N), power_N)


def _e4m3(most_N: torch.Tensor, of_all: torch.Tensor, top: float) -> torch.Tensor:
    """Return scales in E4M3, times one scale of the tensor that lets them use E4M3's range."""
    of_tensor = of_all / (top * _MOST_E4M3)
    relative_N = (most_N / top / of_tensor).clamp(_LEAST_E4M3, _MOST_E4M3)
    return relative_N.to(torch.float8_e4m3fn).float() * of_tensor


MAGNITUDE = Scaling(name="f32", find=_by_magnitude)
POWER_OF_TWO = Scaling(name="e8m0", find=_power_of_two)
WITH_ZERO = Scaling(name="f32, and a zero point", find=_by_magnitude)
TWO_LEVEL = Scaling(name="e4m3, and f32 of the tensor", find=_e4m3)


@dataclass(frozen=True, kw_only=True)
class Codebook:
    """A list of levels and the rule for their scales.

    Attributes:
        levels: ascending; a weight is a level times its block's scale.
        scaling: the rule for the blocks' scales.
        to_even: whether a value halfway between two levels rounds to the one an even number of
            steps from the level zero, as in IEEE 754; otherwise to the lower one, as in
            bitsandbytes.
    """

    levels: tuple[float, ...]
    scaling: Scaling = MAGNITUDE
    to_even: bool = True

    @property
    def stored_bits(self) -> int:
        """Bits per code: as few as number the levels."""
        return max(1, (len(self.levels) - 1).bit_length())

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Return the index of the level nearest to each value, int64."""
        levels = torch.tensor(self.levels, dtype=torch.float32, device=x.device)
        between = (levels[1:] + levels[:-1]) / 2
        lower = torch.bucketize(x, between)
        if not self.to_even:
            return lower
        upper = torch.bucketize(x, between, right=True)
        zero = self.levels.index(0.0)
        return torch.where((lower - zero) % 2 == 0, lower, upper)

    def quantize(self, weight_OI: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of a weight; see :meth:`quantize_pieces`."""
        rows, width = weight_OI.shape
        return self.quantize_pieces(lambda first, last: weight_OI[first:last], (rows, width), block)

    def quantize_pieces(
        self, read: Callable[[int, int], torch.Tensor], shape: tuple[int, int], block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes and scales of a weight that is read twice, piece by piece.

        Args:
            read: returns rows ``first`` to ``last`` (exclusive) of the weight.
            shape: ``(O, I)``; ``block`` divides I.
            block: weights that share a scale.

        Returns:
            Codes packed into bytes, uint8 ``[O, I / C]``, the first in the highest bits, and
            scales, f32 ``[O, N]``; with zero points, ``[O, N, 2]``.
        """
        pieces = _pieces(*shape)
        of_all = torch.stack([read(*one).abs().amax() for one in pieces]).amax().float()
        made = [self._quantized(read(*one), of_all, block) for one in pieces]
        codes, scales = zip(*made, strict=True)
        return torch.cat(codes), torch.cat(scales)

    def _quantized(
        self, weight_OI: torch.Tensor, of_all: torch.Tensor, block: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        codes, scales_ON = self.coded(weight_OI.float().reshape(len(weight_OI), -1, block), of_all)
        return self.packed(codes.flatten(1).to(torch.uint8)), scales_ON

    def packed(self, codes_OI: torch.Tensor) -> torch.Tensor:
        """Pack codes into bytes, uint8 ``[O, I / C]``, the first in the highest bits.

        Where a byte does not hold whole codes, eight codes are packed together, so I must be a
        multiple of 8.
        """
        bits = self.stored_bits
        if _BITS_OF_BYTE % bits:
            number = _joined(codes_OI.long(), _TOGETHER, bits)
            parts = [number >> _BITS_OF_BYTE * place for place in reversed(range(bits))]
            return torch.stack(parts, -1).flatten(1).to(torch.uint8)
        return _joined(codes_OI, _BITS_OF_BYTE // bits, bits)

    def coded(
        self, blocks: torch.Tensor, of_all: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of blocks ``[O, N, block]``, int64, and their scales.

        Args:
            blocks: weights, f32.
            of_all: the largest magnitude of the whole tensor.
        """
        most_ON = blocks.abs().amax(-1)
        top = max(map(abs, self.levels))
        scales_ON = torch.where(most_ON > 0, self.scaling.find(most_ON, of_all, top), 0)
        divisor_ON = torch.where(most_ON > 0, scales_ON, 1)
        return self.nearest(blocks / divisor_ON[..., None]), scales_ON

    def valued(self, levels: torch.Tensor, scales_ON: torch.Tensor) -> torch.Tensor:
        """Return the values of levels ``[O, N, block]`` under the scales of their blocks."""
        return levels * scales_ON[..., None]

    def unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Unpack bytes into codes, uint8 ``[O, I]``."""
        words, size = self._words(packed)
        return _codes_of_words(words, size, self.stored_bits).flatten(1).to(torch.uint8)

    def _words(self, packed: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the shortest words that hold whole codes, and their size in bits."""
        bits = self.stored_bits
        if _BITS_OF_BYTE % bits == 0:
            return packed, _BITS_OF_BYTE
        if _BITS_OF_WORD % bits == 0:
            number = _joined(packed.int(), 3, _BITS_OF_BYTE)
            parts = [number >> _BITS_OF_WORD, number & ((1 << _BITS_OF_WORD) - 1)]
            return torch.stack(parts, -1).flatten(1), _BITS_OF_WORD
        return _joined(packed.long(), bits, _BITS_OF_BYTE), _BITS_OF_BYTE * bits

    def _levels_of(self, packed: torch.Tensor) -> torch.Tensor:
        """Return the levels of codes, f32; from a table of all words if words are short."""
        words, size = self._words(packed)
        if size <= _BITS_OF_WORD:
            return _looked_up(_levels_of_words(self, size, packed.device), words)
        levels = torch.tensor(self.levels, dtype=torch.float32, device=packed.device)
        codes = _codes_of_words(words, size, self.stored_bits)
        return levels[codes.clamp(max=len(levels) - 1)]

    def dequantize(
        self,
        packed: torch.Tensor,
        scales_ON: torch.Tensor,
        dtype: torch.dtype = torch.float32,
    ) -> torch.Tensor:
        """Return dequantized values, ``[O, I]``, computed in f32 and rounded to a dtype."""
        rows, bytes_of_row = packed.shape
        width = bytes_of_row * _BITS_OF_BYTE // self.stored_bits
        values_OI = torch.empty((rows, width), dtype=dtype, device=packed.device)
        for first, last in _pieces(rows, width):
            scales = scales_ON[first:last]
            levels = self._levels_of(packed[first:last])
            piece = self.valued(levels.reshape(*scales.shape[:2], -1), scales)
            values_OI[first:last] = piece.flatten(1)
        return values_OI


@dataclass(frozen=True, kw_only=True)
class Affine(Codebook):
    """Unsigned integers; each block has a scale and a zero point, the integer that encodes zero.

    The scales are f32 ``[O, N, 2]``: a scale and a zero point. A block's range includes zero.
    """

    def coded(
        self, blocks: torch.Tensor, of_all: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes of blocks, and their scales and zero points."""
        del of_all
        top = self.levels[-1]
        low_ON, high_ON = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
        scale_ON = (high_ON - low_ON) / top
        scale_ON = torch.where(scale_ON > 0, scale_ON, torch.ones_like(scale_ON))
        zero_ON = (-torch.round(low_ON / scale_ON)).clamp(0, top)
        steps = torch.round(blocks * (1 / scale_ON)[..., None]) + zero_ON[..., None]
        return steps.clamp(0, top).long(), torch.stack([scale_ON, zero_ON], -1)

    def valued(self, levels: torch.Tensor, scales_ON: torch.Tensor) -> torch.Tensor:
        """Return the values of integers under the scales and zero points of their blocks."""
        scale_ON, zero_ON = scales_ON.unbind(-1)
        return (levels - zero_ON[..., None]) * scale_ON[..., None]


@dataclass(frozen=True, kw_only=True, slots=True)
class NestedScales:
    """Scales quantized by bitsandbytes' double quantization (arXiv:2305.14314, section 3).

    Attributes:
        codes_ON: 8-bit codes, uint8.
        nested: f32 scales, one per 256 codes in row-major order, and then the offset: the mean
            of the scales, subtracted before they were quantized.
    """

    codes_ON: torch.Tensor
    nested: torch.Tensor

    @classmethod
    def of(cls, scales_ON: torch.Tensor) -> NestedScales:
        """Quantize f32 scales of any shape."""
        with quiet():
            from bitsandbytes import functional
        offset = scales_ON.mean()
        codes, state = functional.quantize_blockwise(scales_ON - offset, blocksize=NESTED_BLOCK)
        return cls(codes_ON=codes, nested=torch.cat([state.absmax, offset[None]]))

    def values(self) -> torch.Tensor:
        """Return the scales, f32."""
        from bitsandbytes import functional

        found: torch.Tensor = functional.dequantize_blockwise(
            self.codes_ON, absmax=self.nested[:-1], blocksize=NESTED_BLOCK
        )
        return found + self.nested[-1]

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.codes_ON.nbytes + self.nested.nbytes


def _pieces(rows: int, width: int) -> list[tuple[int, int]]:
    """Return the first and last row (exclusive) of each piece."""
    step = max(1, _PIECE // width)
    return [(first, min(first + step, rows)) for first in range(0, rows, step)]


def _joined(parts_OI: torch.Tensor, count: int, bits: int) -> torch.Tensor:
    """Join every ``count`` numbers of ``bits`` bits to one, the first in the highest bits."""
    together = parts_OI.reshape(len(parts_OI), -1, count)
    number = together[..., 0]
    for place in range(1, count):
        number = (number << bits) | together[..., place]
    return number


def _codes_of_words(words: torch.Tensor, size: int, bits: int) -> torch.Tensor:
    """Split words of ``size`` bits into codes, the first in the highest bits."""
    shifts = range(size - bits, -1, -bits)
    return torch.stack([(words >> shift) & (2**bits - 1) for shift in shifts], -1)


def _looked_up(table: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Look up the levels of words; with one code per word, ``index_select`` is faster."""
    if table.shape[1] == 1:
        return table[:, 0].index_select(0, words.flatten().long())
    return torch.nn.functional.embedding(words.int(), table)


@functools.lru_cache(maxsize=16)
def _levels_of_words(book: Codebook, size: int, device: torch.device) -> torch.Tensor:
    """Return the levels of the codes in every word of ``size`` bits, f32 ``[2^size, C]``."""
    with torch.inference_mode(mode=False):  # a step may use it later
        levels = torch.tensor(book.levels, dtype=torch.float32)
        codes = _codes_of_words(torch.arange(1 << size), size, book.stored_bits)
        # No word holds a code beyond the last one.
        return levels[codes.clamp(max=len(levels) - 1)].to(device)


def normal_float(bits: int) -> tuple[float, ...]:
    """Return the levels of NormalFloat: quantiles of a normal distribution, zero among them.

    They are spaced evenly in probability on either side of zero, with one more above it, and
    divided by the largest. The outermost probability is the mean of ``1 - 1 / (2 (2^k - 1))`` and
    ``1 - 1 / (2 2^k)``, as in bitsandbytes for four bits.
    """
    outermost = 1 - (1 / (2 * (2**bits - 1)) + 1 / (2 * 2**bits)) / 2
    half = 2 ** (bits - 1)
    quantile = NormalDist().inv_cdf
    above, below = (
        [quantile(0.5 + (outermost - 0.5) * (number / many)) for number in range(1, many + 1)]
        for many in (half, half - 1)
    )
    levels = [*(-one for one in reversed(below)), 0.0, *above]
    return tuple(level / above[-1] for level in levels)


def integers(bits: int) -> tuple[float, ...]:
    """Return the levels of symmetric integers, from -1 to 1: one code of 2^k is never used."""
    most = 2 ** (bits - 1) - 1
    return tuple(number / most for number in range(-most, most + 1))


def _unsigned(bits: int) -> Affine:
    return Affine(levels=tuple(map(float, range(2**bits))), scaling=WITH_ZERO)


E2M1: Final = tuple(-one for one in E2M1_MAGNITUDES[:0:-1]) + E2M1_MAGNITUDES
"""The levels of a 4-bit float with two exponent bits; +0 and -0 are one level."""


class _Dequantized(torch.autograd.Function):
    """A linear product whose backward dequantizes the weight again instead of saving it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: CodebookLinear) -> torch.Tensor:
        """Return ``x W^T``."""
        ctx.layer = layer
        return torch.nn.functional.linear(x, layer.dequantized(x.dtype))

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Return the gradient of ``x``."""
        return upstream[0] @ ctx.layer.dequantized(upstream[0].dtype), None


class CodebookLinear(torch.nn.Linear):
    """A frozen linear layer stored as codes; it replaces the class of a plain layer in place."""

    book: Codebook
    name: str
    compute_dtype: torch.dtype
    column_I: torch.Tensor | None  # the column of each input's codes; None: in input order
    scale_codes: torch.Tensor | None  # the codes of double quantized scales

    def quantize(
        self, name: str, book: Codebook, values_OI: torch.Tensor, block: int, *, double_quant: bool
    ) -> None:
        """Quantize a weight and store its codes."""
        packed, scales_ON = book.quantize(values_OI, block)
        stored = NestedScales.of(scales_ON) if double_quant else scales_ON
        self.take(name, book, packed, stored, dtype=values_OI.dtype)

    def take(
        self,
        name: str,
        book: Codebook,
        packed: torch.Tensor,
        scales: torch.Tensor | NestedScales,
        *,
        dtype: torch.dtype,
        column_I: torch.Tensor | None = None,
    ) -> None:
        """Store codes and scales in the layout of :meth:`Codebook.quantize_pieces`."""
        self.book, self.name, self.compute_dtype = book, name, dtype
        self.weight = torch.nn.Parameter(packed, requires_grad=False)
        # Bytes, because `model.to(dtype)` would round floats.
        if isinstance(scales, NestedScales):
            codes_ON, floats = scales.codes_ON, scales.nested
        else:
            codes_ON, floats = None, scales
        self.register_buffer("scale_codes", codes_ON, False)
        self.register_buffer("scale_bytes", floats.contiguous().view(torch.uint8), False)
        self.register_buffer("column_I", column_I, False)

    def scales(self) -> torch.Tensor:
        """Return the scales, f32 ``[O, N]``."""
        found = self.scale_bytes
        assert isinstance(found, torch.Tensor), "registered as one"
        floats = found.view(torch.float32)
        if self.scale_codes is None:
            return floats
        return NestedScales(codes_ON=self.scale_codes, nested=floats).values()

    def dequantized(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized weight, ``[O, I]``."""
        found = self.book.dequantize(codes_of(self), self.scales(), dtype)
        return found if self.column_I is None else found[:, self.column_I]

    @property
    def W_q(self) -> torch.Tensor:  # noqa: N802
        """The codes, under HQQ's name: PEFT calls `dequantize` on layers that have it."""
        return self.weight

    def dequantize(self) -> torch.Tensor:
        """Return the weight that the layer computes with, ``[O, I]``."""
        return self.dequantized(self.compute_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., O]`` in the dtype of ``x`` ``[..., I]``."""
        product: torch.Tensor = _Dequantized.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(x.dtype)


class CodebookBinding(Binding):
    """Codebook layers with the name of one quantizer."""

    def __init__(self, name: str) -> None:
        """Bind the quantizer's name."""
        self.name = name

    def holds(self, module: torch.nn.Module) -> bool:
        """Return whether a module is a layer of this quantizer."""
        return isinstance(module, CodebookLinear) and module.name == self.name

    def facts(self, layer: Any) -> dict[str, Any]:
        """Read back number of levels, block size and format of scales."""
        return {
            "quant": layer.name,
            "double_quant": layer.scale_codes is not None,
            "levels": len(layer.book.levels),
            "block_size": layer.in_features // layer.scales().shape[1],
            "scales": layer.book.scaling.name,
        }

    def dequantized(self, layer: Any) -> torch.Tensor:
        """Return the dequantized weight, f32 ``[O, I]``."""
        found: torch.Tensor = layer.dequantized()
        return found

    def multiplies(self, layer: Any) -> bool:
        """Return True: every layer computes with its dequantized weight."""
        del layer
        return True

    def weight(self, layer: Any, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight rounded to the dtype of the inputs."""
        found: torch.Tensor = layer.dequantized(dtype)
        return found


class LevelsBinding(CodebookBinding):
    """Layers of codebooks with the levels of `quant.levels`."""

    @property
    def library(self) -> str:
        """This module; the number is raised when its values change."""
        return "mens_exp codebooks 1"

    def book_for(self, levels: Sequence[float]) -> Codebook:
        """Return the codebook for `quant.levels`."""
        return Codebook(levels=tuple(map(float, levels)), to_even=False)

    def quantize(self, model: torch.nn.Module, paths: Collection[str], quant: QuantConfig) -> None:
        """Replace the weights of layers with codes."""
        book, double_quant = self.book_for(quant.levels), quant.double_quant
        for path in paths:
            layer: Any = as_linear(model.get_submodule(path))
            model.set_submodule(path, layer)
            layer.__class__ = CodebookLinear
            values_OI = layer.weight.data
            layer.quantize(self.name, book, values_OI, quant.block, double_quant=double_quant)

    def round_trip(self, weight_OI: torch.Tensor, quant: QuantConfig) -> RoundTrip:
        """Quantize and dequantize a weight by itself."""
        book = self.book_for(quant.levels)
        packed, scales_ON = book.quantize(weight_OI, quant.block)
        nested = NestedScales.of(scales_ON) if quant.double_quant else None
        return RoundTrip(
            values=book.dequantize(packed, nested.values() if nested else scales_ON),
            stored_bytes=packed.nbytes + (nested or scales_ON).nbytes,
        )

    def rows(
        self,
        read: Callable[[int, int], torch.Tensor],
        shape: tuple[int, int],
        quantizer: Quantizer,
    ) -> Callable[[int, int], torch.Tensor]:
        """Quantize in pieces, keep codes and scales, and dequantize rows on demand."""
        rounded, dtype = DTYPES[quantizer["rounded_to"]], DTYPES[quantizer["compute_dtype"]]
        book = self.book_for(quantizer.get("levels", []))
        packed, scales_ON = book.quantize_pieces(
            lambda first, last: read(first, last).to(rounded), shape, quantizer["block_size"]
        )
        if quantizer["double_quant"]:
            scales_ON = NestedScales.of(scales_ON).values()

        def values(first: int, last: int) -> torch.Tensor:
            part = slice(first, last)
            return book.dequantize(packed[part], scales_ON[part], dtype).float()

        return values


class CodesBinding(LevelsBinding):
    """Layers of one codebook."""

    def __init__(self, name: str, book: Codebook) -> None:
        """Bind the quantizer's name and its codebook."""
        super().__init__(name)
        self.book = book

    def book_for(self, levels: Sequence[float]) -> Codebook:
        """Return the codebook, which has its own levels."""
        del levels
        return self.book


NF2 = CodesBinding("nf2", Codebook(levels=normal_float(2), to_even=False))
NF3 = CodesBinding("nf3", Codebook(levels=normal_float(3), to_even=False))
NF5 = CodesBinding("nf5", Codebook(levels=normal_float(5), to_even=False))
NF6 = CodesBinding("nf6", Codebook(levels=normal_float(6), to_even=False))
NF7 = CodesBinding("nf7", Codebook(levels=normal_float(7), to_even=False))
NF8 = CodesBinding("nf8", Codebook(levels=normal_float(8), to_even=False))
INT2 = CodesBinding("int2", Codebook(levels=integers(2)))
INT3 = CodesBinding("int3", Codebook(levels=integers(3)))
INT4 = CodesBinding("int4", Codebook(levels=integers(4)))
INT5 = CodesBinding("int5", Codebook(levels=integers(5)))
INT6 = CodesBinding("int6", Codebook(levels=integers(6)))
INT7 = CodesBinding("int7", Codebook(levels=integers(7)))
UINT2 = CodesBinding("uint2", _unsigned(2))
UINT3 = CodesBinding("uint3", _unsigned(3))
UINT4 = CodesBinding("uint4", _unsigned(4))
UINT5 = CodesBinding("uint5", _unsigned(5))
UINT6 = CodesBinding("uint6", _unsigned(6))
UINT7 = CodesBinding("uint7", _unsigned(7))
UINT8 = CodesBinding("uint8", _unsigned(8))
LEVELS = LevelsBinding("codebook")
MXFP4 = CodesBinding("mxfp4", Codebook(levels=E2M1, scaling=POWER_OF_TWO))
NVFP4 = CodesBinding("nvfp4", Codebook(levels=E2M1, scaling=TWO_LEVEL))
