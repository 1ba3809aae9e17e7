"""The part that trainer=fsdp can shard: the frozen decoder layers of a causal model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.quant import QuantType
from mens_exp.config.rules.suite import scorecard_of
from mens_exp.config.trainer import Strategy
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["may_be_in_parts", "problems"]

_BACKENDS = ("qlora", "lora")  # whose base is frozen, and a model of transformers


def may_be_in_parts(config: RunConfig) -> bool:
    """Tell whether trainer=fsdp suits a run as it is, however its codes are stored."""
    return next(_of_the_run(config), None) is None


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what of a run cannot be in parts."""
    if config.trainer.strategy is not Strategy.fsdp:
        return
    yield from _of_the_run(config)
    quant = config.quant
    if config.backend.name not in _BACKENDS or not quant.is_four_bit:
        return
    if quant.storage_dtype.value != quant.compute_dtype.value:
        yield ConfigError(
            "parts of 4-bit weights lie in tensors of the compute format",
            where="quant.storage_dtype",
            found=quant.storage_dtype.value,
            expected=f"quant.compute_dtype, {quant.compute_dtype.value}; the codes are the same",
            remedy=f"choose quant.storage_dtype={quant.compute_dtype.value}",
        )


def _of_the_run(config: RunConfig) -> Iterator[ConfigError]:
    if config.backend.name not in _BACKENDS:
        yield ConfigError(
            "has no frozen base of decoder layers that processes could hold in parts",
            where="backend",
            found=config.backend.name,
            expected=" or ".join(_BACKENDS),
            remedy="choose trainer=ddp",
        )
        return
    quant, lora = config.quant, config.lora
    if quant.quant_type is QuantType.int8:
        yield ConfigError(
            "bitsandbytes keeps codes of eight bits outside of what can be in parts",
            where="quant.quant_type",
            found=quant.quant_type.value,
            expected="nf4, fp4, or none with backend=lora",
            remedy="choose quant=nf4, or trainer=ddp",
        )
    if lora.start_changes_base:
        yield ConfigError(
            "this start exchanges the base's weights, which are in parts",
            where="lora.init",
            found=lora.init.value,
            expected="default, or loftq with lora.loftq_iters=1",
            remedy="choose trainer=ddp",
        )
    scorecard = scorecard_of(config)
    if scorecard is not None and scorecard.every_n_steps is not None:
        yield ConfigError(
            "one process scores, and no part of a base answers alone",
            where="callbacks.scorecard.every_n_steps",
            found=scorecard.every_n_steps,
            expected="null: scored when training has ended",
            remedy="choose callbacks.scorecard.every_n_steps=null, or trainer=ddp",
        )
