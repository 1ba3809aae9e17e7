"""A quantizer of another package: a weight is one of 31 multiples of a step that its row shares.

Shapes: O outputs and I inputs of a layer.
"""

from __future__ import annotations

import torch

from mens_exp.config.quant import QuantizerSpec
from mens_exp.quant.binding import Binding

LEVELS = 15  # of either sign


class StepsLinear(torch.nn.Linear):
    """A linear layer whose weight has the values of its steps."""

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight.to(x.dtype), self.bias)


class Steps(Binding):
    """What loads, describes and dequantizes such layers."""

    def quantize(self, model, paths, quant):
        for path in paths:
            layer = model.get_submodule(path)
            weight_OI = layer.weight.data.float()
            step_O1 = weight_OI.abs().amax(dim=1, keepdim=True) / LEVELS
            layer.weight.data = (weight_OI / step_O1).round() * step_O1
            layer.__class__ = StepsLinear

    def holds(self, module):
        return isinstance(module, StepsLinear)

    def facts(self, layer):
        return {"quant": SPEC.name, "double_quant": False, "levels": LEVELS}

    def dequantized(self, layer):
        return layer.weight.float()


STEPS = Steps()
SPEC = QuantizerSpec(name="steps", binding="toy_quantizer:STEPS", code_bits=5)
