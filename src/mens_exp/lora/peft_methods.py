"""Adapter methods of PEFT other than LoRA, around any linear layer: (IA)³ and LoHa.

PEFT's own layers of LoHa take the shape of a weight from its storage, which has another one in 4
bits. Here its layer stands beside the quantized one, on a weight that has the right shape and no
memory, and computes the update. The layer that is adapted computes the rest.

Shapes: T tokens, R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import ConfigError
from mens_exp.lora.keyed import key_of
from mens_exp.lora.method import AdaptedLayer, AdapterMethod

if TYPE_CHECKING:
    from mens_exp.layout.targets import LinearModule
    from mens_exp.lora.method import Tensors

_ADAPTER = "default"
_NAME = "layer"


class Ia3Layer(AdaptedLayer):
    """A linear layer whose outputs are multiplied by learned factors ``[O]``."""

    def __init__(self, base: torch.nn.Module, one: LinearModule) -> None:
        """Start with factors of 1, as PEFT does.

        Raises:
            ConfigError: the layer has a bias.
        """
        super().__init__(base)
        if getattr(base, "bias", None) is not None:
            raise ConfigError(
                "(IA)³ multiplies the bias too, and a merge changes weights alone",
                where="lora.targets",
                found=one.path,
                expected="layers without a bias",
                remedy="choose other targets, or lora.variant=lora",
            )
        device = next(base.parameters()).device
        self.ia3_l = torch.nn.Parameter(torch.ones(one.out, device=device))

    def adapted(self, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Multiply the output (arXiv:2205.05638, section 3.3)."""
        del x
        return plain * self.ia3_l


class Ia3(AdapterMethod):
    """(IA)³ on outputs: those of keys, values, and the part of an MLP that enters its last layer.

    PEFT multiplies the input of the last layer of an MLP. In a gated MLP, ``(act(g) · u) W``, that
    is to multiply the output u of the layer called `up_proj`, which is among the targets instead.
    """

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the layer with its factors."""
        del lora
        return Ia3Layer(base, one)

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight with its rows multiplied."""
        del scale
        return weight_OI * tensors["ia3_l"][:, None]


class LohaLayer(AdaptedLayer):
    """A linear layer and an update that is the elementwise product of two low-rank matrices."""

    def __init__(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> None:
        """Place PEFT's layer beside the linear layer, which it does not touch."""
        from peft import LoHaConfig, inject_adapter_in_model

        super().__init__(base)
        stand_in = _of_shape(one.out, one.width, next(base.parameters()).device)
        settings = LoHaConfig(r=lora.r, alpha=lora.alpha, target_modules=[_NAME])
        alone = torch.nn.ModuleDict({_NAME: stand_in})
        made = inject_adapter_in_model(settings, alone, adapter_name=_ADAPTER)[_NAME]
        self._of_peft = [made]  # in a list, torch does not see a second place of the parameters
        self.scale = float(made.scaling[_ADAPTER])
        self.hada_w1_a = made.hada_w1_a[_ADAPTER]
        self.hada_w1_b = made.hada_w1_b[_ADAPTER]
        self.hada_w2_a = made.hada_w2_a[_ADAPTER]
        self.hada_w2_b = made.hada_w2_b[_ADAPTER]

    def adapted(self, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Add what PEFT's update makes of the input."""
        update_OI: torch.Tensor = self._of_peft[0].get_delta_weight(_ADAPTER)
        return plain + torch.nn.functional.linear(x.to(update_OI.dtype), update_OI)


class Loha(AdapterMethod):
    """LoHa (FedPara, arXiv:2108.06098): ``s · (w1_a w1_b) ⊙ (w2_a w2_b)`` of rank up to R²."""

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the layer with PEFT's beside it."""
        return LohaLayer(base, one, lora)

    def draw(self, layer: Any, *, seed: int, logical: str) -> None:
        """Draw three matrices as PEFT does, from generators of their own; the fourth is zero."""
        with torch.no_grad():
            for name, parameter in layer.named_parameters(recurse=False):
                generator = torch.Generator().manual_seed(key_of(seed, name, logical))
                bound = 1 / math.sqrt(parameter.shape[1])
                draws = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                parameter.copy_(torch.zeros_like(draws) if name == "hada_w2_b" else draws)

    def scale(self, layer: Any) -> float:
        """Return ``alpha / r``."""
        return float(layer.scale)

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight plus the update."""
        first_OI = tensors["hada_w1_a"] @ tensors["hada_w1_b"]
        second_OI = tensors["hada_w2_a"] @ tensors["hada_w2_b"]
        return weight_OI + scale * first_OI * second_OI


IA3 = Ia3()
LOHA = Loha()


def _of_shape(out: int, width: int, device: torch.device) -> torch.nn.Linear:
    """Return a layer whose weight is one number that is shown as ``[O, I]``."""
    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.in_features, layer.out_features = width, out
    one = torch.zeros((), device=device)
    layer.weight = torch.nn.Parameter(one.expand(out, width), requires_grad=False)
    return layer
