"""The time and memory that a run would take, by formula; each figure says what it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import psutil

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.checkpointing import is_wanted
from mens_exp.config.lora import LoraInit
from mens_exp.config.objective import CrossEntropyConfig
from mens_exp.config.quant import ComputeDtype
from mens_exp.layout.targets import chosen
from mens_exp.plan.device import may_use_gpu
from mens_exp.plan.trained import frozen_linears, trained_parameters

if TYPE_CHECKING:
    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape

__all__ = ["checkpoints", "memory", "time"]

# measured: benchmarks/throughput.py, SmolLM2-135M on two AVX512-BF16 cores
_FLOPS_PER_CORE = {ComputeDtype.bf16: 1.4e11, ComputeDtype.f32: 4.0e10}
# Measured, suite=none, 4 steps of SmolLM2-135M, peak resident against this formula (GB): 4 x 512
# at once 4.49 / 4.80, one by one 2.08 / 2.29; with checkpointing 1.75 / 1.64 and 1.61 / 1.50.
_FRAMEWORK_BYTES = 550_000_000  # the whole of a process that trains tiny_llama: 533 MB
_HEAP_BYTES = 400_000_000  # what is left over: oneDNN's kernels and holes in the heap
_STATE_BYTES = {"adamw": 8, "adamw_8bit": 2, "paged_adamw_8bit": 2, "lion": 4}  # a parameter
_WEIGHT_AND_GRADIENT_BYTES = 8  # f32 both


def time(
    config: RunConfig, shape: Shape, tokens: int | None, data: dict[str, Any]
) -> dict[str, Any]:
    """Estimate seconds of training and validation; null where no rate was measured."""
    if may_use_gpu(config.trainer.accelerator):
        return {"estimate": None, "basis": "unknown: no rate has been measured for a GPU"}
    if isinstance(config.backend, ProxyConfig):
        return {"estimate": None, "basis": "unknown: depends on how many tokens are supervised"}
    if tokens is None:
        return {"estimate": None, "basis": "unknown: max_epochs over data not counted yet"}
    adapter = trained_parameters(config, shape)
    head = shape.vocab_size * shape.hidden_size
    # Forward and the gradient of the inputs for frozen weights, all three products for LoRA's;
    # the head runs on about half of the tokens. Checkpointing goes forward through layers twice.
    again = 2 * (frozen_linears(config, shape) + adapter) if checkpoints(config, shape) else 0
    per_token = 4 * frozen_linears(config, shape) + 6 * adapter + again + 4 * head / 2
    validated = 2 * min(config.data.val_max_tokens, data["val_tokens"]) / 2
    cores = psutil.cpu_count(logical=False) or 1
    rate = _FLOPS_PER_CORE[config.quant.compute_dtype] * cores
    return {
        "estimate": round((tokens + validated) * per_token / rate, 1),
        "basis": f"training and validation on {cores} CPU cores at a rate measured on AVX512-BF16",
    }


def _bits(quant: QuantConfig) -> float:
    """Return bits a weight: codes, and scales of 32 bits, or of 8 with their own in blocks of 256.

    Equal to what bitsandbytes stores (tests/quant/test_nf4_reference.py).
    """
    if not quant.is_four_bit:
        return 16 if quant.compute_dtype is ComputeDtype.bf16 else 32
    scale = 8 + 32 / 256 if quant.double_quant else 32
    return 4 + scale / quant.block


def memory(config: RunConfig, shape: Shape) -> dict[str, Any]:
    """Estimate the peak of a training process, in bytes, part by part."""
    width = 2 if config.quant.compute_dtype is ComputeDtype.bf16 else 4
    per_parameter = _WEIGHT_AND_GRADIENT_BYTES + _STATE_BYTES.get(config.optim.name, 8)
    parameters = shape.linear_parameters + shape.embedding_parameters
    components = {
        "base weights": round(frozen_linears(config, shape) * _bits(config.quant) / 8),
        **_plain_beside_residual(config, shape),
        "embedding and head": shape.embedding_parameters * width,
        "weights file, mapped": 2 * parameters,
        "adapter, gradients, moments": per_parameter * trained_parameters(config, shape),
        "activations": _activations(config, shape) * width,
        "head chunk": _head_positions(config) * shape.vocab_size * 14,
        "framework": _FRAMEWORK_BYTES + _HEAP_BYTES,
    }
    again = ", activations computed again" if checkpoints(config, shape) else ""
    return {
        "estimate": sum(components.values()),
        "components": components,
        "basis": f"by formula, one CPU process{again}",
    }


def _plain_beside_residual(config: RunConfig, shape: Shape) -> dict[str, int]:
    """Return what the plain weights take that are kept beside those of a residual."""
    lora = config.lora
    changes = lora.init is LoraInit.pissa or (lora.init is LoraInit.loftq and lora.loftq_iters > 1)
    if not changes:
        return {}
    weights = sum(one.out * one.width for one in chosen(lora, shape))
    return {"plain weights, for the base": round(weights * _bits(config.quant) / 8)}


def checkpoints(config: RunConfig, shape: Shape) -> bool:
    """Tell whether the run computes activations again, as far as the device is known."""
    return is_wanted(
        config.model.gradient_checkpointing,
        parameters=shape.linear_parameters + shape.embedding_parameters,
        on_gpu=may_use_gpu(config.trainer.accelerator),
    )


def _activations(config: RunConfig, shape: Shape) -> int:
    """Count the elements kept for the backward pass."""
    tokens = config.data.seq_len * config.data.micro_batch_size
    layer = 12 * shape.hidden_size + 6 * shape.intermediate_size
    if config.lora.dropout > 0:  # of each projection's input, what is left of it and its mask
        layer += 2 * (3 * shape.hidden_size + shape.intermediate_size)
    # f32 weights and a copy, halved by packing
    layer += shape.num_attention_heads * config.data.seq_len
    if checkpoints(config, shape):  # every layer's input, and one layer whole
        return tokens * (shape.num_hidden_layers * shape.hidden_size + layer)
    return tokens * shape.num_hidden_layers * layer


def _head_positions(config: RunConfig) -> int:
    """Return positions whose logits exist at one time; all, where an objective does not say."""
    if isinstance(config.objective, CrossEntropyConfig):
        return config.objective.chunk_tokens
    return config.data.seq_len * config.data.micro_batch_size
