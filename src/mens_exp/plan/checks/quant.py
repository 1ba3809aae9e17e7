"""Whether the base's layers can be quantized as asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.config.fields import range_problems
from mens_exp.config.quant import ComputeDtype
from mens_exp.errors import ConfigError
from mens_exp.layout.shape import shape_of
from mens_exp.layout.targets import linear_modules, skipped
from mens_exp.plan.file_messages import blocks_straddle
from mens_exp.plan.memory import dense_experts, modules_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError
    from mens_exp.layout.shape import Shape

__all__ = ["check", "expert_warnings"]


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
        one.kind: one.width
        for one in inside
        if one.path not in left and one.stack is None and one.width % quant.block
    }
    if wide:
        listed = ", ".join(f"{kind} ({width})" for kind, width in wide.items())
        found = f"{quant.block} for {listed}"
        yield blocks_straddle("quant.block_size", found, "a divisor of every width")


def expert_warnings(config: RunConfig, shape: Shape) -> Iterator[str]:
    """Yield what is not as `quant` says of the experts of a mixture, and what that means for them.

    transformers holds them as tensors of three dimensions, and bitsandbytes quantizes linear
    modules alone.
    """
    if config.backend.name == "proxy" or not shape.expert_parameters:
        return
    dtype = config.quant.compute_dtype
    dense = dense_experts(config, shape)
    if dense:
        size = dense * (2 if dtype is ComputeDtype.bf16 else 4)
        yield (
            f"the experts are not quantized: {dense:,} of {shape.parameters:,} parameters stay in "
            f"{dtype.value} ({size / 1e9:.2f} GB). bitsandbytes quantizes linear layers, and "
            "transformers holds experts as tensors of three dimensions. "
            "Next: see that the device has the memory of this plan"
        )
    adapted = any(one.stack is not None for one in modules_of(config, shape))
    if adapted and config.backend.name != "full" and dtype is ComputeDtype.bf16:
        yield (
            "PEFT adds the adapter to the weights of experts in their own format, bf16, where a "
            "change of less than about 1/512 of a weight is lost in each pass. "
            "Next: set quant.compute_dtype=f32 for an exact sum, at twice the memory of the experts"
        )
