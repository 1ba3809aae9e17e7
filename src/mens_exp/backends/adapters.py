"""Adapted layers on a frozen base: placement and initialisation, for every method.

Some initialisations (PiSSA, LoftQ, LoRA-GA) change the base. The component that they subtract from
each layer is kept, so that the plain base can be restored.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.errors import ConfigError
from mens_exp.layout.modules import EXPERTS
from mens_exp.layout.peft_format import Stack, stacks_of
from mens_exp.layout.targets import without_experts
from mens_exp.lora.method import Site, Start, delta, initialization_of, method_of
from mens_exp.quant.bnb import dequantized, quantized_like

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.modules import LinearModule
    from mens_exp.lora.method import AdapterMethod, Pair
    from mens_exp.model.stored_weights import StoredWeights


def place_adapter(
    model: Any,
    lora: LoraConfig,
    modules: Sequence[LinearModule],
    family: Family,
    weights: StoredWeights,
) -> tuple[AdapterMethod, Any, dict[str, Any]]:
    """Add the layers of an adapter method to modules of the base model.

    Args:
        model: the base model.
        lora: the `lora` group.
        modules: the modules to adapt.
        family: the model's family.
        weights: the stored weights of the base.

    Returns:
        The method, the model to run, and its adapted layers by logical name: first those of linear
        modules, in the order of ``modules``, then those of experts.

    Raises:
        ConfigError: a module is not a linear layer of the loaded model, or the method refuses it.
        SetupError: the method cannot be used, or adapted other modules than the requested ones.
    """
    stacks = stacks_of(modules)
    plain = [one for one in modules if one.stack is None and one.norm is None]
    if not lora.spec.on_embedding:
        _refuse_absent(plain, _linear_paths(model), family)
    _refuse_other_norms(model, [one for one in modules if one.norm is not None])
    _refuse_other_experts(model, stacks, weights, without_experts(family, modules))
    sizes = [(one.out, one.width) for one in modules]
    method = method_of(lora.spec).sharing(lora.spec.projections(lora, sizes))
    return method, *method.place(model, lora, modules, family)


def _refuse_other_experts(
    model: Any, stacks: Sequence[Stack], weights: StoredWeights, remedy: str
) -> None:
    """Refuse a model whose expert tensors do not match its checkpoint.

    The first and the last expert of each layer are read again from the files. This ensures that the
    adapter belongs to the weights that its record names.

    Raises:
        ConfigError: a tensor is missing or has a different shape or different values.
    """
    parameters = dict(model.named_parameters()) if stacks else {}
    for stack in stacks:
        found = parameters.get(stack.path)
        if found is None or not _is_of(stack, found, weights):
            raise ConfigError(
                "the loaded model does not store its experts as the names in its checkpoint say",
                where="lora.targets",
                found=f"{stack.path}: {'absent' if found is None else list(found.shape)}",
                expected=f"{list(stack.shape)}, the stored experts one by one",
                remedy=remedy,
            )


def _is_of(stack: Stack, found_EOI: torch.Tensor, weights: StoredWeights) -> bool:
    """Compare the first and the last expert of a tensor with the checkpoint files."""
    import torch

    if tuple(found_EOI.shape) != stack.shape:
        return False
    for one in stack.members:
        assert one.slot is not None, "a member of a stack has a slot"
        expert = one.slot.expert
        if expert in {None, 0, stack.experts - 1}:
            held = (found_EOI if expert is None else found_EOI[expert])[..., stack.rows(one), :]
            stored = weights.read(one.path, found_EOI.device).to(found_EOI.dtype)
            if not torch.equal(held, stored):
                return False
    return True


def _refuse_absent(modules: Sequence[LinearModule], paths: Iterable[str], family: Family) -> None:
    """Refuse targets that the loaded model does not have as linear layers.

    This includes routers, because transformers implements most of them as a dedicated module. It
    also includes experts of models that are not known to store them in a form that PEFT's LoRA can
    adapt.

    Raises:
        ConfigError: a target is not a linear layer.
    """
    known = set(paths)
    absent = [one.path for one in modules if one.path not in known]
    if absent:
        there = [one.path for one in modules if one.path in known]
        raise ConfigError(
            "a target is not a linear layer of the loaded model",
            where="lora.targets",
            found=f"{absent[0]}, and {len(absent) - 1} more",
            expected="linear layers; routers and stacked experts are not supported",
            remedy=other_targets(family, there, absent),
        )


def _refuse_other_norms(model: Any, modules: Sequence[LinearModule]) -> None:
    """Refuse vectors of norms that the loaded model does not have, or that have another size.

    Raises:
        ConfigError: one is absent.
    """
    vectors = dict(model.named_parameters()) if modules else {}
    for one in modules:
        found = vectors.get(one.parameter)
        if found is None or tuple(found.shape) != (one.out,):
            raise ConfigError(
                "the loaded model does not have the norms that its checkpoint names",
                where="lora.targets",
                found=f"{one.parameter}: {'absent' if found is None else list(found.shape)}",
                expected=f"[{one.out}]",
                remedy="name norms of the model in lora.targets, or choose lora=all_linear",
            )


def other_targets(family: Family, there: Sequence[str], absent: Sequence[str] = ()) -> str:
    """Suggest targets that a model has, in place of absent ones."""
    if "attention" in family.groups:
        also = "; for the experts too, lora=experts lora.targets=[attention,experts]"
        return f"set lora=attention{also if EXPERTS in family.groups else ''}"
    possible, others = ({path.rpartition(".")[2] for path in paths} for paths in (there, absent))
    names = sorted(possible - others)
    return f"set lora.targets=[{','.join(names)}]" if names else "choose another model"


def _linear_paths(model: torch.nn.Module) -> list[str]:
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, Conv1D)
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, kinds) and _returns_a_tensor(module)
    ]


def _returns_a_tensor(module: Any) -> bool:
    """Return False for routers: Llama 4 derives them from a linear layer, but they pick experts."""
    import torch

    if not type(module).__module__.startswith("transformers.models."):
        return True
    with torch.no_grad():
        zeros = torch.zeros_like(module.weight[:1])
        return isinstance(module(zeros), torch.Tensor)


@dataclass(frozen=True, slots=True)
class QuantizationError:
    """Relative quantization error of a layer, ``|W − Ŵ| / |W|`` in Frobenius norms.

    Attributes:
        before: error of the plainly quantized weight.
        after: error of the base together with the initialised adapter.
    """

    before: float
    after: float


@dataclass(slots=True)
class _Residual:
    """A layer whose 4-bit weight holds a residual.

    ``plain`` and ``residual`` are bitsandbytes' (untyped) ``Params4bit``; one of them is in use.
    """

    module: Any
    taken: Pair
    plain: Any
    residual: Any


@dataclass(slots=True)
class Residuals:
    """Layers whose base was changed, with the state needed to switch to the plain base and back.

    Both 4-bit versions of each layer are kept, which costs an extra half byte per weight.
    """

    method: AdapterMethod
    weights: StoredWeights
    paths: dict[str, str]
    layers: dict[str, _Residual] = field(default_factory=dict)

    def take(self, logical: str, module: Any, taken: Pair) -> None:
        """Subtract ``taken`` from a layer's weight, quantize the residual, and use it."""
        base = module.get_base_layer()
        known = self.layers.get(logical)
        plain = known.plain if known is not None else base.weight
        device = base.weight.device
        weight_OI = self.weights.read(self.paths[logical], device)
        pair = (taken[0].to(device), taken[1].to(device))
        left_OI = weight_OI - delta(pair, self.method.scale(module))
        residual = quantized_like(plain, left_OI)
        self.layers[logical] = _Residual(module, pair, plain, residual)
        base.weight = residual

    @contextmanager
    def plain(self) -> Iterator[None]:
        """Use the plainly quantized weights inside the block; such blocks may be nested."""
        layers = [(one.module.get_base_layer(), one.plain) for one in self.layers.values()]
        before = [layer.weight for layer, _ in layers]
        try:
            for layer, weight in layers:
                layer.weight = weight
            yield
        finally:
            for (layer, _), weight in zip(layers, before, strict=True):
                layer.weight = weight

    def taken(self) -> dict[str, torch.Tensor]:
        """Return the subtracted pairs on CPU as ``{logical}.lora_a`` and ``{logical}.lora_b``."""
        return {
            f"{logical}.lora_{which}": matrix.to("cpu", torch.float32)
            for logical, one in self.layers.items()
            for which, matrix in zip("ab", one.taken, strict=True)
        }

    def restore(self, taken: Mapping[str, torch.Tensor]) -> None:
        """Rebuild the residual bases from pairs that were subtracted in another process.

        A decomposition may differ in its last bits on another machine. The base that an adapter was
        trained on depends only on the published weights and these matrices.
        """
        ours = self.taken()
        for logical, one in list(self.layers.items()):
            names = (f"{logical}.lora_a", f"{logical}.lora_b")
            if not all(torch.equal(ours[name], taken[name]) for name in names):
                self.take(logical, one.module, (taken[names[0]], taken[names[1]]))


