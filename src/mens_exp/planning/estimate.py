"""Plan a run: its tokens, steps, time, memory and disk; torch-free, about a second at most.

Tokens are counted from a warm cache, or else estimated. Memory and time are estimated by formula,
and each figure states its basis. A figure that cannot be estimated is null, with the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.config.model import HfModel, teacher_of
from mens_exp.config.schedule import warmup_steps
from mens_exp.layout import hub
from mens_exp.layout.shape import shape_of
from mens_exp.planning import compiling, kernels, machine, messages, throughput_model
from mens_exp.planning.activations import proxy_stack
from mens_exp.planning.checks.machine import findings, rate_warnings
from mens_exp.planning.checks.model import codes_warnings, date_in_prompts, expert_warnings
from mens_exp.planning.contract import contract_of
from mens_exp.planning.forecast import (
    device_of_plan,
    disk,
    documents_of,
    forecast,
    shared,
    tokens_per_step,
    trained_tokens,
)
from mens_exp.planning.memory import compares, described_modules, frozen_linears, trained_parameters
from mens_exp.planning.planner import environment_of, execution_plan, readers_of_names
from mens_exp.planning.token_estimate import count_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.config.model import ModelConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.layout.families import Family
    from mens_exp.layout.shape import Shape
    from mens_exp.planning.forecast import Disk, Forecast


def steps_of(config: RunConfig, blocks: int | None) -> int | None:
    """Return optimizer steps, or None if only max_epochs limits them and blocks are unknown."""
    trainer = config.trainer
    limits = [trainer.max_steps] if trainer.max_steps > 0 else []
    if trainer.max_epochs > 0 and blocks is not None:
        per_step = config.data.micro_batch_size * trainer.accumulate_grad_batches
        limits.append(-(-trainer.max_epochs * blocks // per_step))
    return min(limits, default=None)


def bound_of(config: RunConfig, blocks: int | None) -> str | None:
    """Return the setting that ends the run; None if two are set and blocks are unknown."""
    trainer = config.trainer
    if trainer.max_epochs <= 0 or trainer.max_steps <= 0:
        return "trainer.max_steps" if trainer.max_steps > 0 else "trainer.max_epochs"
    if blocks is None:
        return None
    by_steps = steps_of(config, blocks) == trainer.max_steps
    return "trainer.max_steps" if by_steps else "trainer.max_epochs"


def epochs_of(config: RunConfig, blocks: int | None, steps: int | None) -> float | None:
    """Return the number of passes over the training data in ``steps``; None if unknown."""
    if not blocks or steps is None:
        return None
    per_step = config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    passes = steps * per_step / blocks
    whole = config.trainer.max_epochs
    return round(min(passes, whole) if whole > 0 else passes, 4)


def make_plan(config: RunConfig, cache: Path) -> dict[str, Any]:
    """Plan a run from its configuration and the current contents of the caches."""
    shape = shape_of(config.model)
    data = count_tokens(config, cache)
    effective = config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    per_step = tokens_per_step(config)
    blocks = _blocks(config, data)
    steps = steps_of(config, blocks)
    total = trained_tokens(config, data, steps)
    room = None if steps is None else steps * per_step
    device = device_of_plan(config)
    documents = documents_of(config, data)
    expected = forecast(config, shape, documents, device, cache)
    written = disk(config, shape, cache, steps)
    errors, warnings = findings(config, device, expected.memory, written, cache)
    stack = proxy_stack(config, shape)
    time_s = _time(config, expected, device, room, data, per_step)
    return {
        "format": "mens_exp_plan",
        "version": 1,
        **_meaning(config, shape),
        "layers": shape.num_hidden_layers,
        "parameters": shape.total_parameters,
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
        "time_s": time_s
        | {
            "quantization": throughput_model.quantization_s(shape, device.kind, config.quant.spec),
            "comparison": throughput_model.comparison_s(shape, device.kind)
            if compares(config)
            else None,
            **_reference(config, shape, expected, device, data, total),
        },
        "memory_bytes": _memory(expected, device),
        "processes": shared(config, shape, documents, expected.memory, device),
        "disk_bytes": _disk(written, cache),
        "device": {"kind": device.kind, "name": device.name},
        "kernels": kernels.described(kernels.reasons(config, on_gpu=device.kind == "cuda")),
        "compile": _compile(config, device, steps, time_s["step_s"]),
        "problems": [*map(str, errors), *(data.get("contract") or {}).get("refusals", ())],
        "comparison": messages.COMPARISON,
        "warnings": [
            *(stack.warnings if stack else ()),
            *expert_warnings(config, shape),
            *codes_warnings(config, shape),
            *rate_warnings(config, shape),
            *_heldout_warnings(config, data),
            *_split_warnings(data),
            *warnings,
        ],
        "measured": None,
    }


def _compile(
    config: RunConfig, device: machine.Machine, steps: int | None, step_s: float | None
) -> dict[str, Any]:
    """Return the decision on compiled layers, as a run records it."""
    seconds = None if steps is None or step_s is None else steps * step_s
    reason = compiling.why_eager(config, kind=device.kind, seconds=seconds)
    if reason is not None:
        return {"layers": compiling.EAGER, "reason": reason}
    return {"layers": compiling.COMPILED, "reason": compiling.why_compiled(config)}


def _split_warnings(data: dict[str, Any]) -> Iterator[str]:
    """Yield a warning if a split misses its fractions because few prompts are distinct."""
    if split := data.get("lopsided"):
        yield (
            f"{split['train_rows']} of {split['rows']} rows are trained on, and not "
            f"{split['expected_frac']:.0%}: rows with the same prompt, or of one group, stay on "
            "one side of the split, and few are different. Next: give more prompts, or name the "
            "rows to validate on with data.val_path"
        )


def _heldout_warnings(config: RunConfig, data: dict[str, Any]) -> Iterator[str]:
    """Yield a warning if streaming leaves no held-out rows for the suite."""
    if config.suite.spec.from_rows and data.get("heldout_rows") == 0:
        streamed = data["streaming"]
        yield (
            f"no row is held out of the first {streamed['first_rows']['rows']}, so "
            f"suite={config.suite.name} has nothing to ask, and the run gets no scorecard. "
            f"Next: raise data.heldout_frac or data.shuffle_buffer "
            f"({streamed['shuffle_buffer']}), or choose suite=none"
        )


def _reference(
    config: RunConfig,
    shape: Shape,
    expected: Forecast,
    device: machine.Machine,
    data: dict[str, Any],
    total: int | None,
) -> dict[str, Any]:
    """Return the seconds of the reference passes before training, if there are any.

    A pass covers each validation document and each training document that the run will read.
    """
    passes = config.objective.spec.passes_before(config.objective)
    if not passes:
        return {}
    once = 1 - data.get("shared_frac", 0.0)
    train = once * data["train_tokens"]
    train = train if total is None else min(total, train)
    tokens = round(passes * (train + once * min(config.data.val_max_tokens, data["val_tokens"])))
    pace = expected.pace.of_several(config.trainer.world_size, device.kind)
    teacher = teacher_of(config.objective, config.model)
    if teacher is None:
        linears = frozen_linears(config, shape)
        return {"reference": throughput_model.reference_s(pace, shape, tokens, linears)}
    return {"reference": throughput_model.reference_s(pace, shape_of(teacher), tokens)}


def _meaning(config: RunConfig, shape: Shape) -> dict[str, Any]:
    """Describe the meaning of the command: the options of its groups and its execution plan."""
    made = execution_plan(contract_of(config), environment_of(config)).record()
    quant = config.quant
    named = [f"{one.value} in {name}" for name, one in quant.type_pattern.items()]
    named += [f"blocks of {one} in {name}" for name, one in quant.block_size_pattern.items()]
    named += [
        f"{'double' if one else 'no double'} quantization in {name}"
        for name, one in quant.double_quant_pattern.items()
    ]
    others = ", ".join(named)
    return {
        "model": _name(config.model),
        "download_bytes": _download(config.model),
        "backend": config.backend.name,
        "quant": f"{quant.quant_type.value}"
        f"{f', {len(quant.levels)} levels' if quant.levels else ''}"
        f"{', double quantization' if quant.double_quant else ''}"
        f"{f', blocks of {quant.block}' if quant.block_size else ''}"
        f"{f', {others}' if others else ''}"
        f"{f', without {chr(44).join(quant.skip)}' if quant.skip else ''}"
        f", {quant.compute_dtype.value} compute",
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
    """Describe whether weight names are verified, and the settings refused if they are not."""
    return {
        "model_type": family.model_type,
        "verified": family.verified,
        "refused": [] if family.verified else list(readers_of_names()),
    }


def _time(
    config: RunConfig,
    expected: Forecast,
    device: machine.Machine,
    room: int | None,
    data: dict[str, Any],
    per_step: int,
) -> dict[str, Any]:
    validated = 2 * min(config.data.val_max_tokens, data["val_tokens"])
    several = expected.pace.of_several(config.trainer.world_size, device.kind)
    made = throughput_model.time(several, expected.per_token, room, validated, per_step)
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
    """Describe the adapter in one line; default values are omitted."""
    if not config.backend.spec.has_adapter:
        return "none"
    lora = config.lora
    start = [f"starts from {lora.init.value}"] if not lora.init.spec.is_drawn else []
    targets = ["+".join(lora.targets)] if lora.targets else []
    return ", ".join([*targets, *lora.spec.described(lora), *start])


def _blocks(config: RunConfig, data: dict[str, Any]) -> int | None:
    """Count training sequences; if not counted yet, the rows, or the fewest that packing allows."""
    blocks: int | None = data.get("train_blocks")
    if blocks is None and config.data.packing:
        tokens = round((1 - data.get("shared_frac", 0.0)) * data["train_tokens"])
        return int(-(-tokens // config.data.seq_len))
    rows: int | None = data["train_rows"]
    return rows if blocks is None else blocks


def _name(model: ModelConfig) -> str:
    """Name the trained model; for a Hub model, with its commit."""
    if not isinstance(model, HfModel) or hub.local(model.id) is not None:
        return model.name
    if not hub.describe(model).shards:
        return f"{model.id}, by the dimensions that mens_exp ships: the hub did not answer"
    return f"{model.id} at {hub.commit_of(model.id, model.revision)}"


def _download(model: ModelConfig) -> int:
    """Count the bytes of weights that must first be downloaded from the Hub."""
    if not isinstance(model, HfModel) or not hub.describe(model).shards:
        return 0
    return hub.bytes_to_download(model)
