"""Matrix products in the fastest form that a device has for a dtype.

A CPU without bf16 instructions multiplies bf16 matrices up to thirty times more slowly than f32
ones (measured with AVX2, 512 x 1536 by 1536 x 576: 388 ms and 10 ms). There, operands are converted
to f32 and the product is rounded to bf16 once, as bf16 instructions do.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_MATRIX = 2
_FP8_MULTIPLE = 16  # of the inner and outer dimensions of an FP8 weight, from PyTorch's check


@functools.cache
def has_bf16(kind: str) -> bool:
    """Return whether a kind of device multiplies bf16 matrices at least as fast as f32 ones."""
    if kind != "cpu":
        return True
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001  # no public name


def is_rounded(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether products in a dtype are computed in f32 and rounded."""
    return dtype == torch.bfloat16 and not has_bf16(device.type)


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, in_fp8: bool = False
) -> torch.Tensor:
    """Return ``x Wᵀ + b``, rounded once to the dtype of ``x``.

    Args:
        x: ``[M, I]``.
        weight: ``[O, I]``.
        bias: ``[O]``.
        in_fp8: multiply with `fp8_product` if the shapes allow it.
    """
    if in_fp8 and _fits_fp8(x, weight):
        y_MO = fp8_product(x, weight)
        return y_MO if bias is None else y_MO.add_(bias)
    if is_rounded(x.dtype, x.device):
        wide = None if bias is None else bias.float()
        with torch.autocast(x.device.type, enabled=False):
            return torch.nn.functional.linear(x.float(), weight.float(), wide).to(x.dtype)
    return torch.nn.functional.linear(x, weight, bias)


def product(a: torch.Tensor, b: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
    """Return ``scale · a @ b`` of matrices, or of batches of them, rounded once to their dtype."""
    if is_rounded(a.dtype, a.device):
        with torch.autocast(a.device.type, enabled=False):
            return product(a.float(), b.float(), scale=scale).to(a.dtype)
    if scale == 1.0:
        return a @ b
    into = a.new_empty((*a.shape[:-1], b.shape[-1]))
    multiply = torch.addmm if a.dim() == _MATRIX else torch.baddbmm
    return multiply(into, a, b, beta=0, alpha=scale)


def _fits_fp8(x: torch.Tensor, weight: torch.Tensor) -> bool:
    fits = all(size % _FP8_MULTIPLE == 0 for size in weight.shape)
    return fits and x.dtype == torch.bfloat16


def fp8_product(x_MI: torch.Tensor, weight_OI: torch.Tensor) -> torch.Tensor:
    """Return ``x Wᵀ`` of rows in FP8 (e4m3), each with its own f32 scale, in the dtype of ``x``.

    The scale maps a row's largest magnitude to 448, the largest number of the format.
    """
    x8_MI, of_x_M1 = _in_fp8(x_MI)
    w8_OI, of_w_O1 = _in_fp8(weight_OI)
    found: torch.Tensor = torch._scaled_mm(  # noqa: SLF001  # its public form is newer than our oldest torch
        x8_MI, w8_OI.t(), scale_a=of_x_M1, scale_b=of_w_O1.t(), out_dtype=x_MI.dtype
    )
    return found


def _in_fp8(rows_MI: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows_MI = rows_MI.contiguous()  # a GPU multiplies no other layout
    largest = torch.finfo(torch.float8_e4m3fn).max
    scale_M1 = rows_MI.abs().amax(1, keepdim=True).float().div_(largest)
    scale_M1.masked_fill_(scale_M1 == 0, 1)  # a row of zeros
    return (rows_MI / scale_M1).to(torch.float8_e4m3fn), scale_M1


def add_gradient(
    into_MI: torch.Tensor, g_MO: torch.Tensor, weight_OI: torch.Tensor, *, in_fp8: bool
) -> torch.Tensor:
    """Add ``g @ W`` in place, the gradient of the input of `linear`."""
    if in_fp8 and _fits_fp8(g_MO, weight_OI):
        return into_MI.add_(fp8_product(g_MO, weight_OI.t()))
    return add_product(into_MI, g_MO, weight_OI)


def add_product(
    into: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scale: float = 1.0
) -> torch.Tensor:
    """Add ``scale · a @ b`` in place."""
    if is_rounded(a.dtype, a.device):
        with torch.autocast(a.device.type, enabled=False):
            return into.add_(product(a.float(), b.float(), scale=scale))
    if a.dim() == _MATRIX:
        return into.addmm_(a, b, alpha=scale)
    return into.baddbmm_(a, b, alpha=scale)


def products_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which linear layers multiply an input: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def frozen_linear(
    x: torch.Tensor,
    weight: Callable[[torch.dtype], torch.Tensor],
    bias: torch.Tensor | None,
    *,
    in_fp8: bool = False,
) -> torch.Tensor:
    """Return ``x Wᵀ + b`` in the dtype of products; only ``x`` gets a gradient.

    Args:
        x: ``[..., I]``.
        weight: returns W, ``[O, I]``, in a dtype; called again in the backward pass, so that a
            dequantized weight is not saved.
        bias: ``[O]``.
        in_fp8: multiply with `fp8_product` if the shapes allow it.
    """
    x_MI = x.to(products_dtype(x)).flatten(0, -2)
    y_MO: torch.Tensor = _FrozenLinear.apply(x_MI, weight, bias, in_fp8)  # type: ignore[no-untyped-call]
    return y_MO.view(*x.shape[:-1], y_MO.shape[1])


class _FrozenLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MI: torch.Tensor,
        weight: Callable[[torch.dtype], torch.Tensor],
        bias: torch.Tensor | None,
        in_fp8: bool,
    ) -> torch.Tensor:
        ctx.weight, ctx.in_fp8 = weight, in_fp8
        narrow = None if bias is None else bias.to(x_MI.dtype)
        return linear(x_MI, weight(x_MI.dtype), narrow, in_fp8=in_fp8)

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        (g_MO,) = upstream
        weight_OI = ctx.weight(g_MO.dtype)
        if ctx.in_fp8 and _fits_fp8(g_MO, weight_OI):
            return fp8_product(g_MO, weight_OI.t()), None, None, None
        return product(g_MO, weight_OI), None, None, None
