"""The modules that get an adapter, matched against the model's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.fields import range_problems
from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.config.trainer import Strategy
from mens_exp.errors import ConfigError
from mens_exp.layout.names import HEAD
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import chosen, target_problems, without_experts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield what is wrong with the modules that get an adapter."""
    if isinstance(config.backend, ProxyConfig):
        return  # its stack is its targets
    if any(range_problems(config.model)):
        return  # told already, and the model has no shape then
    lora, shape = config.lora, shape_of(config.model)
    problems = target_problems(lora, shape)
    yield from problems
    modules = () if problems else chosen(lora, shape)
    if any(one.layer is None for one in modules):
        yield from _head_problems(lora)
    if any(one.stack is not None for one in modules):
        yield from _expert_problems(config, without_experts(shape.family, modules))


def _expert_problems(config: RunConfig, without: str) -> Iterator[MensError]:
    """Refuse what PEFT's LoRA on the experts of a layer, one tensor, cannot be."""
    lora = config.lora
    if lora.dropout > 0:
        yield ConfigError(
            "experts get adapters without dropout alone: PEFT adds to their weights, and drops "
            "none of their inputs",
            where="lora.dropout",
            found=lora.dropout,
            expected="0, where experts are among the targets",
            remedy=f"set lora.dropout=0 to adapt experts; to leave them alone, {without}",
        )
    if lora.variant is LoraVariant.dora:
        yield ConfigError(
            "PEFT has no DoRA for experts",
            where="lora.variant",
            found="dora, with adapters on experts",
            expected="lora.variant=lora or rslora",
            remedy=f"set lora.variant=lora; to leave the experts alone, {without}",
        )
    if lora.init is not LoraInit.default:
        yield ConfigError(
            "experts are not quantized, so there is no quantization error to start from",
            where="lora.init",
            found=f"{lora.init.value}, with adapters on experts",
            expected="lora.init=default",
            remedy=f"set lora.init=default; to leave the experts alone, {without}",
        )
    if config.trainer.strategy is Strategy.fsdp:
        yield ConfigError(
            "PEFT adds to whole experts, and here each process holds a part of them",
            where="trainer.strategy",
            found="fsdp, with adapters on experts",
            expected="a strategy under which each process holds the whole base",
            remedy=f"set trainer=gpu or trainer=ddp; to leave the experts alone, {without}",
        )


def _head_problems(lora: LoraConfig) -> Iterator[MensError]:
    """Refuse what an adapter on the head cannot be."""
    if lora.init is not LoraInit.default:
        yield ConfigError(
            "the head is not quantized, so there is no quantization error to start from",
            where="lora.init",
            found=f"{lora.init.value}, with an adapter on {HEAD}",
            expected=f"lora.init=default, or targets without {HEAD}",
        )
    if lora.variant is LoraVariant.dora:
        yield ConfigError(
            "the head has rows of zeros (padding), which have no direction to learn apart",
            where="lora.variant",
            found=f"dora, with an adapter on {HEAD}",
            expected=f"lora.variant=lora or rslora, or targets without {HEAD}",
        )
