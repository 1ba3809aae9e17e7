"""The modules that get an adapter, matched against the model's shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.backend import ProxyConfig
from mens_exp.config.lora import LoraInit, LoraVariant
from mens_exp.config.validate import range_problems
from mens_exp.errors import ConfigError
from mens_exp.layout.names import HEAD
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import chosen, target_problems

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
    if not problems and any(one.layer is None for one in chosen(lora, shape)):
        yield from _head_problems(lora)


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
