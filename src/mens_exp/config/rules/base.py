"""Rules for the frozen base on its devices: sharded, in host memory, or multiplied in FP8.

trainer=fsdp shards the frozen decoder layers of a causal model, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import names_where
from mens_exp.config.fields import plain
from mens_exp.config.quant import PATTERNS, ComputeDtype
from mens_exp.config.rules.suite import scorecard_of
from mens_exp.config.schedule import ScheduleKind
from mens_exp.config.trainer import Strategy
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig


def can_be_sharded(config: RunConfig) -> bool:
    """Return whether a run supports trainer=fsdp, regardless of how codes are stored."""
    return next(_of_the_run(config), None) is None


def sharded_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the parts of a run that cannot be sharded."""
    if config.trainer.sharing is not Strategy.fsdp:
        return
    yield from _of_the_run(config)
    quant = config.quant
    if not config.backend.spec.adapts_transformers or "storage_dtype" not in quant.spec.settings:
        return
    if quant.storage_dtype.value != quant.compute_dtype.value:
        yield ConfigError(
            "sharded 4-bit weights are stored in tensors of the compute format",
            where="quant.storage_dtype",
            found=quant.storage_dtype.value,
            expected=f"quant.compute_dtype, {quant.compute_dtype.value}; the codes are the same",
            remedy=f"choose quant.storage_dtype={quant.compute_dtype.value}",
        )


def _of_the_run(config: RunConfig) -> Iterator[ConfigError]:
    if not config.backend.spec.adapts_transformers:
        yield ConfigError(
            "has no frozen base of decoder layers to shard",
            where="backend",
            found=config.backend.name,
            expected=" or ".join(names_where(lambda one: one.adapts_transformers)),
            remedy="choose trainer=ddp",
        )
        return
    quant, lora = config.quant, config.lora
    if quant.spec.stays_whole is not None:
        yield ConfigError(
            quant.spec.stays_whole,
            where="quant.quant_type",
            found=quant.quant_type.value,
            expected="nf4, fp4, or none with backend=lora",
            remedy="choose quant=nf4, or trainer=ddp",
        )
    for name in PATTERNS:
        if pattern := getattr(quant, name):
            yield ConfigError(
                "sharding needs one quantizer for all weights",
                where=f"quant.{name}",
                found=", ".join(pattern),
                expected="nothing",
                remedy="choose trainer=ddp",
            )
    if lora.spec.not_sharded is not None:
        yield ConfigError(
            lora.spec.not_sharded,
            where="lora.variant",
            found=lora.spec.name,
            expected="an adapter method whose layers share nothing, such as lora",
            remedy="choose trainer=ddp",
        )
    if lora.start_changes_base:
        yield ConfigError(
            "this initialization replaces weights of the base, which is sharded",
            where="lora.init",
            found=lora.init.value,
            expected="default, or loftq with lora.loftq_iters=1",
            remedy="choose trainer=ddp",
        )
    scorecard = scorecard_of(config)
    if scorecard is not None and scorecard.every_n_steps is not None:
        yield ConfigError(
            "the scorecard is computed by one process, which holds only a part of the base",
            where="callbacks.scorecard.every_n_steps",
            found=scorecard.every_n_steps,
            expected="null: scored when training has ended",
            remedy="choose callbacks.scorecard.every_n_steps=null, or trainer=ddp",
        )


def offload_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the parts of a run that need the codes of the base on the device."""
    if not config.model.offload:
        return
    quant, lora = config.quant, config.lora
    without = "set model.offload=false"
    if not config.backend.spec.adapts_transformers or not quant.is_quantized:
        yield ConfigError(
            "there are no codes of a frozen base to offload",
            where="model.offload",
            found=f"true with backend={config.backend.name} quant={quant.quant_type.value}",
            expected="backend=qlora",
            remedy=without,
        )
        return
    kinds = dict.fromkeys([quant.quant_type, *quant.type_pattern.values()])
    if fixed := [one.value for one in kinds if not one.spec.offloads]:
        yield ConfigError(
            "its layers need their codes on the device",
            where="quant.quant_type",
            found=", ".join(fixed),
            expected="nf4, fp4, or a quantizer of codebooks, with model.offload=true",
            remedy=f"choose quant=nf4, or {without}",
        )
    if lora.spec.reads_base:
        yield ConfigError(
            "this adapter method reads the base's weights, which are in host memory",
            where="lora.variant",
            found=lora.spec.name,
            expected="a method that only multiplies by them, such as lora, with model.offload=true",
            remedy=without,
        )
    if lora.start_changes_base or lora.init.spec.from_rows:
        yield ConfigError(
            "this initialization reads or replaces weights of the base, which are in host memory",
            where="lora.init",
            found=lora.init.value,
            expected="default, or loftq with lora.loftq_iters=1, with model.offload=true",
            remedy=without,
        )
    if config.trainer.sharing is Strategy.fsdp:
        yield ConfigError(
            "sharding puts the base on the devices already",
            where="model.offload",
            found="true with trainer=fsdp",
            expected="one of the two",
            remedy=f"choose trainer=ddp, or {without}",
        )


def fp8_problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield the parts of a run that cannot multiply in FP8."""
    if not config.model.fp8:
        return
    quant, lora, backend = config.quant, config.lora, config.backend
    spec, objective = quant.spec, config.objective.spec
    is_ours = spec.offloads or spec.keeps_codes or not spec.is_quantized
    looks_back = objective.needs_reference or objective.compares_groups
    schedule = getattr(config.schedule, "kind", None)
    holds = {
        "objective": (
            not looks_back,
            config.objective.name,
            "an objective without a reference and without sampled answers",
        ),
        "schedule": (
            schedule is not ScheduleKind.lr_range,
            plain(schedule),
            "a schedule that does not subtract the loss of the base",
        ),
        "backend": (
            backend.spec.adapts_transformers,
            backend.name,
            " or ".join(names_where(lambda one: one.adapts_transformers)),
        ),
        "quant.compute_dtype": (
            quant.compute_dtype is ComputeDtype.bf16,
            quant.compute_dtype.value,
            "bf16, from which FP8 is rounded",
        ),
        "quant.quant_type": (is_ours, spec.name, "a quantizer that keeps inputs in bf16, or none"),
        "lora.variant": (
            not lora.spec.reads_base,
            lora.spec.name,
            "a method that only multiplies by the base, such as lora",
        ),
    }
    for where, (is_so, found, expected) in holds.items():
        if not is_so:
            yield ConfigError(
                "products with the base cannot be in FP8",
                where=where,
                found=found,
                expected=f"{expected}, with model.fp8=true",
                remedy="set model.fp8=false",
            )
