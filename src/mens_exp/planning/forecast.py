"""Forecast the cost of a run on this machine: memory and time with intervals, disk, sharing.

The intervals of memory and time come from earlier runs. Disk sizes follow by formula from the
shapes alone. A run of several processes is sized per process, and for each strategy with whether
it fits. task=attribute needs memory for two copies of the base and for the outputs of its layers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from mens_exp.config.backend import ProxyConfig, trains_base
from mens_exp.config.model import HfModel, RandomModel, WeightsDtype, teacher_of
from mens_exp.config.quant import ComputeDtype
from mens_exp.config.rules.base import can_be_sharded
from mens_exp.config.trainer import Selection, Strategy
from mens_exp.layout import hub
from mens_exp.layout.model_cache import ready_directory
from mens_exp.layout.shape import shape_of
from mens_exp.planning import machine, throughput_model
from mens_exp.planning.activations import Documents
from mens_exp.planning.memory import (
    Memory,
    base_bits,
    frozen_linears,
    memory,
    optimizer_bytes,
    recomputes,
    trained_parameters,
)
from mens_exp.planning.throughput_model import (
    Entry,
    Residuals,
    entries,
    is_alike,
    ledger_path,
    residuals,
)

if TYPE_CHECKING:
    from pathlib import Path

    from mens_exp.config.root import RunConfig
    from mens_exp.layout.shape import Shape
    from mens_exp.planning.machine import Machine

_F32, _BF16 = 4, 2
_RECORDS = 20_000_000  # a run's telemetry, report and offline mirror: 5 MB in the main job


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """Bytes that a run writes.

    Attributes:
        adapter: the adapter in our schema, or every weight if there is none, f32.
        peft: the adapter in PEFT's format; 0 if the run writes none.
        checkpoint: one training state: adapter, optimizer, and further copies of the adapter.
        checkpoints_kept: states on disk at the same time, including one being written.
        checkpoints_saved: states written over the whole run; None if the steps are unknown.
        base: a copy of the base that must be created or downloaded into the cache.
        merged: a merged model in bf16, which only an export writes; 0 if the adapter cannot be.
    """

    adapter: int
    peft: int
    checkpoint: int
    checkpoints_kept: int
    checkpoints_saved: int | None
    base: int
    merged: int

    @property
    def in_run(self) -> int:
        """Peak number of bytes in the run directory."""
        return (
            self.adapter + self.peft + self.checkpoint * (self.checkpoints_kept + 1) + _RECORDS
            if self.checkpoints_kept
            else self.adapter + self.peft + _RECORDS
        )

    def record(self) -> dict[str, Any]:
        """Return the sizes as plain JSON."""
        return {**asdict(self), "in_run": self.in_run}


def disk(config: RunConfig, shape: Shape, cache: Path, steps: int | None) -> Disk:
    """Estimate the disk space that a run needs."""
    parameters = trained_parameters(config, shape)
    moments, _ = optimizer_bytes(config, shape)
    whole = shape.linear_parameters + shape.embedding_parameters
    saves = "checkpoint" in config.callbacks
    keep = config.checkpoint.keep if saves else 0
    saved = None if steps is None else -(-steps // config.checkpoint.every_n_steps) * saves
    # An initialisation that changed the base is written as twice the ranks (PiSSA, appendix C).
    adapter = parameters * _F32 * (2 if config.lora.start_changes_base else 1)
    return Disk(
        adapter=adapter,
        peft=adapter if _writes_peft(config) else 0,
        checkpoint=parameters * _F32 * _copies(config) + moments,
        checkpoints_kept=keep if saved is None else min(keep, saved),
        checkpoints_saved=saved,
        base=_base(config, whole, cache),
        merged=0 if config.lora.spec.not_merged else whole * _BF16,
    )


def _writes_peft(config: RunConfig) -> bool:
    """Return whether a run writes its adapter in PEFT's format too."""
    spec = config.backend.spec
    trains_adapter = spec.has_adapter and not trains_base(config.backend, config.model.source)
    return trains_adapter and spec.is_causal and config.lora.spec.has_peft_view


def _copies(config: RunConfig) -> int:
    """Count the values in a checkpoint for each trained one, without the optimizer's.

    Beside the adapter, there are AdaLoRA's two averages, the best adapter so far, and the initial
    adapter if it changed the base.
    """
    is_best = config.adapter.select is Selection.best
    return 1 + 2 * config.lora.spec.allocates + is_best + config.lora.start_changes_base


