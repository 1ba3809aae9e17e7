"""Binding to bitsandbytes: its configuration, and what its CPU kernels need to stay right."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

import torch

from mens_exp.artifacts.quantizer import Quantizer
from mens_exp.config.quant import ComputeDtype, QuantConfig, StorageDtype
from mens_exp.layout.targets import linear_modules
from mens_exp.model.quiet import quiet

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import BitsAndBytesConfig

    from mens_exp.layout.shape import Shape

__all__ = [
    "compute_dtype",
    "dequantized",
    "keep_trainable",
    "quantization_config",
    "quantization_facts",
    "quantized_like",
    "quantized_linears",
    "quantizer_in",
    "quantizer_named",
]


_STORAGE = {
    StorageDtype.u8: torch.uint8,
    StorageDtype.bf16: torch.bfloat16,
    StorageDtype.f32: torch.float32,
}


def compute_dtype(config: QuantConfig) -> torch.dtype:
    """Return torch's name of the compute format."""
    return {ComputeDtype.bf16: torch.bfloat16, ComputeDtype.f32: torch.float32}[
        config.compute_dtype
    ]


def quantization_config(config: QuantConfig, skip: Sequence[str] = ()) -> BitsAndBytesConfig | None:
    """Translate the `quant` group for transformers' loader; None leaves weights as they are.

    Args:
        config: the `quant` group; its block size is not the loader's to choose.
        skip: paths of modules that stay unquantized, beside the head.
    """
    if not config.is_four_bit:
        return None
    from transformers import BitsAndBytesConfig

    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.quant_type.value,
        bnb_4bit_use_double_quant=config.double_quant,
        bnb_4bit_compute_dtype=compute_dtype(config),
        bnb_4bit_quant_storage=_STORAGE[config.storage_dtype],
        # Naming any replaces transformers' own choice, which is the head.
        llm_int8_skip_modules=[*skip, "lm_head"] if skip else None,
    )


def quantized_linears(model: torch.nn.Module) -> dict[str, Any]:
    """Return the 4-bit linear modules (bitsandbytes' untyped ``Linear4bit``) by path."""
    with quiet():  # imported first here where nothing is quantized
        from bitsandbytes.nn import Linear4bit
    return {name: m for name, m in model.named_modules() if isinstance(m, Linear4bit)}


def quantization_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Read back how a model's linear layers are stored."""
    layers = list(quantized_linears(model).values())
    if not layers:
        return {"quantized_linears": 0, "quant": "none"}
    state = layers[0].weight.quant_state
    return {
        "quantized_linears": len(layers),
        "quant": str(state.quant_type),
        "block_size": int(state.blocksize),
        "double_quant": bool(state.nested),
        "storage_dtype": str(layers[0].weight.dtype).removeprefix("torch."),
    }


def quantizer_named(
    config: QuantConfig, *, rounded_to: ComputeDtype, skip: Sequence[str]
) -> Quantizer:
    """Describe the quantizer of the `quant` group for the record.

    Args:
        config: the `quant` group, of four bits.
        rounded_to: what weights are rounded to before they are quantized.
        skip: paths of the projections that stay unquantized.
    """
    return Quantizer(
        quant_type=config.quant_type.value,
        block_size=config.block,
        double_quant=config.double_quant,
        compute_dtype=config.compute_dtype.value,
        rounded_to=rounded_to.value,
        skip=list(skip),
        library=f"bitsandbytes {metadata.version('bitsandbytes')}",
    )


def quantizer_in(model: torch.nn.Module, config: QuantConfig, shape: Shape) -> Quantizer | None:
    """Describe what quantized a causal model, its unquantized layers read back from the graph.

    Args:
        model: transformers' model; PEFT's layers may be on it.
        config: the `quant` group it was loaded with.
        shape: of the model.

    Returns:
        None where nothing is quantized.
    """
    if not config.is_four_bit:
        return None
    there = {path.removesuffix(".base_layer") for path in quantized_linears(model)}
    inside = [one.path for one in linear_modules(shape) if one.layer is not None]
    return quantizer_named(
        config,
        rounded_to=config.compute_dtype,  # the loader's own cast
        skip=[path for path in inside if path not in there],
    )


def keep_trainable(model: torch.nn.Module) -> None:
    """Keep 4-bit modules in the layout that has a backward pass.

    With AVX512-BF16, one evaluation forward repacks a module's weight for inference; from then
    on its backward returns no input gradient and every adapter below stops learning in silence.
    """
    for module in quantized_linears(model).values():
        module.support_avx512bf16_for_cpu = False


def dequantized(weight: Any) -> torch.Tensor:
    """Return what a 4-bit weight (bitsandbytes' untyped ``Params4bit``) stands for, f32 [O, I]."""
    from bitsandbytes.functional import dequantize_4bit

    values: torch.Tensor = dequantize_4bit(weight.data, weight.quant_state)
    return values.float()


def quantized_like(weight: Any, values_OI: torch.Tensor, *, block_size: int | None = None) -> Any:
    """Quantize other values the way a 4-bit weight was quantized.

    They are first rounded to the format that the loader rounds weights to, so that what comes
    out computes like any other 4-bit weight of the model.
    """
    from bitsandbytes.nn import Params4bit

    fresh = Params4bit(
        values_OI.to(weight.quant_state.dtype),
        requires_grad=False,
        blocksize=block_size or weight.blocksize,
        compress_statistics=weight.compress_statistics,
        quant_type=weight.quant_type,
        quant_storage=weight.quant_storage,
    )
    return fresh.to(values_OI.device)
