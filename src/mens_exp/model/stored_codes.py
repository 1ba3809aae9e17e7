"""Codes of a checkpoint that was published quantized, and their dequantization.

The layouts are those that auto-round, compressed-tensors, bitsandbytes and transformers write.
Tests compare each with the values that such a package computes.

Shapes: O outputs and I inputs of a layer, N groups of inputs that share a scale, P codes per 32-bit
word.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from mens_exp.errors import ModelFileError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mens_exp.layout.prequantized import StoredFormat

    Read = Callable[[str], torch.Tensor | None]

_WORD: Final = 32
_NIBBLE: Final = 4
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # the position in a word of each output's code
E2M1_MAGNITUDES: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitudes of a 4-bit float (OCP microscaling formats v1.0, section 5.3.3)."""
_E8M0_BIAS: Final = 127
_INT8_TOP: Final = 127
_BYTE_DTYPES: Final = (torch.float8_e4m3fn, torch.int8)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredCodes:
    """The codes of a layer; weight ``[o, i]`` is ``(levels[code] - zero) * scale``, in f32.

    Attributes:
        levels: ascending.
        codes_OI: indices into ``levels``, uint8.
        scales_ON: f32.
        zeros_ON: f32; None is zero.
        column_I: the column of each input's codes; None: in input order.
    """

    levels: tuple[float, ...]
    codes_OI: torch.Tensor
    scales_ON: torch.Tensor
    zeros_ON: torch.Tensor | None = None
    column_I: torch.Tensor | None = None

    def rows(self, first: int, last: int) -> torch.Tensor:
        """Return rows ``first`` to ``last`` (exclusive), dequantized to f32."""
        part = slice(first, last)
        levels = torch.tensor(self.levels, device=self.codes_OI.device)
        scales_ON = self.scales_ON[part]
        values = levels[self.codes_OI[part].long()].view(*scales_ON.shape, -1)
        if self.zeros_ON is not None:
            values = values - self.zeros_ON[part, :, None]
        values_OI = (values * scales_ON[..., None]).flatten(1)
        return values_OI if self.column_I is None else values_OI[:, self.column_I]


def stored_codes(stored: StoredFormat, read: Read, where: str, width: int) -> StoredCodes:
    """Read the codes of a layer.

    Args:
        stored: the format.
        read: returns a tensor of the layer by its suffix; None if there is no such tensor.
        where: the layer, for messages.
        width: inputs of the layer.

    Raises:
        ModelFileError: a tensor is missing, does not have the format's shape, or has values that
            are not finite.
    """
    try:
        found = _READERS[stored.method](stored, read, width)
        _check(found, width)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ModelFileError(
            f"these are not the tensors of a {stored.method} layer",
            where=where,
            found=f"{type(error).__name__}: {error}",
            remedy="download the model again; or take the model that these weights were made from",
        ) from error
    largest_ON = torch.tensor(found.levels).abs().amax().to(found.scales_ON.device)
    if found.zeros_ON is not None:
        largest_ON = largest_ON + found.zeros_ON.abs()
    if not bool((largest_ON * found.scales_ON).isfinite().all()):
        raise ModelFileError(
            "quantized weights are not finite",
            where=where,
            found="a scale or a zero point that is NaN, infinite or too large",
            remedy="download the model again",
        )
    return found


def _check(found: StoredCodes, width: int) -> None:
    outputs, groups = found.scales_ON.shape
    shapes = {"codes": found.codes_OI.shape, "scales": found.scales_ON.shape}
    if shapes["codes"] != (outputs, width) or width % groups:
        raise ValueError(f"{shapes} of {width} inputs")
    if found.zeros_ON is not None and found.zeros_ON.shape != (outputs, groups):
        raise ValueError(f"zero points {list(found.zeros_ON.shape)} for {shapes}")


def _needed(read: Read, suffix: str) -> torch.Tensor:
    found = read(suffix)
    if found is None:
        raise KeyError(suffix)
    return found


