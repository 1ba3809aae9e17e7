"""LoRA layers on a frozen base through PEFT: placement and initialisation.

Some initialisations (PiSSA, LoftQ) change the base. The component that they subtract from each
layer is kept, so that the plain base can be restored.

Shapes: R rank, I inputs and O outputs of a projection.
"""

from __future__ import annotations

import re
import time
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.errors import ConfigError, SetupError
from mens_exp.layout.peft_format import Stack, stacks_of
from mens_exp.layout.targets import EXPERTS, pattern_values, shortest_names, without_experts
from mens_exp.lora import low_rank
from mens_exp.lora.keyed import initialise
from mens_exp.model.quiet import quiet
from mens_exp.quant.bnb import dequantized, quantized_like, values_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.targets import LinearModule
    from mens_exp.lora.low_rank import Pair, Start
    from mens_exp.model.stored_weights import StoredWeights

ADAPTER = "default"  # PEFT's own name for a single adapter
_PREFIX = "base_model.model."


def adapted(
    model: Any,
    lora: LoraConfig,
    modules: Sequence[LinearModule],
    family: Family,
    weights: StoredWeights,
) -> tuple[Any, dict[str, Any]]:
    """Add PEFT's LoRA layers to modules of the base model.

    Args:
        model: the base model.
        lora: rank, alpha and variant.
        modules: the modules to adapt.
        family: the model's family.
        weights: the stored weights of the base.

    Returns:
        The PEFT model, and its LoRA layers by logical name: first those of linear modules, in the
        order of ``modules``, then those of experts.

    Raises:
        ConfigError: a module is not a linear layer of the loaded model, or PEFT refuses it.
        SetupError: PEFT adapted modules other than the requested ones.
    """
    from peft import get_peft_model

    stacks = stacks_of(modules)
    plain = [one for one in modules if one.stack is None]
    _refuse_absent(plain, _linear_paths(model), family)
    _refuse_other_experts(model, stacks, weights, without_experts(family, modules))
    paths = [path for path, _ in model.named_modules()]
    wanted = peft_config(lora, modules, family, paths)
    try:
        with quiet(), tied_head_is_meant():
            peft = get_peft_model(model, wanted, adapter_name=ADAPTER)
    except ValueError as error:
        raise ConfigError(
            "PEFT refuses the targets on this model",
            where="lora.targets",
            found=str(error),
            remedy=_other_targets(family, ()),
        ) from error
    layers = dict(lora_layers(peft))
    sites: list[LinearModule | Stack] = [*plain, *stacks]
    expected = {f"{_PREFIX}{one.path}" for one in sites}
    if layers.keys() != expected:
        raise SetupError(
            "PEFT put its layers on other modules than the plan's",
            where="lora.targets",
            found=", ".join(sorted(layers.keys() ^ expected)[:8]),
            expected="the modules of layout/targets.py",
            remedy=_other_targets(family, sorted(layers.keys() & expected)),
        )
    return peft, {one.logical: layers[f"{_PREFIX}{one.path}"] for one in sites}


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
                "the loaded model holds its experts otherwise than its checkpoint's names say",
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
            expected="linear layers, of which routers and stacked experts are none",
            remedy=_other_targets(family, there, absent),
        )


def _other_targets(family: Family, there: Sequence[str], absent: Sequence[str] = ()) -> str:
    if "attention" in family.groups:
        also = "; for the experts too, lora=experts lora.targets=[attention,experts]"
        return f"set lora=attention{also if EXPERTS in family.groups else ''}"
    possible, others = ({path.rpartition(".")[2] for path in paths} for paths in (there, absent))
    names = sorted(possible - others)
    return f"set lora.targets=[{','.join(names)}]" if names else "choose another model"


def peft_config(
    lora: LoraConfig, modules: Sequence[LinearModule], family: Family, paths: Iterable[str]
) -> Any:
    """Translate the `lora` config group into PEFT's configuration.

    Args:
        lora: rank, alpha and variant.
        modules: the modules to adapt.
        family: the model's family.
        paths: the paths of all modules of the model.
    """
    from peft import LoraConfig as PeftLora

    ranks = pattern_values(lora.rank_pattern, modules, family, lora.r)
    alphas = pattern_values(lora.alpha_pattern, modules, family, lora.alpha)
    names = {one.path: one.stack or one.path for one in modules}
    # A stack of experts takes the values of its members, under the path that PEFT uses for it.
    ranks, alphas = ({names[p]: v for p, v in found.items()} for found in (ranks, alphas))
    plain = [one.path for one in modules if one.stack is None]
    return PeftLora(
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=shortest_names(plain, list(paths)),
        target_parameters=[one.path for one in stacks_of(modules)] or None,
        rank_pattern={re.escape(path): r for path, r in ranks.items() if r != lora.r},
        alpha_pattern={re.escape(path): a for path, a in alphas.items() if a != lora.alpha},
        use_rslora=lora.variant is LoraVariant.rslora,
        use_dora=lora.variant is LoraVariant.dora,
        task_type="CAUSAL_LM",
    )


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


