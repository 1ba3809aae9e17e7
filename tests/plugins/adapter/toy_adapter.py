"""An adapter method of another package: each output of a layer is multiplied by a learned gain.

Shapes: T tokens, O outputs and I inputs of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mens_exp.artifacts.adapter_tensors import AdapterForm
from mens_exp.config.fields import setting
from mens_exp.config.lora import AdapterSpec, LoraConfig
from mens_exp.lora.method import AdaptedLayer, AdapterMethod


@dataclass(kw_only=True, slots=True)
class GainsConfig(LoraConfig):
    """Settings of gains."""

    pull: float = setting(1.0, "Factor of a gain's gradient.", gt=0)


class GainsLayer(AdaptedLayer):
    """A linear layer and its gains."""

    def __init__(self, base, outputs, pull):
        super().__init__(base)
        self.gain = torch.nn.Parameter(torch.ones(outputs))
        self.pull = pull

    def adapted(self, x, plain):
        del x
        gain_O = self.gain.detach().lerp(self.gain, self.pull)  # its value, and more gradient
        bias_O = self.base_layer.bias
        if bias_O is None:
            return plain * gain_O
        return (plain - bias_O) * gain_O + bias_O


class Gains(AdapterMethod):
    """What places such layers and merges them."""

    def layer(self, base, one, lora):
        return GainsLayer(base, one.out, lora.pull)

    def weight(self, weight_OI, tensors, *, scale):
        del scale
        return weight_OI * tensors["gain"][:, None]


GAINS = Gains()
SPEC = AdapterSpec(
    name="gains",
    method="toy_adapter:GAINS",
    form=AdapterForm(name="gains", tensors={"gain": ("out",)}, no_delta="a gain is no delta"),
    schema=GainsConfig,
)
