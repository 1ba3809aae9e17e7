"""Initial values of a graph's adapters, and the base that each initialization leaves.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.adapting import ADAPTER, parameters_of
from mens_exp.config.lora import LoraInit
from mens_exp.layout.experts import Stack
from mens_exp.lora import from_weights
from mens_exp.lora.keyed import initialise
from mens_exp.quant.bnb import dequantized, quantized_like

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.targets import LinearModule
    from mens_exp.lora.from_weights import Pair, Start
    from mens_exp.model.stored_weights import StoredWeights

__all__ = ["QuantizationError", "Residuals", "scale_of", "start_all"]


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Distance of a layer from its unquantized weight, ``|W − Ŵ| / |W|`` in Frobenius norms.

    Attributes:
        before: of the plainly quantized weight.
        after: of the base with the adapter it starts from.
    """

    before: float
    after: float


@dataclass(slots=True)
class _Residual:
    """One layer whose 4-bit weight is that of a residual.

    ``plain`` and ``residual`` are bitsandbytes' untyped ``Params4bit``; one of them is in use.
    """

    module: Any
    taken: Pair
    plain: Any
    residual: Any


@dataclass(slots=True)
class Residuals:
    """The layers whose base was changed: what is needed to go back to the plain base and return.

    Both 4-bit weights of such a layer are kept: half a byte more for each of its weights.
    """

    weights: StoredWeights
    paths: dict[str, str]
    layers: dict[str, _Residual] = field(default_factory=dict)

    def take(self, logical: str, module: Any, taken: Pair) -> None:
        """Quantize what is left of a layer's weight once ``taken`` is out, and use that."""
        base = module.get_base_layer()
        known = self.layers.get(logical)
        plain = known.plain if known is not None else base.weight
        device = base.weight.device
        weight_OI = self.weights.read(self.paths[logical], device)
        pair = (taken[0].to(device), taken[1].to(device))
        left_OI = weight_OI - from_weights.delta(pair, scale_of(module))
        residual = quantized_like(plain, left_OI)
        self.layers[logical] = _Residual(module, pair, plain, residual)
        base.weight = residual

    def use(self, *, plain: bool) -> None:
        """Put the plain or the residual weights into every layer."""
        for one in self.layers.values():
            one.module.get_base_layer().weight = one.plain if plain else one.residual

    def taken(self) -> dict[str, torch.Tensor]:
        """Return what was taken out, on CPU, by ``{logical}.lora_a`` and ``{logical}.lora_b``."""
        return {
            f"{logical}.lora_{which}": matrix.to("cpu", torch.float32)
            for logical, one in self.layers.items()
            for which, matrix in zip("ab", one.taken, strict=True)
        }

    def restore(self, taken: Mapping[str, torch.Tensor]) -> None:
        """Rebuild the bases of layers from what was taken out of their weights elsewhere.

        A decomposition may differ in its last bits on another machine; the base that an adapter
        was trained on is a function of the weights and of these matrices alone.
        """
        ours = self.taken()
        for logical, one in list(self.layers.items()):
            names = (f"{logical}.lora_a", f"{logical}.lora_b")
            if not all(torch.equal(ours[name], taken[name]) for name in names):
                self.take(logical, one.module, (taken[names[0]], taken[names[1]]))


def scale_of(module: Any) -> float:
    """Return the factor before ``B A`` of one of PEFT's LoRA layers."""
    return float(module.scaling[ADAPTER])


def start_all(
    config: RunConfig,
    modules: Sequence[LinearModule | Stack],
    layers: Mapping[str, Any],
    weights: StoredWeights,
) -> tuple[Residuals, dict[str, QuantizationError], float]:
    """Initialise every adapter of a graph in place.

    Args:
        config: the whole configuration.
        modules: what the adapters sit on; experts start at random alone.
        layers: PEFT's LoRA layers by logical name.
        weights: the unquantized base.

    Returns:
        The layers whose base was changed, the quantization error of each layer where the start
        depends on it, and the seconds that it took.
    """
    began = time.perf_counter()
    residuals = Residuals(weights, {one.logical: one.path for one in modules})
    errors: dict[str, QuantizationError] = {}
    for one in modules:
        module = layers[one.logical]
        if config.lora.init is LoraInit.default or isinstance(one, Stack):
            found = parameters_of(module)
            initialise(found["lora_a"], found["lora_b"], seed=config.seed, layer=one.logical)
        else:
            errors[one.logical] = _from_weights(config, one, module, residuals)
    return residuals, errors, time.perf_counter() - began


def _from_weights(
    config: RunConfig, one: LinearModule, module: Any, residuals: Residuals
) -> QuantizationError:
    base = module.get_base_layer()
    weight_OI = residuals.weights.read(one.path, base.weight.device)
    before = _error(weight_OI, dequantized(base.weight))
    start = _start(config, one, module, weight_OI)
    _set(module, start.pair)
    if start.taken is not None:
        residuals.take(one.logical, module, start.taken)
    _set_lengths(module)
    seen_OI = dequantized(base.weight) + from_weights.delta(start.pair, scale_of(module))
    return QuantizationError(before=before, after=_error(weight_OI, seen_OI))


def _start(config: RunConfig, one: LinearModule, module: Any, weight_OI: torch.Tensor) -> Start:
    base = module.get_base_layer()
    r, scale = int(module.r[ADAPTER]), scale_of(module)
    if config.lora.init is LoraInit.pissa:
        return from_weights.pissa(weight_OI, r=r, scale=scale, layer=one.logical)

    def rounded(values_OI: torch.Tensor) -> torch.Tensor:
        return dequantized(quantized_like(base.weight, values_OI))

    return from_weights.loftq(
        weight_OI, rounded, r=r, scale=scale, layer=one.logical, iters=config.lora.loftq_iters
    )


def _set(module: Any, pair: Pair) -> None:
    found = parameters_of(module)
    with torch.no_grad():
        found["lora_a"].copy_(pair[0])
        found["lora_b"].copy_(pair[1])


def _set_lengths(module: Any) -> None:
    """Make DoRA's lengths those of the weights it starts from, so that it changes nothing yet."""
    found = parameters_of(module)
    if "lora_magnitude" in found:
        weight_OI = dequantized(module.get_base_layer().weight)
        weight_OI = weight_OI + scale_of(module) * (found["lora_b"] @ found["lora_a"])
        with torch.no_grad():
            found["lora_magnitude"].copy_(torch.linalg.norm(weight_OI, dim=1))


def _error(weight_OI: torch.Tensor, seen_OI: torch.Tensor) -> float:
    return float((weight_OI - seen_OI).norm() / weight_OI.norm())


def start_facts(
    lora: LoraConfig, errors: Mapping[str, QuantizationError], seconds: float
) -> dict[str, Any]:
    """Say what adapters started from, and what that did to the quantization error."""
    facts: dict[str, Any] = {"lora_init": lora.init.value}
    if errors:
        worst = max(errors, key=lambda name: errors[name].after)
        facts |= {
            "init_s": round(seconds, 1),
            "quantization_error_before": mean(one.before for one in errors.values()),
            "quantization_error_after": mean(one.after for one in errors.values()),
            "quantization_error_worst_layer": worst,
            "quantization_error_worst": errors[worst].after,
        }
    return facts