def _base(config: RunConfig, weights: int, cache: Path) -> int:
    """Return the bytes of the base that are not on disk yet."""
    model = config.model
    if isinstance(model, HfModel):
        is_known = bool(hub.describe(model).shards)  # otherwise only its dimensions are known
        return hub.bytes_to_download(model) if is_known else weights * _BF16
    if ready_directory(model, cache):
        return 0
    in_f32 = isinstance(model, RandomModel) and model.dtype is WeightsDtype.f32
    return weights * (_F32 if in_f32 else _BF16)


_GIB = 1 << 30


def device_of_plan(config: RunConfig) -> machine.Machine:
    """Describe the device that a run is planned for: this machine's or of the requested size."""
    here = machine.look(config.trainer.accelerator)
    gib = config.trainer.device_gib
    if gib is None:
        return here
    size = round(gib * _GIB)
    return machine.Machine(
        kind=here.kind,
        name=f"{'GPU' if here.kind == 'cuda' else 'CPU'} with {gib:g} GiB",
        total_bytes=size,
        free_bytes=size,
    )


def for_all_on_a_machine(config: RunConfig, one: int, kind: str) -> int:
    """Return the bytes a device must hold: one process's on a GPU, all processes' on a CPU."""
    return one * (config.trainer.devices if kind == "cpu" else 1)


def shared(
    config: RunConfig,
    shape: Shape,
    documents: Documents,
    expected: Memory,
    device: machine.Machine,
) -> dict[str, Any] | None:
    """Describe how the processes share the work and what each needs; None for a single process.

    ``fits`` states for each strategy whether it fits on the device: true, false, or null if that
    is within the estimate's interval or the device's memory is unknown. Strategies that the run
    does not support are omitted.

    Args:
        config: the whole configuration.
        shape: shape of the model.
        documents: lengths of the training documents.
        expected: the forecast of the chosen strategy; the others are scaled by the ratios of
            their formulas.
        device: the device of each process.
    """
    trainer = config.trainer
    if trainer.sharing is Strategy.one:
        return None

    def formula(strategy: Strategy) -> Memory:
        under = _under(config, strategy)
        return memory(under, shape, documents, kind=device.kind, has_bf16=device.has_bf16)

    chosen, bounds = formula(trainer.sharing), {}
    for strategy in Strategy:
        if strategy is Strategy.fsdp and not can_be_sharded(config):
            continue
        other = formula(strategy)
        low, high = (
            round(bound * theirs / ours)
            for bound, theirs, ours in (
                (expected.low, other.low, chosen.low),
                (expected.high, other.high, chosen.high),
            )
        )
        if strategy is not Strategy.one:
            low, high = (for_all_on_a_machine(config, one, device.kind) for one in (low, high))
        bounds[strategy] = (low, high)
    return {
        "strategy": trainer.sharing.value,
        "processes": trainer.world_size,
        "on_each_machine": trainer.devices,
        "device_bytes": device.free_bytes,
        "bytes_of_each": {
            "estimate": expected.estimate,
            "low": expected.low,
            "high": expected.high,
        },
        "fits": {
            strategy.value: _fits(low, high, device.free_bytes)
            for strategy, (low, high) in bounds.items()
        },
    }


def _under(config: RunConfig, strategy: Strategy) -> RunConfig:
    """Return the run under another strategy with the same number of processes, or a single one."""
    trainer = replace(config.trainer, strategy=strategy.value)
    if strategy is Strategy.one:
        trainer = replace(trainer, devices=1, num_nodes=1)
    return replace(config, trainer=trainer)


def _fits(low: int, high: int, free: int | None) -> bool | None:
    if free is None or low <= free < high:
        return None
    return high <= free


_F32_BYTES = 4  # bytes
_FRAMEWORK = 500_000_000  # interpreter, torch, transformers, loaded kernels: as in training
_SPREAD = 0.3  # unverified guess


def attribution_memory(config: RunConfig, shape: Shape) -> Memory:
    """Estimate the memory of attribution by formula, in bytes."""
    compute = 2 if config.quant.compute_dtype is ComputeDtype.bf16 else _F32_BYTES
    weights = shape.linear_parameters + shape.embedding_parameters
    kept = config.attribute.tokens * shape.num_hidden_layers * shape.hidden_size
    components = {
        "base in f32": _F32_BYTES * weights,
        "base in 4 bits": round(shape.linear_parameters * base_bits(config.quant, shape) / 8)
        + compute * shape.embedding_parameters,
        "layer outputs": _F32_BYTES * kept,
        "framework": _FRAMEWORK,
    }
    total = sum(components.values())
    return Memory(
        components=components,
        low=total,
        high=round(total * (1 + _SPREAD)),
        outside=0,
        basis="formula",
    )


