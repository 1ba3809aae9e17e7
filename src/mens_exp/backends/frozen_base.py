"""The frozen base: loaded by transformers, quantized by bitsandbytes, prepared by us."""

from __future__ import annotations

from contextlib import contextmanager
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
    from collections.abc import Collection, Iterator
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.model.resolve import BaseModel

__all__ = ["frozen_weights", "load_base", "published_config"]


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

    left_out, shape = config.quant.skip, shape_of(config.model)
    skip = [one.path for one in skipped(left_out, shape)] if left_out else []
    with quiet():
        model_config = _config_without_dropout(base)
        attends = _attention_implementation(model_config, packing=config.data.packing)
        with _clear_about_packing(model_config):
            model, loading = AutoModelForCausalLM.from_pretrained(
                base.directory,
                config=model_config,
                dtype=dtype or compute_dtype(config.quant),
                quantization_config=quantization_config(config.quant, skip),
                attn_implementation=attends,
                device_map={"": device},  # left open, bitsandbytes takes any GPU there is
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
            module.p = 0.0  # a rate that code shipped with a model does not take from config.json
    model.requires_grad_(requires_grad=False)
    if config.data.packing and (base.trust_remote_code or not shape.family.verified):
        refuse_leaks(model)
    return model


def published_config(base: BaseModel) -> Any:
    """Return a base model's own configuration, an object of transformers."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(base.directory, trust_remote_code=base.trust_remote_code)


def _config_without_dropout(base: BaseModel) -> Any:
    """Return a model's configuration with every rate of dropout at zero.

    A base drops nothing of its own while an adapter trains. Rates are set here and not in the
    graph, because many models (OPT, BioGPT) call dropout as a function.
    """
    found = published_config(base)
    for part in [found, *_parts(found)]:
        for name, value in vars(part).items():
            if type(value) in {int, float} and "drop" in name:
                setattr(part, name, type(value)(0))
    return found


def _parts(model_config: Any) -> list[Any]:
    from transformers import PretrainedConfig

    return [one for one in vars(model_config).values() if isinstance(one, PretrainedConfig)]


def _attention_implementation(model_config: Any, *, packing: bool) -> str | None:
    """Return the attention to load a model with; None is the model's own choice.

    Only ours keeps packed documents apart. Code that does not go through transformers' attention
    interface builds its masks for its own attention, so it keeps that where nothing is packed.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    attention.register()
    known = type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if packing or not known:
        return attention.IMPLEMENTATION
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)]
    supported = cls._supports_attention_backend
    return attention.IMPLEMENTATION if supported else None


@contextmanager
def _clear_about_packing(model_config: Any) -> Iterator[None]:
    """Say what to do where a model's code looks our attention up in a table of its own.

    Raises:
        ModelFileError: it does.
    """
    try:
        yield
    except KeyError as error:
        if error.args != (attention.IMPLEMENTATION,):
            raise
        raise ModelFileError(
            "the model's code cannot keep packed documents apart",
            where=str(model_config.model_type),
            found="attention of its own, outside transformers' attention interface",
            remedy="set data.packing=false",
        ) from error


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
            remedy="set backend=lora quant=none: transformers quantizes no layer of this model; or "
            "reinstall bitsandbytes for this machine",
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
