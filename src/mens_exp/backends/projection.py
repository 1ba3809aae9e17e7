"""One projection of the proxy stack: a frozen 4-bit weight and LoRA beside it.

Shapes: M positions, I inputs and O outputs of the projection, R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from mens_exp.lora.keyed import HeadDropout, KeyedDropout, initialise
from mens_exp.quant.bnb import compute_dtype
from mens_exp.quant.round_trip import round_trip

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig

__all__ = ["Projection"]


class Projection(torch.nn.Module):
    """``W x + (alpha / r) · B A x``, W quantized once and kept in the compute format.

    Taking 4-bit codes back costs more than the products of a step: measured on SmolLM2's head,
    0.18 s against 0.07 s for 64 positions in bf16, on the same two busy cores. What the codes
    stand for is the same either way; the copy is what a step reads.
    """

    weight_OI: torch.Tensor

    def __init__(
        self, weight_OI: torch.Tensor, config: RunConfig, *, name: str, draws_as: str
    ) -> None:
        """Quantize a weight and put a fresh adapter beside it.

        Args:
            weight_OI: f32, on its device.
            config: the whole configuration.
            name: the adapter's name for it; keys dropout.
            draws_as: the full graph's name for the same weight; keys A, so that arms of other
                backends start from the same matrix.
        """
        super().__init__()
        lora, (outputs, inputs) = config.lora, weight_OI.shape
        made = round_trip(weight_OI, config.quant)
        self.stored_bytes = made.stored_bytes
        dtype = compute_dtype(config.quant)
        self.register_buffer("weight_OI", made.values.to(dtype), persistent=False)
        device = weight_OI.device
        self.lora_a = torch.nn.Parameter(torch.empty(lora.r, inputs, device=device))
        self.lora_b = torch.nn.Parameter(torch.empty(outputs, lora.r, device=device))
        initialise(self.lora_a, self.lora_b, seed=config.seed, layer=draws_as)
        self.scale = lora.alpha / lora.r
        kind = HeadDropout if name == "lm_head" else KeyedDropout
        self.dropout = kind(lora.dropout, seed=config.seed, layer=f"proxy.{name}")
        self.adapts = True

    def forward(self, x_MI: torch.Tensor) -> torch.Tensor:
        """Project, ``[M, O]``; f32 unless autocast is on."""
        weight_OI = self.weight_OI
        if weight_OI.dtype == torch.float32 or torch.is_autocast_enabled(x_MI.device.type):
            y_MO = functional.linear(x_MI, weight_OI)
        else:
            y_MO = functional.linear(x_MI.to(weight_OI.dtype), weight_OI).float()
        if not self.adapts:
            return y_MO
        # Scaled while it is R wide, and added inside the product: passes over [M, vocabulary]
        # would cost the head more than its products.
        low_MR = functional.linear(self.dropout(x_MI), self.lora_a) * self.scale
        return torch.addmm(y_MO, low_MR, self.lora_b.T)
