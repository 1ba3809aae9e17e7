"""Rules for the modules that learn, and for their initialization."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.lora import LoraInit
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.lora import LoraConfig
    from mens_exp.config.root import RunConfig

__all__ = ["problems"]


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `lora`."""
    lora = config.lora
    yield from _target_problems(lora.targets)
    yield from _pattern_problems(lora)
    quantized_all = config.quant.is_four_bit and not config.quant.skip
    if lora.init is not LoraInit.default and not quantized_all:
        yield ConfigError(
            "starts from what four bits miss of a weight, and some weights are not in four bits",
            where="lora.init",
            found=lora.init.value,
            expected="lora.init=default, or quant=nf4 with an empty quant.skip",
        )
    if lora.init_from is not None and lora.init is not LoraInit.default:
        yield ConfigError(
            "an adapter starts from one place",
            where="lora.init",
            found=f"{lora.init.value} beside lora.init_from={lora.init_from}",
            expected="lora.init=default, or lora.init_from=null",
            remedy="drop one of the two",
        )


def _target_problems(targets: list[str]) -> Iterator[ConfigError]:
    if not targets:
        yield ConfigError(
            "no module gets an adapter",
            where="lora.targets",
            found=[],
            expected="at least one group or module name, such as attention or q_proj",
        )
    if len(set(targets)) < len(targets):
        yield ConfigError(
            "a module is named twice",
            where="lora.targets",
            found=", ".join(targets),
            expected="each module once",
        )


def _pattern_problems(lora: LoraConfig) -> Iterator[ConfigError]:
    for name, usual in (("rank_pattern", lora.r), ("alpha_pattern", lora.alpha)):
        for target, value in getattr(lora, name).items():
            where = f"lora.{name}"
            if value < 1:
                yield ConfigError(
                    "out of range",
                    where=where,
                    found=f"{target}: {value}",
                    expected="a value >= 1",
                )
            elif value == usual and len(getattr(lora, name)) == 1:
                yield ConfigError(
                    "changes nothing: it is the value of every module",
                    where=where,
                    found=f"{target}: {value}",
                    expected=f"another value than {usual}, or no pattern",
                )
