"""The quantized layers of a model, whichever binding made them."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, cast

from mens_exp.artifacts.quantizer_record import ModuleQuantizer, Quantizer
from mens_exp.config.quant import PATTERNS, ComputeDtype, QuantConfig
from mens_exp.layout.modules import linear_modules
from mens_exp.layout.targets import otherwise_quantized
from mens_exp.quant.binding import Binding, binding_of, loaded_bindings
from mens_exp.quant.bnb import EIGHT_BIT, FOUR_BIT

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from mens_exp.layout.shape import Shape


def _bindings() -> tuple[Binding, ...]:
    """Return bitsandbytes' bindings and the others that this process has loaded."""
    others = (one for one in loaded_bindings() if one not in (FOUR_BIT, EIGHT_BIT))
    return (FOUR_BIT, EIGHT_BIT, *others)


def binding_that_holds(module: torch.nn.Module) -> Binding | None:
    """Return the binding of a quantized module; None if the module is not quantized."""
    return next((one for one in _bindings() if one.holds(module)), None)


def quantized_linears(model: torch.nn.Module) -> dict[str, Any]:
    """Return the quantized linear modules of a model, untyped, by path."""
    return {name: m for name, m in model.named_modules() if binding_that_holds(m) is not None}


def _by_binding(model: torch.nn.Module) -> dict[Binding, list[Any]]:
    found: dict[Binding, list[Any]] = {}
    for module in model.modules():
        binding = binding_that_holds(module)
        if binding is not None:
            found.setdefault(binding, []).append(module)
    return found


def quantization_facts(
    model: torch.nn.Module, usual: str | None = None, block: int | None = None
) -> dict[str, Any]:
    """Read back how a model's linear layers are stored.

    Args:
        model: transformers' model; may have PEFT layers.
        usual: name of the quantizer to describe if there are several; None is the first layer's.
        block: block size to describe if the layers of that quantizer differ.

    Returns:
        The facts of one layer, ``quantized_linears``, and, if quantizers or block sizes differ, the
        number of layers of each as ``quantized_as`` and ``in_blocks_of``.
    """
    found = [b.facts(layer) for b, layers in _by_binding(model).items() for layer in layers]
    if not found:
        return {"quantized_linears": 0, "quant": "none"}
    many = dict(Counter(one["quant"] for one in found))
    blocks = Counter(str(one["block_size"]) for one in found if "block_size" in one)
    named = [one for one in found if one["quant"] == usual] or found[:1]
    return {
        "quantized_linears": len(found),
        **next((one for one in named if one.get("block_size") == block), named[0]),
        **({"quantized_as": many} if len(many) > 1 else {}),
        **({"in_blocks_of": dict(blocks)} if len(blocks) > 1 else {}),
    }


def parameter_count(model: torch.nn.Module) -> int:
    """Count parameters, each once; a quantized layer counts its dequantized weights."""
    layers = list(quantized_linears(model).values())
    codes = {id(layer.weight) for layer in layers}
    plain = sum(one.numel() for one in model.parameters() if id(one) not in codes)
    return plain + sum(int(layer.in_features * layer.out_features) for layer in layers)


def values_of(module: torch.nn.Module) -> torch.Tensor:
    """Return the weight of a linear layer, dequantized if necessary, f32 ``[O, I]``."""
    binding = binding_that_holds(module)
    if binding is not None:
        return binding.dequantized(module)
    weight_OI: torch.Tensor = module.get_parameter("weight")
    return weight_OI.float()


def quantizer_named(
    config: QuantConfig, *, rounded_to: ComputeDtype, skip: Sequence[str]
) -> Quantizer:
    """Describe the quantizer of the `quant` group for the record.

    Args:
        config: the `quant` group; it names a quantizer.
        rounded_to: the dtype to which weights are rounded before quantization.
        skip: paths of the projections that stay unquantized.
    """
    whole = {
        **_module_quantizer(config),
        "compute_dtype": config.compute_dtype.value,
        "rounded_to": rounded_to.value,
        "skip": list(skip),
    }
    return cast("Quantizer", whole)


def _module_quantizer(config: QuantConfig) -> ModuleQuantizer:
    found = ModuleQuantizer(
        quant_type=config.quant_type.value,
        block_size=config.block,
        double_quant=config.double_quant,
        library=binding_of(config.spec).library,
    )
    if "levels" in config.spec.settings:
        found["levels"] = list(config.levels)
    return found


def quantizer_in(model: torch.nn.Module, config: QuantConfig, shape: Shape) -> Quantizer | None:
    """Describe the quantizer of a causal model; unquantized layers are read from the graph.

    Args:
        model: transformers' model; may have PEFT layers.
        config: the `quant` group that it was loaded with.
        shape: shape of the model.

    Returns:
        The quantizer; None if nothing is quantized.
    """
    if not config.is_quantized:
        return None
    there = {path.removesuffix(".base_layer") for path in quantized_linears(model)}
    inside = [one.path for one in linear_modules(shape) if one.layer is not None]
    found = quantizer_named(
        config,
        rounded_to=config.compute_dtype,  # the loader's own cast
        skip=[path for path in inside if path not in there],
    )
    if any(getattr(config, name) for name in PATTERNS):
        found["modules"] = {
            path: _module_quantizer(one) for path, one in otherwise_quantized(config, shape).items()
        }
    return found


def keep_trainable(model: torch.nn.Module) -> None:
    """Make quantized modules compute the same in evaluation as in training; keep their backward."""
    for binding, layers in _by_binding(model).items():
        binding.keep_trainable(layers)


def keep_quantization_state(model: torch.nn.Module) -> None:
    """Store the quantization state on 4-bit layers before sharding removes their weights' class.

    For a weight gathered from shards, bitsandbytes reads the scales from the layer.
    """
    for module in quantized_linears(model).values():
        module.quant_state = module.weight.quant_state


def quantizes_inputs(model: torch.nn.Module) -> bool:
    """Return whether any layer of a model quantizes its inputs."""
    return any(
        binding.quantizes_inputs(layer)
        for binding, layers in _by_binding(model).items()
        for layer in layers
    )


def differs_in_evaluation(model: torch.nn.Module) -> bool:
    """Return whether other programs that load the quantized base evaluate it differently."""
    return any(
        binding.differs_in_evaluation(layer)
        for binding, layers in _by_binding(model).items()
        for layer in layers
    )


@contextmanager
def as_published(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, evaluate as other programs that load the quantized base do."""
    with ExitStack() as stack:
        for binding, layers in _by_binding(model).items():
            stack.enter_context(binding.as_published(layers))
        yield
