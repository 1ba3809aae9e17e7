"""Adapter methods of PEFT other than LoRA, around any linear layer: (IA)³, LoHa and VeRA.

PEFT's own layers of LoHa take the shape of a weight from its storage, which has another one in 4
bits. Here its layer stands beside the quantized one, on a weight that has the right shape and no
memory, and computes the update. The layer that is adapted computes the rest.

Shapes: T tokens, R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.random import MT19937

from mens_exp.errors import ConfigError, DataError
from mens_exp.lora.keyed import key_of
from mens_exp.lora.method import AdaptedLayer, AdapterMethod

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.layout.targets import LinearModule
    from mens_exp.lora.method import Pair, Tensors

_ADAPTER = "default"
_NAME = "layer"
_FIRST_LAMBDA_D = 0.1  # PEFT's `d_initial`, and the paper's (section 4)


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


class Projections:
    """VeRA's frozen matrices A ``[R, I]`` and B ``[O, R]``, of the sizes of the largest layer.

    They are outside of every layer, so that they exist once, and are drawn again from their seed:
    the numbers are those of torch's generator on a CPU, whose stream NumPy guarantees.
    """

    def __init__(self, described: Mapping[str, Any]) -> None:
        """Draw them as PEFT does (`projection_prng_key`): Kaiming's uniform, A and then B.

        Raises:
            DataError: a record has the hash of other values.
        """
        numbers = MT19937()
        numbers._legacy_seeding(described["seed"])  # noqa: SLF001 - as torch seeds its own
        r, out, width = (described[name] for name in ("r", "out", "width"))
        self._on: dict[torch.device, Pair] = {}
        A_RI, B_OR = (_kaiming(shape, numbers) for shape in ((r, width), (out, r)))
        self._on[A_RI.device] = (A_RI, B_OR)
        digest = hashlib.sha256()
        for matrix in (A_RI, B_OR):
            digest.update(matrix.numpy().tobytes())
        self.described = {**described, "sha256": digest.hexdigest()}
        if described.get("sha256", digest.hexdigest()) != digest.hexdigest():
            raise DataError(
                "the projections of the adapter are not those of its seed and sizes",
                where="mens_exp.projections.sha256",
                found=digest.hexdigest(),
                expected=described["sha256"],
                remedy="use an adapter that this program wrote",
            )

    def of(self, out: int, width: int, device: torch.device) -> Pair:
        """Return the part of A and of B that a layer of that size uses, on a device."""
        if device not in self._on:
            first_RI, last_OR = next(iter(self._on.values()))
            self._on[device] = (first_RI.to(device), last_OR.to(device))
        A_RI, B_OR = self._on[device]
        return A_RI[:, :width], B_OR[:out]


class VeraLayer(AdaptedLayer):
    """A linear layer, and factors on the shared projections."""

    def __init__(self, base: torch.nn.Module, one: LinearModule, lora: Any, shared: Any) -> None:
        """Start with an update of zero, as PEFT does."""
        super().__init__(base)
        device = next(base.parameters()).device
        self.vera_lambda_b = torch.nn.Parameter(torch.zeros(one.out, device=device))
        first_R = torch.full((lora.r,), _FIRST_LAMBDA_D, device=device)
        self.vera_lambda_d = torch.nn.Parameter(first_R)
        self.size, self._shared = (one.out, one.width), shared

    def adapted(self, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Add ``b ⊙ B (d ⊙ A x)`` (arXiv:2310.11454, equation 2)."""
        A_RI, B_OR = self._shared.of(*self.size, x.device)
        low = torch.nn.functional.linear(x.to(A_RI.dtype), A_RI)
        high = torch.nn.functional.linear(self.vera_lambda_d * low, B_OR)
        return plain + self.vera_lambda_b * high


class Vera(AdapterMethod):
    """VeRA (arXiv:2310.11454): ``Λ_b B Λ_d A``, where all layers have the same A and B."""

    def __init__(self, shared: Projections | None = None) -> None:
        """Have the projections of one adapter; `sharing` draws them."""
        self._projections = shared

    def sharing(self, projections: Mapping[str, Any]) -> AdapterMethod:
        """Draw the projections."""
        return Vera(Projections(projections))

    def shared(self) -> dict[str, Any]:
        """Return the seed, the sizes and the hash of the projections."""
        assert self._projections is not None, "`sharing` has drawn them"
        return dict(self._projections.described)

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the layer with its factors."""
        return VeraLayer(base, one, lora, self._projections)

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight plus the update."""
        del scale
        assert self._projections is not None, "`sharing` has drawn them"
        b_O, d_R = tensors["vera_lambda_b"], tensors["vera_lambda_d"]
        out, width = weight_OI.shape
        A_RI, B_OR = (one.to(d_R) for one in self._projections.of(out, width, d_R.device))
        return weight_OI + (b_O[:, None] * B_OR) @ (d_R[:, None] * A_RI)


IA3 = Ia3()
LOHA = Loha()
VERA = Vera()


def _kaiming(shape: tuple[int, int], numbers: MT19937) -> torch.Tensor:
    """Draw a matrix whose uniform distribution has the variance 2 / columns, bit for bit torch's.

    Each element takes the lower 24 bits of one number as a fraction. Its product with the width of
    the interval, plus the lower end, is rounded to f32 once, as by a fused multiply-add.
    """
    bound = math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(shape[1]))
    fractions = (numbers.random_raw(math.prod(shape)) & 0xFFFFFF) * 2.0**-24  # f64
    low, high = np.float32(-bound), np.float32(bound)
    values = fractions * np.float64(high - low) + np.float64(low)
    return torch.from_numpy(values.astype(np.float32)).reshape(shape)


def _of_shape(out: int, width: int, device: torch.device) -> torch.nn.Linear:
    """Return a layer whose weight is one number that is shown as ``[O, I]``."""
    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.in_features, layer.out_features = width, out
    one = torch.zeros((), device=device)
    layer.weight = torch.nn.Parameter(one.expand(out, width), requires_grad=False)
    return layer
