"""The time and memory that a run would take, by formula; each figure says what it rests on."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import psutil

from mens_exp.config.objective import CrossEntropyConfig
from mens_exp.config.quant import ComputeDtype

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape

__all__ = ["memory", "time"]

# measured: benchmarks/throughput.py, SmolLM2-135M on two AVX512-BF16 cores
_FLOPS_PER_CORE = {ComputeDtype.bf16: 1.4e11, ComputeDtype.f32: 4.0e10}
_FRAMEWORK_BYTES = 900_000_000  # measured: resident after the imports of a training process
_BITS = {True: 4.127, False: 4.5}  # bits a weight at block 64, with and without double quantization


def time(
    config: RunConfig, shape: Shape, tokens: int | None, data: dict[str, Any]
) -> dict[str, Any]:
    """Estimate seconds of training and validation; null where no rate was measured."""
    if _may_use_gpu(config.trainer.accelerator):
        return {"estimate": None, "basis": "unknown: no rate has been measured for a GPU"}
    if tokens is None:
        return {"estimate": None, "basis": "unknown: max_epochs over data not counted yet"}
    adapter = shape.adapter_parameters(config.lora.targets, config.lora.r)
    head = shape.vocab_size * shape.hidden_size
    # Forward and the gradient of the inputs for frozen weights, all three products for LoRA's;
    # the head runs on about half of the tokens.
    per_token = 4 * shape.linear_parameters + 6 * adapter + 4 * head / 2
    validated = 2 * min(config.data.val_max_tokens, data["val_tokens"]) / 2
    cores = psutil.cpu_count(logical=False) or 1
    rate = _FLOPS_PER_CORE[config.quant.compute_dtype] * cores
    return {
        "estimate": round((tokens + validated) * per_token / rate, 1),
        "basis": f"training and validation on {cores} CPU cores at a rate measured on AVX512-BF16",
    }


def _may_use_gpu(accelerator: str) -> bool:
    """Tell whether a GPU may do the work; asking torch itself would take seconds."""
    if accelerator == "auto":
        return shutil.which("nvidia-smi") is not None
    return accelerator == "gpu"


def memory(config: RunConfig, shape: Shape) -> dict[str, Any]:
    """Estimate the peak of a training process, in bytes, part by part."""
    width = 2 if config.quant.compute_dtype is ComputeDtype.bf16 else 4
    tokens = config.data.seq_len * config.data.micro_batch_size
    layer = 12 * shape.hidden_size + 6 * shape.intermediate_size
    # f32 weights and a copy, halved by packing
    scores = shape.num_attention_heads * config.data.seq_len
    components = {
        "base weights": round(shape.linear_parameters * _BITS[config.quant.double_quant] / 8),
        "embedding and head": shape.embedding_parameters * width,
        "adapter, gradients, moments": 16
        * shape.adapter_parameters(config.lora.targets, config.lora.r),
        "activations": tokens * shape.num_hidden_layers * (layer + scores) * width,
        "head chunk": _head_positions(config) * shape.vocab_size * 14,
        "framework": _FRAMEWORK_BYTES,
    }
    return {
        "estimate": sum(components.values()),
        "components": components,
        "basis": "by formula, one CPU process",
    }


def _head_positions(config: RunConfig) -> int:
    """Return positions whose logits exist at one time; all, where an objective does not say."""
    if isinstance(config.objective, CrossEntropyConfig):
        return config.objective.chunk_tokens
    return config.data.seq_len * config.data.micro_batch_size