@contextmanager
def tied_head_is_meant() -> Iterator[None]:
    """Silence PEFT's warning about a tied head, because training does not change the shared table.

    The adapter's manifest records what a merge has to consider.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model (has|with) `tie_word_embeddings=True`")
        # PEFT looks for the experts' patterns among modules only and warns, but it still applies
        # them.
        warnings.filterwarnings("ignore", message=r"The following (rank|alpha)_pattern keys did no")
        # GPT-2's Conv1D layers store their weights transposed; PEFT detects this and warns.
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to")
        yield


def lora_layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield PEFT's LoRA layers with the path of the module or, for experts, of the parameter."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.layer import ParamWrapper

    for path, module in model.named_modules():
        if isinstance(module, ParamWrapper):  # one around the other where a module has several
            yield f"{path.replace('.base_layer', '')}.{module.parameter_name}", module
        elif isinstance(module, LoraLayer):
            yield path, module


def parameters_of(module: Any) -> dict[str, torch.nn.Parameter]:
    """Return a LoRA layer's parameters: A ``[R, I]``, B ``[O, R]``, and DoRA's magnitudes ``[O]``.

    The parameters of experts have the shapes that :mod:`mens_exp.layout.peft_format` describes.
    """
    found = {"lora_a": module.lora_A[ADAPTER].weight, "lora_b": module.lora_B[ADAPTER].weight}
    if ADAPTER in module.lora_magnitude_vector:
        found["lora_magnitude"] = module.lora_magnitude_vector[ADAPTER].weight
    return found


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
        left_OI = weight_OI - low_rank.delta(pair, scale_of(module))
        residual = quantized_like(plain, left_OI)
        self.layers[logical] = _Residual(module, pair, plain, residual)
        base.weight = residual

    def use(self, *, plain: bool) -> None:
        """Switch every layer to its plain or its residual weights."""
        for one in self.layers.values():
            one.module.get_base_layer().weight = one.plain if plain else one.residual

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


def scale_of(module: Any) -> float:
    """Return the scaling factor of ``B A`` in one of PEFT's LoRA layers."""
    return float(module.scaling[ADAPTER])


def start_all(
    config: RunConfig,
    modules: Sequence[LinearModule | Stack],
    layers: Mapping[str, Any],
    weights: StoredWeights,
) -> tuple[Residuals, dict[str, QuantizationError], float]:
    """Initialise every adapter of a model in place.

    Args:
        config: the whole configuration.
        modules: the adapted modules; adapters of experts support random initialisation only.
        layers: PEFT's LoRA layers by logical name.
        weights: the unquantized base.

    Returns:
        The layers whose base was changed, the quantization error of each layer if the
        initialisation depends on it, and the seconds that it took.
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
    seen_OI = dequantized(base.weight) + low_rank.delta(start.pair, scale_of(module))
    return QuantizationError(before=before, after=_error(weight_OI, seen_OI))


def _start(config: RunConfig, one: LinearModule, module: Any, weight_OI: torch.Tensor) -> Start:
    base = module.get_base_layer()
    r, scale = int(module.r[ADAPTER]), scale_of(module)
    if config.lora.init is LoraInit.pissa:
        return low_rank.pissa(weight_OI, r=r, scale=scale, layer=one.logical)

    def rounded(values_OI: torch.Tensor) -> torch.Tensor:
        return dequantized(quantized_like(base.weight, values_OI))

    return low_rank.loftq(
        weight_OI, rounded, r=r, scale=scale, layer=one.logical, iters=config.lora.loftq_iters
    )


def _set(module: Any, pair: Pair) -> None:
    found = parameters_of(module)
    with torch.no_grad():
        found["lora_a"].copy_(pair[0])
        found["lora_b"].copy_(pair[1])


def _set_lengths(module: Any) -> None:
    """Set DoRA's magnitudes to the initial weights' norms, so that it starts as the identity."""
    found = parameters_of(module)
    if "lora_magnitude" in found:
        weight_OI = values_of(module.get_base_layer())
        weight_OI = weight_OI + scale_of(module) * (found["lora_b"] @ found["lora_a"])
        with torch.no_grad():
            found["lora_magnitude"].copy_(torch.linalg.norm(weight_OI, dim=1))


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
