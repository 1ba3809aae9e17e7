"""The frozen base: loaded by transformers, quantized by bitsandbytes, prepared by us."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.leak_trial import refuse_leaks
from mens_exp.errors import ModelFileError, SetupError
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import skipped
from mens_exp.model import attention
from mens_exp.model.quiet import quiet
from mens_exp.model.stored_weights import StoredWeights
from mens_exp.quant.bnb import (
    compute_dtype,
    keep_trainable,
    quantization_config,
    quantized_like,
    quantized_linears,
)

if TYPE_CHECKING:
    from collections.abc import Collection
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.model.resolve import BaseModel

__all__ = ["frozen_weights", "load_base"]


def frozen_weights(directory: Path) -> SetupError:
    """Return the error for who wants the weights of a base that was not trained."""
    return SetupError(
        "the base was frozen; its weights are the published ones",
        where=str(directory),
        expected="the adapter, which is what was trained",
        remedy="merge the adapter into the base",
    )


def load_base(
    config: RunConfig, base: BaseModel, device: torch.device, *, dtype: torch.dtype | None = None
) -> Any:
    """Return the causal model on its device, quantized as configured, every parameter frozen.

    Args:
        config: the whole configuration.
        base: the model on disk.
        device: where to put it.
        dtype: of what is not quantized; None is the compute format.

    Raises:
        SetupError: nothing was quantized.
        ModelFileError: the model's code cannot do what is asked of it.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    left_out, shape = config.quant.skip, shape_of(config.model)
    skip = [one.path for one in skipped(left_out, shape)] if left_out else []
    with quiet():
        model, loading = AutoModelForCausalLM.from_pretrained(
            base.directory,
            dtype=dtype or compute_dtype(config.quant),
            quantization_config=quantization_config(config.quant, skip),
            attn_implementation=attention.IMPLEMENTATION,
            device_map={"": device},  # left open, bitsandbytes takes a GPU wherever there is one
            use_safetensors=True,
            trust_remote_code=base.trust_remote_code,  # left open, transformers would ask
            output_loading_info=True,
        )
    _refuse_random(loading["missing_keys"], base)
    if config.quant.is_quantized:
        _check_and_block(model, config, base)
    if base.source == "hub":
        model.name_or_path = base.name  # what PEFT writes down as the base, and others can load
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # a frozen base drops nothing of its own; GPT-2 would, at three places
    model.requires_grad_(requires_grad=False)
    if base.trust_remote_code or (config.data.packing and not shape.family.verified):
        refuse_leaks(model)
    return model


def _refuse_random(missing: Collection[str], base: BaseModel) -> None:
    """Refuse a checkpoint that lacks weights, which transformers draws at random with a notice.

    Raises:
        ModelFileError: naming the first of them.
    """
    if missing:
        raise ModelFileError(
            "the checkpoint lacks weights of the model that its config.json names",
            where=str(base.directory),
            found=f"no {min(missing)}, {len(missing)} in all",
            expected="every weight; what is absent would be random",
            remedy="look at model_type in config.json, or download the model again",
        )


def _check_and_block(model: Any, config: RunConfig, base: BaseModel) -> None:
    """Prepare quantized layers for training, 4-bit ones in blocks of the size that is asked for.

    bitsandbytes' configuration has no block size, so that other blocks are made here, from the
    published weights: what 64 have left of them would be rounded twice.

    Raises:
        SetupError: nothing was quantized.
    """
    layers = quantized_linears(model)
    if not layers:
        raise SetupError(
            "no linear layer was quantized",
            found=f"bitsandbytes on {model.device}",
            expected=f"{config.quant.quant_type.value} linear layers",
            remedy="reinstall bitsandbytes for this machine",
        )
    keep_trainable(model)
    if not config.quant.is_four_bit:
        return
    block = config.quant.block
    others = {p: m for p, m in layers.items() if m.weight.quant_state.blocksize != block}
    if others:
        weights = StoredWeights(base.directory, shape_of(config.model).family)
        for path, module in others.items():
            values_OI = weights.read(path, module.weight.device)
            module.weight = quantized_like(module.weight, values_OI, block_size=block)