def start_all(
    config: RunConfig,
    method: AdapterMethod,
    modules: Sequence[LinearModule | Stack],
    layers: Mapping[str, Any],
    weights: StoredWeights,
) -> tuple[Residuals, dict[str, QuantizationError], float]:
    """Initialise every adapter of a model in place.

    Args:
        config: the whole configuration.
        method: the adapter method.
        modules: the adapted modules; adapters of experts support random initialisation only.
        layers: the adapted layers by logical name.
        weights: the unquantized base.

    Returns:
        The layers whose base was changed, the quantization error of each layer if the
        initialisation depends on it, and the seconds that it took.
    """
    began = time.perf_counter()
    residuals = Residuals(method, weights, {one.logical: one.path for one in modules})
    errors: dict[str, QuantizationError] = {}
    for one in modules:
        module = layers[one.logical]
        if isinstance(one, Stack) or not config.lora.init.spec.from_weights:
            method.draw(module, seed=config.seed, logical=one.logical)
            if config.lora.init.spec.from_gradients:  # zeros until the gradients are known
                A_RI, B_OR = (method.parameters(module)[name] for name in ("lora_a", "lora_b"))
                nothing = (torch.zeros_like(A_RI.data), torch.zeros_like(B_OR.data))
                residuals.take(one.logical, module, nothing)
        else:
            errors[one.logical] = _from_weights(config, one, module, residuals)
    return residuals, errors, time.perf_counter() - began


