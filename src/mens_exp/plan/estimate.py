"""What a run would do, and what it would take; torch-free, and never slower than a second.

The figures of memory and time are estimates by formula; each says what it rests on, and a
figure nothing is known about is null with the reason.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import psutil

from mens_exp.config.data import JsonlData
from mens_exp.config.quant import ComputeDtype
from mens_exp.corpus import stdlib
from mens_exp.corpus.source import cache_key, load_rows
from mens_exp.corpus.split import Side
from mens_exp.layout.cached import ready
from mens_exp.layout.shape import Shape, shape_of
from mens_exp.rows.cache import peek
from mens_exp.tokenizer.hf import HfTokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.source import Rows

__all__ = ["make_plan", "steps_of"]

# measured: benchmarks/throughput.py, SmolLM2-135M on two AVX512-BF16 cores
_FLOPS_PER_CORE = {ComputeDtype.bf16: 1.4e11, ComputeDtype.f32: 4.0e10}
_FRAMEWORK_BYTES = 900_000_000  # measured: resident after the imports of a training process
_BITS = {True: 4.127, False: 4.5}  # bits a weight at block 64, with and without double quantization
_CHARS_PER_TOKEN = 3.4  # measured: the stdlib rows under SmolLM2's tokenizer
_STDLIB_SHARE = 0.33  # measured: characters of rows over bytes of source read


def steps_of(config: RunConfig, blocks: int | None) -> int | None:
    """Return optimizer steps, or None when only max_epochs bounds them and blocks are unknown."""
    trainer = config.trainer
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs > 0 and blocks is not None:
        per_step = config.data.micro_batch_size * trainer.accumulate_grad_batches
        limits.append(-(-trainer.max_epochs * blocks // per_step))
    return min(limits, default=None)


def make_plan(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Plan a run from its configuration and what the caches already hold."""
    shape = shape_of(config.model)
    data = _data(config, cache)
    tokens_per_step = (
        config.data.seq_len * config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    )
    steps = steps_of(config, _blocks(config, data))
    total = steps * tokens_per_step if steps is not None else None
    return {
        "format": "mens_exp_plan",
        "version": 1,
        "model": config.model.name,
        "backend": config.backend.name,
        "quant": f"{config.quant.quant_type.value}"
        f"{', double quantization' if config.quant.double_quant else ''}"
        f", {config.quant.compute_dtype.value} compute",
        "lora": f"{config.lora.name}, r {config.lora.r}, alpha {config.lora.alpha}, "
        f"dropout {config.lora.dropout:g}",
        "objective": config.objective.name,
        "trainable_parameters": shape.adapter_parameters(config.lora.targets, config.lora.r),
        "data": data,
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "tokens_total": total,
        "time_s": _time(config, shape, total, data),
        "memory_bytes": _memory(config, shape),
        "measured": None,
    }


def _blocks(config: RunConfig, data: dict[str, Any]) -> int | None:
    """Count training sequences: what packing cannot go below, or the rows where each is padded."""
    if config.data.packing:
        return int(-(-data["train_tokens"] // config.data.seq_len))
    rows: int | None = data["train_rows"]
    return rows


def _data(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Count tokens: exactly from a warm cache, else from characters or file sizes."""
    if not isinstance(config.data, JsonlData) and not stdlib.is_cached(cache):
        characters = stdlib.source_bytes() * _STDLIB_SHARE
        train = 1 - config.data.val_frac - config.data.heldout_frac
        return {
            "source": config.data.source,
            "train_rows": None,
            "train_tokens": round(characters * train / _CHARS_PER_TOKEN),
            "val_tokens": round(characters * config.data.val_frac / _CHARS_PER_TOKEN),
            "exact": False,
            "basis": "estimated from file sizes; nothing is cached yet",
        }
    rows = load_rows(config.data, cache)
    exact = _cached_counts(config, rows, cache)
    if exact is not None:
        return {"source": rows.source, **exact, "exact": True, "basis": "counted, from the cache"}
    return {
        "source": rows.source,
        "train_rows": len(rows.train),
        "train_tokens": _estimate_tokens(rows, Side.TRAIN, config.data.seq_len),
        "val_tokens": _estimate_tokens(rows, Side.VAL, config.data.seq_len),
        "exact": False,
        "basis": "estimated from the rows' characters; not encoded yet",
    }


def _cached_counts(config: RunConfig, rows: Rows, cache: Path) -> dict[str, int] | None:
    directory = ready(config.model, cache)
    if directory is None:
        return None
    tokenizer = HfTokenizer.from_directory(directory)
    train, val = (
        peek(cache, cache_key(config, rows, side, tokenizer)) for side in (Side.TRAIN, Side.VAL)
    )
    if train is None or val is None:
        return None
    return {
        "train_rows": train.documents,
        "train_tokens": train.tokens,
        "val_tokens": val.tokens,
    }


def _estimate_tokens(rows: Rows, side: Side, seq_len: int) -> int:
    lengths = (
        (len(pair.prompt) + len(pair.response)) / _CHARS_PER_TOKEN + 40  # 40: a chat template's own
        for pair in getattr(rows, side.value)
    )
    return round(sum(min(length, seq_len) for length in lengths))


def _time(
    config: RunConfig, shape: Shape, tokens: int | None, data: dict[str, Any]
) -> dict[str, Any]:
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


def _memory(config: RunConfig, shape: Shape) -> dict[str, Any]:
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
        "head chunk": config.objective.chunk_tokens * shape.vocab_size * 14,
        "framework": _FRAMEWORK_BYTES,
    }
    return {
        "estimate": sum(components.values()),
        "components": components,
        "basis": "by formula, one CPU process",
    }
