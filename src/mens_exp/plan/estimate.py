"""The plan of a run: its steps, time, memory and disk; torch-free, about a second at most.

The figures of memory and time are estimates by formula; each says what it rests on, and a
figure nothing is known about is null with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.config.model import HfModel
from mens_exp.config.schedule import warmup_steps
from mens_exp.layout import hub, hub_snapshot
from mens_exp.layout.shape import shape_of
from mens_exp.plan import machine, messages, pace
from mens_exp.plan.checks.machine import findings
from mens_exp.plan.checks.optim import rate_warnings
from mens_exp.plan.checks.quant import expert_warnings
from mens_exp.plan.checks.tokenizer import date_in_prompts
from mens_exp.plan.contract import contract_of
from mens_exp.plan.disk import disk
from mens_exp.plan.forecast import documents_of, forecast, tokens_per_step
from mens_exp.plan.kernels import readers_of_names
from mens_exp.plan.memory import compares
from mens_exp.plan.planner import execution_plan
from mens_exp.plan.sharing import device_of_plan, shared
from mens_exp.plan.surroundings import surroundings_of
from mens_exp.plan.tokens import count_tokens
from mens_exp.plan.trained import described_modules, proxy_stack, trained_parameters

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.shape import Shape
    from mens_exp.plan.disk import Disk
    from mens_exp.plan.forecast import Forecast

__all__ = ["make_plan", "steps_of"]


def steps_of(config: RunConfig, blocks: int | None) -> int | None:
    """Return optimizer steps, or None when only max_epochs bounds them and blocks are unknown."""
    trainer = config.trainer
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs > 0 and blocks is not None:
        per_step = config.data.micro_batch_size * trainer.accumulate_grad_batches
        limits.append(-(-trainer.max_epochs * blocks // per_step))
    return min(limits, default=None)


def bound_of(config: RunConfig, blocks: int | None) -> str | None:
    """Return the setting that ends the run; None where two are set and blocks are unknown."""
    trainer = config.trainer
    if trainer.max_epochs <= 0 or trainer.max_steps <= 0:
        return "trainer.max_steps" if trainer.max_steps > 0 else "trainer.max_epochs"
    if blocks is None:
        return None
    by_steps = steps_of(config, blocks) == trainer.max_steps
    return "trainer.max_steps" if by_steps else "trainer.max_epochs"


def epochs_of(config: RunConfig, blocks: int | None, steps: int | None) -> float | None:
    """Return the passes over the training data that some steps are; None where that is unknown."""
    if not blocks or steps is None:
        return None
    per_step = config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    passes = steps * per_step / blocks
    whole = config.trainer.max_epochs
    return round(min(passes, whole) if whole > 0 else passes, 4)


def make_plan(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Plan a run from its configuration and what the caches already hold."""
    shape = shape_of(config.model)
    data = count_tokens(config, cache)
    effective = config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    per_step = tokens_per_step(config)
    blocks = _blocks(config, data)
    steps = steps_of(config, blocks)
    total = steps * per_step if steps is not None else None
    device = device_of_plan(config)
    documents = documents_of(config, data)
    expected = forecast(config, shape, documents, device, cache)
    written = disk(config, shape, cache, steps)
    errors, warnings = findings(config, device, expected.memory, written, cache)
    stack = proxy_stack(config, shape)
    return {
        "format": "mens_exp_plan",
        "version": 1,
        **_meaning(config, shape),
        "layers": shape.num_hidden_layers,
        "parameters": shape.parameters,
        "trainable_parameters": trained_parameters(config, shape),
        "data": data,
        "effective_batch": effective,
        "tokens_per_step": per_step,
        "steps": steps,
        "epochs": epochs_of(config, blocks, steps),
        "bound": bound_of(config, blocks),
        "warmup_steps": None if steps is None else warmup_steps(config.schedule, steps),
        "checkpoints": written.checkpoints_saved,
        "tokens_total": total,
        "time_s": _time(config, expected, device, total, data, per_step)
        | {
            "quantization": pace.quantization_s(shape, device.kind, config.quant.quant_type),
            "comparison": pace.comparison_s(shape, device.kind) if compares(config) else None,
        },
        "memory_bytes": _memory(expected, device),
        "processes": shared(config, shape, documents, expected.memory, device),
        "disk_bytes": _disk(written, cache),
        "device": {"kind": device.kind, "name": device.name},
        "problems": [*map(str, errors), *(data.get("contract") or {}).get("refusals", ())],
        "comparison": messages.COMPARISON,
        "warnings": [
            *(stack.warnings if stack else ()),
            *expert_warnings(config, shape),
            *rate_warnings(config, shape),
            *warnings,
        ],
        "measured": None,
    }


def _meaning(config: RunConfig, shape: Shape) -> dict[str, Any]:
    """Say what the command means: the groups' choices, and the planner's answer."""
    made = execution_plan(contract_of(config), surroundings_of(config)).record()
    return {
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
        "tokenizer": config.tokenizer.name,
        "chat_template_date": date_in_prompts(config),
        "deployment_target": config.deployment_target.value,
        "layout": _layout(shape.family),
        **made,
    }


def _layout(family: Family) -> dict[str, Any]:
    """Say whether the names of weights are verified, and what refuses where they are not."""
    return {
        "model_type": family.model_type,
        "verified": family.verified,
        "refused": [] if family.verified else list(readers_of_names()),
    }


def _time(
    config: RunConfig,
    expected: Forecast,
    device: machine.Machine,
    total: int | None,
    data: dict[str, Any],
    per_step: int,
) -> dict[str, Any]:
    validated = 2 * min(config.data.val_max_tokens, data["val_tokens"])
    several = expected.pace.of_several(config.trainer.world_size, device.kind)
    made = pace.time(several, expected.per_token, total, validated, per_step)
    return made | {"flop_per_step": per_step * expected.per_token}


def _memory(expected: Forecast, device: machine.Machine) -> dict[str, Any]:
    return expected.memory.record() | {
        "formula": expected.formula,
        "runs": list(expected.runs),
        "free": device.free_bytes,
    }


def _disk(written: Disk, cache: Path) -> dict[str, Any]:
    return written.record() | {"free": machine.space(cache)[1]}


def _lora(config: RunConfig) -> str:
    """Say what the adapter is, in one line; what is as usual is left out."""
    if config.backend.name == "full":
        return "none"
    lora = config.lora
    kind = [] if lora.variant is LoraVariant.lora else [lora.variant.value]
    start = [] if lora.init is LoraInit.default else [f"starts from {lora.init.value}"]
    ranks = f"r {lora.r}{' and others' if lora.rank_pattern else ''}"
    alphas = f"alpha {lora.alpha}{' and others' if lora.alpha_pattern else ''}"
    return ", ".join(
        ["+".join(lora.targets), *kind, ranks, alphas, f"dropout {lora.dropout:g}", *start]
    )


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
    if not hub.describe(model).shards:
        return f"{model.id}, by the dimensions that mens_exp ships: the hub did not answer"
    return f"{model.id} at {hub_snapshot.commit_of(model.id, model.revision)}"


def _download(model: ModelConfig) -> int:
    """Count the bytes of weights that have to come from the hub first."""
    if not isinstance(model, HfModel) or not hub.describe(model).shards:
        return 0
    return hub.bytes_to_download(model)
