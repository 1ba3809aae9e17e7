"""The frozen base: loaded by transformers, quantized by bitsandbytes, prepared by us."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from mens_exp.backends.remote_code import refuse_leaks
from mens_exp.errors import SetupError
from mens_exp.model import attention
from mens_exp.model.quiet import quiet
from mens_exp.quant.bnb import compute_dtype, keep_trainable, quantization_config, quantized_linears

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.model.resolve import BaseModel

__all__ = ["load_base"]


def load_base(config: RunConfig, base: BaseModel, device: torch.device) -> Any:
    """Return the causal model in 4 bits on its device, every parameter frozen.

    Raises:
        SetupError: nothing was quantized.
        ModelFileError: code that comes with the model cannot do what is asked of it.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            base.directory,
            dtype=compute_dtype(config.quant),
            quantization_config=quantization_config(config.quant),
            attn_implementation=attention.IMPLEMENTATION,
            device_map={"": device},  # left open, bitsandbytes takes a GPU wherever there is one
            use_safetensors=True,
            trust_remote_code=base.trust_remote_code,  # left open, transformers would ask
        )
    if not quantized_linears(model):
        raise SetupError(
            "no linear layer was quantized",
            found=f"bitsandbytes on {device}",
            expected="4-bit linear layers",
            remedy="reinstall bitsandbytes for this machine",
        )
    keep_trainable(model)
    if base.source == "hub":
        model.name_or_path = base.name  # what PEFT writes down as the base, and others can load
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # a frozen base drops nothing of its own; GPT-2 would, at three places
    model.requires_grad_(requires_grad=False)
    if base.trust_remote_code:
        refuse_leaks(model)
    return model