def _words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of 32-bit words, the lowest bits first, int32 ``[..., P]``."""
    shifts = torch.arange(0, _WORD, bits, device=packed.device, dtype=torch.int32)
    codes: torch.Tensor = (packed[..., None] >> shifts) & (2**bits - 1)
    return codes


def _integers(bits: int) -> tuple[float, ...]:
    return tuple(map(float, range(2**bits)))


def _gptq(stored: StoredFormat, read: Read, width: int) -> StoredCodes:
    codes_OI = _words(_needed(read, "qweight").T, stored.bits).flatten(1)
    zeros_NO = _words(_needed(read, "qzeros"), stored.bits).flatten(1)
    if stored.layout == "gptq":  # stores zero points minus one
        zeros_NO = (zeros_NO + 1) & (2**stored.bits - 1)
    scales_ON = _needed(read, "scales").float().T
    group = width if stored.group is None else stored.group
    codes_OI, column_I = _grouped(codes_OI, _order(stored, read, "g_idx"), group)
    return StoredCodes(
        levels=_integers(stored.bits),
        codes_OI=codes_OI.to(torch.uint8).contiguous(),
        scales_ON=scales_ON.contiguous(),
        zeros_ON=zeros_NO.T.float().contiguous(),
        column_I=column_I,
    )


def _order(stored: StoredFormat, read: Read, suffix: str) -> torch.Tensor | None:
    return _needed(read, suffix) if stored.orders_inputs else read(suffix)


def _grouped(
    codes_OI: torch.Tensor, group_I: torch.Tensor | None, group: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Make the columns of each group contiguous; return the new column of each input, if moved.

    Args:
        codes_OI: codes in the order of the inputs.
        group_I: the group of each input (``g_idx`` of activation order); None: in input order.
        group: inputs per group.
    """
    usual = torch.arange(codes_OI.shape[1], device=codes_OI.device) // group
    if group_I is None or torch.equal(group_I.long(), usual):
        return codes_OI, None
    order = torch.argsort(group_I, stable=True)
    if not torch.equal(group_I.long()[order], usual):
        raise ValueError(f"g_idx has groups of other sizes than {group}")
    return codes_OI[:, order], torch.argsort(order)


def _awq(stored: StoredFormat, read: Read, width: int) -> StoredCodes:
    del width
    order = torch.tensor(_AWQ_ORDER)

    def unpacked(packed: torch.Tensor) -> torch.Tensor:
        return _words(packed, stored.bits)[..., order.to(packed.device)].flatten(1).T

    return StoredCodes(
        levels=_integers(stored.bits),
        codes_OI=unpacked(_needed(read, "qweight")).to(torch.uint8).contiguous(),
        scales_ON=_needed(read, "scales").float().T.contiguous(),
        zeros_ON=unpacked(_needed(read, "qzeros")).float().contiguous(),
    )


def _fp8(stored: StoredFormat, read: Read, width: int) -> StoredCodes:
    scales_ON = _by_rows(_needed(read, "weight_scale_inv"), stored, read, width)
    levels, codes_OI = _bytes(_needed(read, "weight"))
    return StoredCodes(levels=levels, codes_OI=codes_OI, scales_ON=scales_ON)


def _by_rows(values: torch.Tensor, stored: StoredFormat, read: Read, width: int) -> torch.Tensor:
    """Expand one value per block, row or tensor to one per row and group, f32 ``[O, N]``."""
    outputs = len(_needed(read, stored.codes))
    found = values.float().reshape(1, 1) if values.numel() == 1 else values.float()
    if found.dim() == 1:
        found = found[:, None]
    group = width if stored.group is None else stored.group
    step = math.gcd(group, width)
    column_N = torch.arange(0, width, step, device=found.device) // group
    row_O = torch.arange(outputs, device=found.device)
    if stored.outputs is not None:
        row_O = row_O // stored.outputs
    elif len(found) == 1:
        row_O = torch.zeros_like(row_O)
    expected = (int(row_O[-1]) + 1, int(column_N[-1]) + 1)
    if tuple(found.shape) != expected:
        raise ValueError(f"scales are {list(values.shape)}, expected {list(expected)}")
    return found[row_O][:, column_N].contiguous()


def _bytes(codes_OI: torch.Tensor) -> tuple[tuple[float, ...], torch.Tensor]:
    """Return ascending levels, and the weights' indices into them, of E4M3 or 8-bit integers."""
    if codes_OI.dtype not in _BYTE_DTYPES:
        raise TypeError(f"weights are {codes_OI.dtype}, expected E4M3 or 8-bit integers")
    every = torch.arange(256, device=codes_OI.device).to(torch.uint8).view(codes_OI.dtype).float()
    numbers = codes_OI.view(torch.uint8).int()
    if bool(every[numbers].isnan().any()):
        raise ValueError("weights are NaN")
    return _ascending(every.nan_to_num(), numbers)