_ALIKE = 0.95  # above this fraction of the longest, all documents have about the same length
_RECENT = 20  # most recent runs used for an interval; older ones ran older code


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast:
    """The predicted cost of a run.

    Attributes:
        memory: the estimate, corrected and bounded by earlier runs if there are enough.
        formula: the peak by formula alone, without the part that a run's probe does not measure.
        runs: ids of the earlier runs of similar size used for the forecast.
        pace: the throughput.
        per_token: training operations per token.
    """

    memory: Memory
    formula: int
    runs: tuple[str, ...]
    pace: throughput_model.Throughput
    per_token: float


def tokens_per_step(config: RunConfig) -> int:
    """Return the number of tokens in one optimizer step, assuming full blocks."""
    data = config.data
    return data.seq_len * data.micro_batch_size * config.trainer.accumulate_grad_batches


def trained_tokens(config: RunConfig, data: dict[str, Any], steps: int | None) -> int | None:
    """Return the tokens of `steps` steps: exact for whole epochs, else assuming full blocks."""
    blocks: int | None = data.get("train_blocks")
    if steps is None or not blocks:
        return None if steps is None else steps * tokens_per_step(config)
    taken = steps * config.data.micro_batch_size * config.trainer.accumulate_grad_batches
    if config.trainer.max_epochs > 0:
        taken = min(taken, config.trainer.max_epochs * blocks)
    tokens: int = data["train_tokens"]
    return round(taken * tokens / blocks)


def documents_of(config: RunConfig, data: dict[str, Any]) -> Documents:
    """Return the document lengths in the plan's data part; unknown lengths are set to the limit."""
    limit = config.data.seq_len
    longest, typical = data.get("longest_tokens"), data.get("typical_tokens")
    return Documents(
        longest=longest or limit,
        typical=typical or limit,
        varied=not (longest and typical) or typical < _ALIKE * longest,
        shared_frac=data.get("shared_frac", 0.0),
    )


def forecast(
    config: RunConfig, shape: Shape, documents: Documents, machine: Machine, cache: Path
) -> Forecast:
    """Estimate the memory and throughput of a run."""
    sizes = {"parameters": shape.total_parameters, "tokens_per_step": tokens_per_step(config)}
    known = [
        one
        for one in entries(ledger_path(cache))
        if (one.device, one.backend) == (machine.name, config.backend.name)
        and is_alike(one, **sizes)
    ][-_RECENT:]
    plain = memory(config, shape, documents, kind=machine.kind, has_bf16=machine.has_bf16)
    seen = residuals(_ratios(known))
    return Forecast(
        memory=_corrected(plain, seen),
        formula=plain.estimate - plain.outside,
        runs=tuple(one.run_id for one in known),
        pace=throughput_model.throughput_of(config, machine.kind, known, _rate_spread(known)),
        per_token=_per_token(config, shape, documents, machine),
    )


def _per_token(config: RunConfig, shape: Shape, documents: Documents, machine: Machine) -> float:
    """Return training operations per token."""
    spec = config.objective.spec
    adapter, linears = trained_parameters(config, shape), frozen_linears(config, shape)
    if isinstance(config.backend, ProxyConfig):
        return throughput_model.proxy_flop_per_token(
            linears + shape.vocab_size * shape.hidden_size,
            adapter,
            learned_frac=spec.supervised_frac(config.objective, documents.typical),
            micro_batch_tokens=config.data.micro_batch_size * config.data.seq_len,
        )
    again = recomputes(config, shape, machine.kind)
    teacher = teacher_of(config.objective, config.model)
    passes = 0.0
    if teacher is not None and not spec.passes_before(config.objective):
        passes = throughput_model.forward_flop_per_token(shape_of(teacher))
    return passes + throughput_model.flop_per_token(
        shape,
        adapter,
        linears=linears,
        again=again,
        reference=spec.needs_reference and not spec.passes_before(config.objective),
    )


def _ratios(known: list[Entry]) -> list[float]:
    return [
        one.measured_peak_bytes / one.predicted_peak_bytes
        for one in known
        if one.measured_peak_bytes and one.predicted_peak_bytes
    ]


def _rate_spread(known: list[Entry]) -> Residuals | None:
    rates = [
        one.flop_per_step / one.measured_step_s
        for one in known
        if one.flop_per_step and one.measured_step_s
    ]
    return residuals([rate / rates[-1] for rate in rates])


def _corrected(plain: Memory, seen: Residuals | None) -> Memory:
    if seen is None:
        return plain
    total = plain.estimate
    correction = {"as earlier runs here": round(total * (seen.centre - 1))}
    return replace(
        plain,
        components={**plain.components, **correction},
        low=round(total * seen.low),
        high=round(total * seen.high),
        basis=f"{plain.basis}; corrected and bounded by {seen.runs} earlier runs of similar size",
    )