def _from_weights(
    config: RunConfig, one: LinearModule, module: Any, residuals: Residuals
) -> QuantizationError:
    base, method = module.get_base_layer(), residuals.method
    weight_OI = residuals.weights.read(one.path, base.weight.device)
    before = _error(weight_OI, dequantized(base.weight))
    site = Site(
        weight_OI=weight_OI,
        rounded=lambda values_OI: dequantized(quantized_like(base.weight, values_OI)),
        r=method.parameters(module)["lora_a"].shape[0],
        scale=method.scale(module),
        layer=one.logical,
    )
    start = initialization_of(config.lora.init.spec).start(site, config.lora)
    if start.taken is not None:
        residuals.take(one.logical, module, start.taken)
    return QuantizationError(before=before, after=_set(method, module, start, weight_OI))


def start_from(residuals: Residuals, logical: str, module: Any, pair: Pair) -> QuantizationError:
    """Set an adapter's initial values and subtract their product from the base."""
    weight_OI = residuals.weights.read(residuals.paths[logical], pair[0].device)
    before = _error(weight_OI, dequantized(residuals.layers[logical].plain))
    residuals.take(logical, module, pair)
    start = Start(pair=pair, taken=pair)
    after = _set(residuals.method, module, start, weight_OI)
    return QuantizationError(before=before, after=after)


def _set(method: AdapterMethod, module: Any, start: Start, weight_OI: torch.Tensor) -> float:
    """Set an adapter's initial values, and return the quantization error with them."""
    method.set_start(module, start)
    seen_OI = dequantized(module.get_base_layer().weight) + delta(start.pair, method.scale(module))
    return _error(weight_OI, seen_OI)


def _error(weight_OI: torch.Tensor, seen_OI: torch.Tensor) -> float:
    return float((weight_OI - seen_OI).norm() / weight_OI.norm())


def start_facts(
    lora: LoraConfig, errors: Mapping[str, QuantizationError], seconds: float
) -> dict[str, Any]:
    """Report how the adapters were initialised and the effect on the quantization error."""
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
