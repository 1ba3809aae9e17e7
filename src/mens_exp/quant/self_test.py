"""Whether 4-bit linear layers compute here: one forward and one backward pass, held against torch.

Shapes: B rows, I inputs, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mens_exp.model.quiet import quiet

__all__ = ["FourBitTest", "four_bit_test"]

_ROWS, _INPUTS, _OUTPUTS = 8, 128, 64
# f32 sums of 128 products differ by about 1e-6 between kernels; a wrong one is off by 0.1 and more.
_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class FourBitTest:
    """Relative errors of the layer's output and of the gradient of its input, against torch."""

    device: str
    forward_error: float | None
    backward_error: float | None
    reason: str | None

    @property
    def passed(self) -> bool:
        """Whether both passes ran and agree."""
        errors = (self.forward_error, self.backward_error)
        return all(error is not None and error < _TOLERANCE for error in errors)


def four_bit_test(device: str) -> FourBitTest:
    """Quantize a small layer to NF4 on a device and compare it with its own dequantized weight.

    Args:
        device: torch's name of it, such as ``cpu`` or ``cuda:0``.

    Returns:
        The errors, or the reason why there are none.
    """
    try:
        with quiet():
            forward, backward = _errors(torch.device(device))
    except Exception as error:  # noqa: BLE001  # whatever a broken kernel raises is the finding
        reason = f"{type(error).__name__}: {error}"
        return FourBitTest(device=device, forward_error=None, backward_error=None, reason=reason)
    return FourBitTest(device=device, forward_error=forward, backward_error=backward, reason=None)


def _errors(device: torch.device) -> tuple[float, float]:
    import bitsandbytes as bnb

    generator = torch.Generator().manual_seed(0)
    weight_OI = torch.randn(_OUTPUTS, _INPUTS, generator=generator)
    layer = bnb.nn.Linear4bit(
        _INPUTS, _OUTPUTS, bias=False, compute_dtype=torch.float32, quant_type="nf4"
    )
    layer.weight = bnb.nn.Params4bit(weight_OI, requires_grad=False, quant_type="nf4")
    layer = layer.to(device)
    dequantized_OI = bnb.functional.dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    x_BI = torch.randn(_ROWS, _INPUTS, generator=generator).to(device).requires_grad_()
    upstream_BO = torch.randn(_ROWS, _OUTPUTS, generator=generator).to(device)
    output_BO = layer(x_BI)
    (gradient_BI,) = torch.autograd.grad(output_BO, x_BI, upstream_BO)
    expected_BO = x_BI.detach() @ dequantized_OI.float().T
    expected_BI = upstream_BO @ dequantized_OI.float()
    return _relative(output_BO, expected_BO), _relative(gradient_BI, expected_BI)


def _relative(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.detach() - expected).norm() / expected.norm())
