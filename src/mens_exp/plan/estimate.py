"""What a run would do, and what it would take; torch-free, and never slower than a second.

The figures of memory and time are estimates by formula; each says what it rests on, and a
figure nothing is known about is null with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.config.model import HfModel
from mens_exp.layout import hub, hub_snapshot
from mens_exp.layout.shape import shape_of
from mens_exp.plan import cost
from mens_exp.plan.tokens import count_tokens
from mens_exp.plan.trained import described_modules, trained_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig

__all__ = ["make_plan", "steps_of"]


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
    data = count_tokens(config, cache)
    tokens_per_step = (
        config.data.seq_len * config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    )
    steps = steps_of(config, _blocks(config, data))
    total = steps * tokens_per_step if steps is not None else None
    return {
        "format": "mens_exp_plan",
        "version": 1,
        "model": _name(config.model),
        "download_bytes": _download(config.model),
        "backend": config.backend.name,
        "quant": f"{config.quant.quant_type.value}"
        f"{', double quantization' if config.quant.double_quant else ''}"
        f"{f', blocks of {config.quant.block}' if config.quant.block_size else ''}"
        f"{f', without {chr(44).join(config.quant.skip)}' if config.quant.skip else ''}"
        f", {config.quant.compute_dtype.value} compute",
        "lora": _lora(config),
        "lora_modules": described_modules(config, shape),
        "objective": config.objective.name,
        "trainable_parameters": trained_parameters(config, shape),
        "data": data,
        "tokens_per_step": tokens_per_step,
        "steps": steps,
        "tokens_total": total,
        "time_s": cost.time(config, shape, total, data),
        "memory_bytes": cost.memory(config, shape),
        "measured": None,
    }


def _lora(config: RunConfig) -> str:
    """Say what the adapter is, in one line; what is as usual is left out."""
    if config.backend.name == "full":
        return "none"
    lora = config.lora
    kind = [] if lora.variant is LoraVariant.lora else [lora.variant.value]
    start = [] if lora.init is LoraInit.default else [f"starts from {lora.init.value}"]
    ranks = f"r {lora.r}{' and others' if lora.rank_pattern else ''}"
    alphas = f"alpha {lora.alpha}{' and others' if lora.alpha_pattern else ''}"
    return ", ".join([lora.name, *kind, ranks, alphas, f"dropout {lora.dropout:g}", *start])


def _blocks(config: RunConfig, data: dict[str, Any]) -> int | None:
    """Count training sequences: what packing cannot go below, or the rows where each is padded."""
    if config.data.packing:
        return int(-(-data["train_tokens"] // config.data.seq_len))
    rows: int | None = data["train_rows"]
    return rows


def _name(model: ModelConfig) -> str:
    """Name what is trained; of the hub, the commit as well."""
    if not isinstance(model, HfModel) or hub.local(model.id) is not None:
        return model.name
    return f"{model.id} at {hub_snapshot.commit_of(model.id, model.revision)}"


def _download(model: ModelConfig) -> int:
    """Count the bytes of weights that have to come from the hub first."""
    return hub.bytes_to_download(model) if isinstance(model, HfModel) else 0