def _ascending(
    levels: torch.Tensor, numbers: torch.Tensor
) -> tuple[tuple[float, ...], torch.Tensor]:
    """Sort levels, merging equal ones, and convert numbers to indices into the result."""
    ordered, place = torch.unique(levels, sorted=True, return_inverse=True)
    return tuple(ordered.tolist()), place.to(torch.uint8)[numbers]


def _bitsandbytes(stored: StoredFormat, read: Read, width: int) -> StoredCodes:
    codes = _needed(read, "weight")
    if stored.bits > _NIBBLE:
        levels, codes_OI = _bytes(codes)
        scales_ON = _needed(read, "SCB").float()[:, None] / _INT8_TOP
        return StoredCodes(levels=levels, codes_OI=codes_OI, scales_ON=scales_ON)
    state = json.loads(bytes(_needed(read, stored.marker).tolist()))
    scales = _needed(read, "weight.absmax")
    if "nested_blocksize" in state:
        blocks = torch.arange(len(scales), device=scales.device) // state["nested_blocksize"]
        nested = _needed(read, "weight.nested_quant_map").float()[scales.int()]
        scales = nested * _needed(read, "weight.nested_absmax").float()[blocks]
        scales = scales + state["nested_offset"]
    if width % state["blocksize"]:
        raise ValueError(f"blocks of {state['blocksize']} straddle rows of {width}")
    packed = codes.flatten().view(torch.uint8)  # as bytes, whatever bnb_4bit_quant_storage is
    numbers = torch.stack([packed >> _NIBBLE, packed & 0xF], -1).view(-1, width)
    levels, codes_OI = _ascending(_needed(read, "weight.quant_map").float(), numbers.int())
    scales_ON = scales.float().view(len(codes_OI), -1)
    return StoredCodes(levels=levels, codes_OI=codes_OI, scales_ON=scales_ON)


def _compressed(stored: StoredFormat, read: Read, width: int) -> StoredCodes:
    if stored.layout in _FLOATS:
        return _floats(stored, read, width)
    zeros = _needed(read, "weight_zero_point") if stored.has_zeros else None
    if stored.layout == "pack-quantized":
        packed = _needed(read, "weight_packed")
        codes_OI = _words(packed, stored.bits).flatten(1)[:, :width].to(torch.uint8)
        codes_OI, column_I = _grouped(
            codes_OI, _order(stored, read, "weight_g_idx"), stored.group or width
        )
        scales_ON = _by_rows(_needed(read, "weight_scale"), stored, read, width)
        half = 2 ** (stored.bits - 1)
        zeros_ON = None
        if zeros is not None:
            rows = _words(zeros.T, stored.bits).flatten(1)[:, : len(codes_OI)].T
            zeros_ON = _by_rows(rows - half, stored, read, width)
        levels = tuple(float(number - half) for number in range(2**stored.bits))
        return StoredCodes(
            levels=levels,
            codes_OI=codes_OI.contiguous(),
            scales_ON=scales_ON,
            zeros_ON=zeros_ON,
            column_I=column_I,
        )
    levels, codes_OI = _bytes(_needed(read, "weight"))
    return StoredCodes(
        levels=levels,
        codes_OI=codes_OI,
        scales_ON=_by_rows(_needed(read, "weight_scale"), stored, read, width),
        zeros_ON=None if zeros is None else _by_rows(zeros, stored, read, width),
    )


_FLOATS: Final = ("nvfp4-pack-quantized", "mxfp4-pack-quantized")


def _floats(stored: StoredFormat, read: Read, width: int) -> StoredCodes:
    """Read 4-bit floats, the first of a byte in its low bits."""
    packed = _needed(read, "weight_packed")
    numbers = torch.stack([packed & 0xF, packed >> _NIBBLE], -1).flatten(1)
    positive = torch.tensor(E2M1_MAGNITUDES, device=packed.device)
    levels, codes_OI = _ascending(torch.cat([positive, -positive]), numbers.int())
    scales = _needed(read, "weight_scale")
    if stored.layout == "mxfp4-pack-quantized":
        exponents = scales.view(torch.uint8).int() - _E8M0_BIAS
        scales = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
    else:
        scales = scales.float() / _needed(read, "weight_global_scale").float()
    scales_ON = _by_rows(scales, stored, read, width)
    return StoredCodes(levels=levels, codes_OI=codes_OI, scales_ON=scales_ON)


_READERS: Final[dict[str, Callable[[StoredFormat, Read, int], StoredCodes]]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
}
