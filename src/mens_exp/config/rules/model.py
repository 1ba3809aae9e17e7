"""Dimensions that a configuration states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.nearest import expected_name
from mens_exp.config.checkpointing import Checkpointing
from mens_exp.config.model import ModelFamily, RandomModel
from mens_exp.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig

__all__ = ["BLOCK_SIZE", "problems"]

_STRADDLES = "4-bit blocks would straddle rows, which bitsandbytes gets wrong in silence"
BLOCK_SIZE = 64  # bitsandbytes' default block of one scale; asserted in tests/backends


def problems(config: RunConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with `model`, its dimensions all in their intervals."""
    model = config.model
    if Checkpointing.read(model.gradient_checkpointing) is None:
        yield ConfigError(
            "unknown setting",
            where="model.gradient_checkpointing",
            found=model.gradient_checkpointing,
            expected=expected_name(model.gradient_checkpointing, Checkpointing.__members__),
        )
    if isinstance(model, RandomModel):
        if config.quant.is_four_bit:
            yield from _widths(model)
        yield from _heads(model)
        yield from _shared_heads(model)


def _widths(model: RandomModel) -> Iterator[ConfigError]:
    for name in ("hidden_size", "intermediate_size"):
        width = getattr(model, name)
        if width % BLOCK_SIZE:
            yield ConfigError(
                _STRADDLES,
                where=f"model.{name}",
                found=width,
                expected=f"a multiple of {BLOCK_SIZE}",
            )
    if model.head_dim is not None and (model.head_dim * model.num_attention_heads) % BLOCK_SIZE:
        yield ConfigError(
            _STRADDLES,
            where="model.head_dim",
            found=f"{model.num_attention_heads} heads of {model.head_dim}",
            expected=f"heads that are a multiple of {BLOCK_SIZE} wide together",
        )


def _heads(model: RandomModel) -> Iterator[ConfigError]:
    stated = model.head_dim is not None
    if stated and model.head_dim % 2:  # type: ignore[operator]  # not None, as stated says
        yield ConfigError(
            "heads must have an even width", where="model.head_dim", found=model.head_dim
        )
    if (
        model.hidden_size % model.num_attention_heads
        if stated
        else model.hidden_size % (2 * model.num_attention_heads)
    ):
        yield ConfigError(
            "heads must have an even, whole width",
            where="model.num_attention_heads",
            found=f"{model.num_attention_heads} heads for a width of {model.hidden_size}",
            expected="hidden_size divisible by twice the heads",
        )
    if model.num_attention_heads % model.num_key_value_heads:
        yield ConfigError(
            "query heads must divide evenly over key and value heads",
            where="model.num_key_value_heads",
            found=f"{model.num_key_value_heads} for {model.num_attention_heads} query heads",
            expected="a divisor of num_attention_heads",
        )


def _shared_heads(model: RandomModel) -> Iterator[ConfigError]:
    if model.family is ModelFamily.gpt2 and model.num_key_value_heads != model.num_attention_heads:
        yield ConfigError(
            "gpt2 gives every query head keys and values of its own",
            where="model.num_key_value_heads",
            found=model.num_key_value_heads,
            expected=f"{model.num_attention_heads}, as num_attention_heads",
        )
