"""Rules for the storage of the base, and for the backends that accept it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.quant import QuantType
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.quant import QuantConfig
    from mens_exp.config.root import RunConfig

__all__ = ["problems"]

# What each of ours is built on; a backend of the user's own may be built on either.
_QUANTIZED = {"qlora": True, "proxy": True, "lora": False, "full": False, "burn": False}
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)  # bitsandbytes' own; 32 is for other devices


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `quant`, alone and under the chosen backend."""
    quant, name = config.quant, config.backend.name
    trains = config.task.name != "attribute"  # which builds no backend, and has a rule of its own
    if trains and quant.is_quantized != _QUANTIZED.get(name, quant.is_quantized):
        yield ConfigError(
            f"backend={name} has {'no' if quant.is_quantized else 'a'} quantized base",
            where="quant.quant_type",
            found=quant.quant_type.value,
            expected="none" if quant.is_quantized else _bases(name),
            remedy="choose quant=none"
            if quant.is_quantized
            else "choose backend=lora, or quant=nf4",
        )
    if quant.block_size is not None and quant.block_size not in _BLOCKS:
        yield ConfigError(
            "is no block size of bitsandbytes",
            where="quant.block_size",
            found=quant.block_size,
            expected=f"one of {', '.join(map(str, _BLOCKS))}",
        )
    if len(set(quant.skip)) < len(quant.skip):
        yield ConfigError(
            "a module is named twice",
            where="quant.skip",
            found=", ".join(quant.skip),
            expected="each module once",
        )
    if quant.is_quantized and name == "proxy":
        yield from _unused_by_the_proxy(quant)


def _bases(backend: str) -> str:
    return "nf4 or fp4" if backend == "proxy" else "nf4, fp4 or int8"


def _unused_by_the_proxy(quant: QuantConfig) -> Iterator[ConfigError]:
    """Yield what the stack, quantized once and read from its compute copy, has no use for."""
    if quant.quant_type is QuantType.int8:
        yield ConfigError(
            "the proxy stack is defined over 4-bit projections",
            where="quant.quant_type",
            found=quant.quant_type.value,
            expected=_bases("proxy"),
            remedy="choose quant=nf4, or backend=qlora",
        )
    if quant.skip:
        yield ConfigError(
            "the proxy stack quantizes all of its projections",
            where="quant.skip",
            found=", ".join(quant.skip),
            expected="nothing",
        )
