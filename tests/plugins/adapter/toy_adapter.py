"""An adapter method of another package: each output of a layer is multiplied by a learned gain.

Shapes: T tokens, O outputs and I inputs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mens_exp.artifacts.adapter_tensors import AdapterForm
from mens_exp.config.fields import setting
from mens_exp.config.lora import LoraConfig
from mens_exp.config.lora_spec import AdapterSpec
from mens_exp.lora.method import AdaptedLayer, AdapterMethod


@dataclass(kw_only=True, slots=True)
class GainsConfig(LoraConfig):
    """Settings of gains."""

    start: float = setting(1.0, "Gain of each output before the first step.", gt=0)


class GainsLayer(AdaptedLayer):
    """A linear layer and its gains."""

    def __init__(self, base, outputs, start):
        super().__init__(base)
        self.gain = torch.nn.Parameter(torch.full((outputs,), start))

    def adapted(self, x, plain):
        del x
        bias_O = self.base_layer.bias
        if bias_O is None:
            return plain * self.gain
        return (plain - bias_O) * self.gain + bias_O


class Gains(AdapterMethod):
    """What places such layers and merges them."""

    def layer(self, base, one, lora):
        return GainsLayer(base, one.out, lora.start)

    def weight(self, weight_OI, tensors, *, scale):
        del scale
        return weight_OI * tensors["gain"][:, None]


GAINS = Gains()
SPEC = AdapterSpec(
    name="gains",
    method="toy_adapter:GAINS",
    form=AdapterForm(name="gains", tensors={"gain": ("out",)}, no_delta="a gain is not a delta"),
    schema=GainsConfig,
)
