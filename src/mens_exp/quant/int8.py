"""bitsandbytes' 8-bit linear layer, made to compute one thing in training and in evaluation.

A weight's row shares one f32 scale, its largest magnitude; its codes are -127 to 127 (LLM.int8,
arXiv:2208.07339). On CUDA inputs are quantized too, row by row, but for columns with a value above
the threshold. On CPU the library does that in evaluation alone; in training it multiplies with
dequantized weights. Its loss would then be measured of another function than learns.

Imported where something is quantized to 8 bits, as bitsandbytes takes long to import.
Shapes: I inputs and O outputs of a layer.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bitsandbytes.nn import Linear8bitLt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

LEVELS = 127  # of either sign


class OneModeLinear(Linear8bitLt):  # type: ignore[misc]  # bitsandbytes is untyped
    """An 8-bit layer that computes in evaluation as it does in training.

    It takes the place of a layer's class, so that weights are not made twice.
    """

    training: bool  # torch's own
    one_mode = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., O]`` in the format of ``x`` ``[..., I]``."""
        mode = self.training
        self.training = mode or self.one_mode
        try:
            output: torch.Tensor = super().forward(x)
        finally:
            self.training = mode
        return output

    def init_8bit_state(self) -> None:
        """Take the codes over from the parameter, which keeps its scales.

        PEFT's DoRA replaces the parameter at each forward; without scales they would be lost.
        """
        super().init_8bit_state()
        self.weight.SCB = self.state.SCB

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move codes and scales along; torch alone would move the parameter and leave them."""
        super()._apply(fn, recurse)
        self.weight.CB, self.weight.SCB = self.weight.data, fn(self.weight.SCB)
        self.init_8bit_state()
        return self


def in_one_mode(layers: Iterable[Any]) -> None:
    """Make layers of bitsandbytes' class, already quantized, compute one thing in both modes."""
    # At every call it would say that it rounds inputs to f16 before quantizing them.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for layer in layers:
        layer.__class__ = OneModeLinear
        if layer.weight.CB is not None:  # else a forward has taken them over, or we have
            layer.init_8bit_state()
        layer.weight.SCB = layer.state.SCB


@contextmanager
def as_the_library_has_it(layers: Iterable[OneModeLinear]) -> Iterator[None]:
    """Inside the block, let evaluation be what it is for whoever loads the base elsewhere."""
    changed = list(layers)
    for layer in changed:
        layer.one_mode = False
    try:
        yield
    finally:
        for layer in changed:
            layer.one_mode = True
