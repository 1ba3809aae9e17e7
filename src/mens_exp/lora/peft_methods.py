"""Adapter methods of PEFT other than LoRA, around any linear layer.

PEFT's LoHa and LoKr layers read the shape of a weight from its storage, which is wrong for packed
4-bit weights. Here, PEFT's layer wraps a stand-in weight that has the right shape but takes no
memory, and computes only the update. The adapted layer computes the rest.

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

    from mens_exp.layout.modules import LinearModule
    from mens_exp.lora.method import Pair, Tensors

_ADAPTER = "default"
_NAME = "layer"
_ADALORA_STD = 0.02  # PEFT's, and the paper's code
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
    """(IA)³ on the outputs of keys, values, and an MLP's up projection.

    PEFT multiplies the input of the last layer of an MLP. In a gated MLP, ``(act(g) · u) W``, this
    equals multiplying the output u of `up_proj`, which is the target here.
    """

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the layer with its factors."""
        del lora
        return Ia3Layer(base, one)

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight with its rows multiplied."""
        del scale
        return weight_OI * tensors["ia3_l"][:, None]


class LycorisLayer(AdaptedLayer):
    """A linear layer, and an update of its weight's shape that PEFT's layer computes."""

    def __init__(self, base: torch.nn.Module, one: LinearModule, settings: Any) -> None:
        """Build PEFT's layer around a stand-in; the linear layer itself stays unchanged."""
        from peft import inject_adapter_in_model

        super().__init__(base)
        stand_in = _of_shape(one.out, one.width, next(base.parameters()).device)
        alone = torch.nn.ModuleDict({_NAME: stand_in})
        made = inject_adapter_in_model(settings, alone, adapter_name=_ADAPTER)[_NAME]
        self._of_peft = [made]  # in a list, so that torch does not register the parameters twice
        self.scale = float(made.scaling[_ADAPTER])
        for part in made.adapter_layer_names:
            parameters = getattr(made, part)
            if _ADAPTER in parameters:
                self.register_parameter(part, parameters[_ADAPTER])

    def adapted(self, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Add the product of the input and PEFT's update."""
        update_OI: torch.Tensor = self._of_peft[0].get_delta_weight(_ADAPTER)
        return plain + torch.nn.functional.linear(x.to(update_OI.dtype), update_OI)


class _Lycoris(AdapterMethod):
    """A method of :class:`LycorisLayer`, one of whose tensors is initially zero."""

    settings: str  # PEFT's class
    zero: str

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the layer with PEFT's update."""
        import peft

        settings = getattr(peft, self.settings)
        return LycorisLayer(base, one, settings(r=lora.r, alpha=lora.alpha, target_modules=[_NAME]))

    def draw(self, layer: Any, *, seed: int, logical: str) -> None:
        """Draw the other tensors as PEFT does, each from its own generator."""
        with torch.no_grad():
            for name, parameter in layer.named_parameters(recurse=False):
                generator = torch.Generator().manual_seed(key_of(seed, name, logical))
                bound = 1 / math.sqrt(parameter.shape[1])
                draws = torch.empty(parameter.shape).uniform_(-bound, bound, generator=generator)
                parameter.copy_(torch.zeros_like(draws) if name == self.zero else draws)

    def scale(self, layer: Any) -> float:
        """Return ``alpha / r``."""
        return float(layer.scale)


class Loha(_Lycoris):
    """LoHa (FedPara, arXiv:2108.06098): ``s · (w1_a w1_b) ⊙ (w2_a w2_b)`` of rank up to R²."""

    settings, zero = "LoHaConfig", "hada_w2_b"

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight plus the update."""
        first_OI = tensors["hada_w1_a"] @ tensors["hada_w1_b"]
        second_OI = tensors["hada_w2_a"] @ tensors["hada_w2_b"]
        return weight_OI + scale * first_OI * second_OI


class Lokr(_Lycoris):
    """LoKr (LyCORIS, arXiv:2309.14859): ``s · w1 ⊗ (w2_a w2_b)``, a Kronecker product."""

    settings, zero = "LoKrConfig", "lokr_w1"

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight plus the update."""
        second = tensors["lokr_w2_a"] @ tensors["lokr_w2_b"]
        return weight_OI + scale * torch.kron(tensors["lokr_w1"], second)


class AdaloraLayer(AdaptedLayer):
    """A linear layer, and ``B diag(e) A`` with a factor in e for each rank."""

    def __init__(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> None:
        """Start with factors of zero, as PEFT does."""
        super().__init__(base)
        device = next(base.parameters()).device
        self.adalora_a = torch.nn.Parameter(torch.empty(lora.r, one.width, device=device))
        self.adalora_e = torch.nn.Parameter(torch.zeros(lora.r, device=device))
        self.adalora_b = torch.nn.Parameter(torch.empty(one.out, lora.r, device=device))
        self.scale = float(lora.alpha / lora.r)

    def adapted(self, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Add ``s · B (e ⊙ A) x``."""
        first_RI = self.adalora_a * self.adalora_e[:, None]
        low = torch.nn.functional.linear(x.to(first_RI.dtype), first_RI)
        high: torch.Tensor = torch.nn.functional.linear(low, self.adalora_b)
        return plain + high * _of_adalora(self.scale, len(first_RI))


class Adalora(AdapterMethod):
    """AdaLoRA (arXiv:2303.10512): ``s · B diag(e) A``, whose unimportant factors become zero.

    :mod:`mens_exp.training.adalora` decides which.
    """

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the layer with its tensors."""
        return AdaloraLayer(base, one, lora)

    def draw(self, layer: Any, *, seed: int, logical: str) -> None:
        """Draw A and B from PEFT's normal distribution, each from its own generator."""
        with torch.no_grad():
            for name in ("adalora_a", "adalora_b"):
                generator = torch.Generator().manual_seed(key_of(seed, name, logical))
                parameter = getattr(layer, name)
                draws = torch.empty(parameter.shape).normal_(0, _ADALORA_STD, generator=generator)
                parameter.copy_(draws)

    def scale(self, layer: Any) -> float:
        """Return ``alpha / r``."""
        return float(layer.scale)

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight plus the update."""
        first_RI = tensors["adalora_a"] * tensors["adalora_e"][:, None]
        return weight_OI + (tensors["adalora_b"] @ first_RI) * _of_adalora(scale, len(first_RI))


def _of_adalora(scale: float, r: int) -> float:
    """Return the scale that PEFT applies: ``alpha / (r + 1e-5)``."""
    return scale * r / (r + 1e-5)


class Projections:
    """VeRA's frozen matrices A ``[R, I]`` and B ``[O, R]``, sized for the largest layer.

    They are stored once, outside the layers, and are redrawn from their seed. The numbers are those
    of torch's generator on a CPU, whose stream NumPy guarantees.
    """

    def __init__(self, described: Mapping[str, Any]) -> None:
        """Draw the matrices.

        Raises:
            DataError: the values do not match the hash in the description.
        """
        numbers = MT19937()
        numbers._legacy_seeding(described["seed"])  # noqa: SLF001 - as torch seeds its own
        pair = self.drawn(numbers, *(described[name] for name in ("r", "out", "width")))
        self._held = pair
        digest = hashlib.sha256()
        for matrix in pair:
            digest.update(matrix.numpy().tobytes())
        self.described = {**described, "sha256": digest.hexdigest()}
        if described.get("sha256", digest.hexdigest()) != digest.hexdigest():
            raise DataError(
                "the projections of the adapter do not match its seed and sizes",
                where="mens_exp.projections.sha256",
                found=digest.hexdigest(),
                expected=described["sha256"],
                remedy="use an adapter that this program wrote",
            )

    def drawn(self, numbers: MT19937, r: int, out: int, width: int) -> Pair:
        """Draw A and then B as PEFT does (`projection_prng_key`): Kaiming uniform, f32."""
        bounds = (math.sqrt(3.0) * (math.sqrt(2) / math.sqrt(columns)) for columns in (width, r))
        A_RI, B_OR = map(_uniform, ((r, width), (out, r)), bounds, (numbers, numbers))
        return A_RI, B_OR

    def of(
        self, out: int, width: int, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> Pair:
        """Return the part of A and of B that a layer of that size uses, on a device."""
        A, B = self._held
        if (A.device, A.dtype) != (device, dtype):
            A, B = self._held = A.to(device, dtype), B.to(device, dtype)
        return self.part(A, B, out, width)

    def part(self, A_RI: torch.Tensor, B_OR: torch.Tensor, out: int, width: int) -> Pair:
        """Return the first columns of A and the first rows of B."""
        return A_RI[:, :width], B_OR[:out]


class Bases(Projections):
    """RandLoRA's frozen A ``[R, 1, S]`` and N bases B ``[L, N, R]``, sized for the largest layer.

    S is the smaller side of a layer and L the larger one; N bases of rank R make up rank S. PEFT
    draws numbers in bf16 and divides them by their standard deviation, so that bf16 and f32 hold
    the same values.
    """

    def drawn(self, numbers: MT19937, r: int, out: int, width: int) -> Pair:
        """Draw A and then B, a basis at a time, as PEFT does."""
        small, large = sorted((out, width))
        A_R1S = _in_bf16((r, 1, small), numbers)
        bases = [_in_bf16((large, 1, r), numbers) for _ in range(-(-small // r))]
        A, B = (one / one.double().std().to(one.dtype) for one in (A_R1S, torch.cat(bases, dim=1)))
        return A.float(), B.float()

    def part(self, A_R1S: torch.Tensor, B_LNR: torch.Tensor, out: int, width: int) -> Pair:
        """Return A ``[R, 1, S]`` and the layer's bases as ``[L, N · R]``, a view of B."""
        small, large = sorted((out, width))
        columns = -(-small // len(A_R1S)) * len(A_R1S)
        return A_R1S[:, :, :small], B_LNR.flatten(1)[:large, :columns]


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
        """Store the projections of one adapter; `sharing` draws them."""
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


class RandLoraLayer(AdaptedLayer):
    """A linear layer, and factors on the shared bases."""

    def __init__(self, base: torch.nn.Module, one: LinearModule, lora: Any, shared: Any) -> None:
        """Start with an update of zero, as PEFT does."""
        super().__init__(base)
        device, small = next(base.parameters()).device, min(one.out, one.width)
        bases = -(-small // lora.r)
        self.randlora_lambda = torch.nn.Parameter(torch.zeros(lora.r, bases, device=device))
        first_NS = torch.full((bases, small), 1 / max(bases, small), device=device)
        self.randlora_gamma = torch.nn.Parameter(first_NS)
        self.scale = float(lora.alpha / lora.r)
        self.size, self._shared = (one.out, one.width), shared

    def adapted(self, x: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Add the update; the trained factors belong to the smaller side of the layer."""
        from peft.tuners.randlora.layer import UniqueBaseGrad

        kind = x.device.type
        autocast = torch.is_autocast_enabled(kind)
        dtype = torch.get_autocast_dtype(kind) if autocast else torch.float32
        A_R1S, B_LM = self._shared.of(*self.size, x.device, dtype)
        factors = UniqueBaseGrad.apply(A_R1S, self.randlora_lambda, self.randlora_gamma)
        made_MS = factors.flatten(end_dim=1)
        out, width = self.size
        first, last = (made_MS, B_LM) if width <= out else (B_LM.T, made_MS.T)
        low = torch.nn.functional.linear(x.to(dtype), first)
        high: torch.Tensor = torch.nn.functional.linear(low, last)
        return plain + high * self.scale


class RandLora(Vera):
    """RandLoRA (arXiv:2502.00987): ``s · Σ_n B_n Λ_n A Γ_n``, where all layers have one A and B.

    As in PEFT, rows of the factors are in the order r · N + n, and columns of the bases in the
    order n · R + r: each basis is multiplied by the factors of several.
    """

    def sharing(self, projections: Mapping[str, Any]) -> AdapterMethod:
        """Draw the bases."""
        return RandLora(Bases(projections))

    def layer(self, base: torch.nn.Module, one: LinearModule, lora: Any) -> AdaptedLayer:
        """Return the layer with its factors."""
        return RandLoraLayer(base, one, lora, self._projections)

    def scale(self, layer: Any) -> float:
        """Return ``alpha / r``."""
        return float(layer.scale)

    def weight(self, weight_OI: torch.Tensor, tensors: Tensors, *, scale: float) -> torch.Tensor:
        """Return the weight plus the update.

        Raises:
            DataError: the tensors are of a layer of another size.
        """
        assert self._projections is not None, "`sharing` has drawn them"
        lambda_RN, gamma_NS = tensors["randlora_lambda"], tensors["randlora_gamma"]
        small = min(weight_OI.shape)
        expected = [-(-small // len(lambda_RN)), small]
        if list(gamma_NS.shape) != expected:
            raise DataError(
                "the factors belong to a layer of another size",
                where="randlora_gamma",
                found=list(gamma_NS.shape),
                expected=f"{expected}, for a weight of {list(weight_OI.shape)}",
            )
        out, width = weight_OI.shape
        pair = self._projections.of(out, width, lambda_RN.device)
        A_R1S, B_LM = (one.to(lambda_RN) for one in pair)
        made_MS = (lambda_RN[:, :, None] * A_R1S * gamma_NS).flatten(end_dim=1)
        update_LS = B_LM @ made_MS
        return weight_OI + scale * (update_LS if width <= out else update_LS.T)


IA3 = Ia3()
LOHA = Loha()
LOKR = Lokr()
ADALORA = Adalora()
VERA = Vera()
RANDLORA = RandLora()


def _uniform(shape: tuple[int, ...], bound: float, numbers: MT19937) -> torch.Tensor:
    """Draw numbers from an interval around zero, f32, bit for bit torch's.

    Each element takes the lower 24 bits of one number as a fraction. Its product with the width of
    the interval, plus the lower end, is rounded to f32 once, as by a fused multiply-add.
    """
    fractions = (numbers.random_raw(math.prod(shape)) & 0xFFFFFF) * 2.0**-24  # f64
    low, high = np.float32(-bound), np.float32(bound)
    values = fractions * np.float64(high - low) + np.float64(low)
    return torch.from_numpy(values.astype(np.float32)).reshape(shape)


def _in_bf16(shape: tuple[int, ...], numbers: MT19937) -> torch.Tensor:
    """Draw numbers in bf16, as torch 2.13 does, with PEFT's bound for RandLoRA.

    The interval excludes its upper end: values rounded to it become the lower end.
    """
    bound = 1 / math.sqrt(math.prod(shape[1:]))
    values = _uniform(shape, bound, numbers).bfloat16()
    end = torch.tensor(bound).bfloat16()
    return torch.where(values == end, -end, values)


def _of_shape(out: int, width: int, device: torch.device) -> torch.nn.Linear:
    """Return a layer whose weight is one number, expanded to ``[O, I]`` without memory."""
    layer = torch.nn.Linear(1, 1, bias=False, device="meta")
    layer.in_features, layer.out_features = width, out
    one = torch.zeros((), device=device)
    layer.weight = torch.nn.Parameter(one.expand(out, width), requires_grad=False)
    return layer
