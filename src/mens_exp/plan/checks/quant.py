"""Whether the base's layers can be quantized as asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.validate import range_problems
from mens_exp.errors import ConfigError
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import linear_modules, skipped
from mens_exp.plan.file_messages import blocks_straddle

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["check"]


def check(config: RunConfig) -> Iterator[MensError]:
    """Yield the layers that blocks of weights do not divide, which gives wrong sums in silence."""
    quant = config.quant
    if not quant.is_four_bit or any(range_problems(config.model)):
        return  # nothing to quantize, or told already
    shape = shape_of(config.model)
    left = {one.path for one in skipped(quant.skip, shape)}
    inside = [one for one in linear_modules(shape) if one.layer is not None]
    if config.task.name == "attribute" and len(left) == len(inside):
        yield ConfigError(
            "leaves nothing quantized, and so nothing to attribute",
            where="quant.skip",
            found=", ".join(quant.skip),
            expected="at least one linear module that is quantized",
        )
    if quant.block_size is None:
        return  # 64 is the model's own check
    wide = {
        one.kind: one.width for one in inside if one.path not in left and one.width % quant.block
    }
    if wide:
        listed = ", ".join(f"{kind} ({width})" for kind, width in wide.items())
        found = f"{quant.block} for {listed}"
        yield blocks_straddle("quant.block_size", found, "a divisor of every width")
