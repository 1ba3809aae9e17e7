"""bitsandbytes' 8-bit linear layer, changed to compute the same in training and in evaluation.

Each row of a weight has one f32 scale, its largest magnitude; codes are -127 to 127 (LLM.int8,
arXiv:2208.07339). On CUDA, inputs are quantized too, row by row, except for columns with a value
above the threshold. On CPU the library does so only in evaluation; in training it multiplies with
dequantized weights. The evaluation loss would then be that of a different function than is trained.

Imported only if something is quantized to 8 bits, because importing bitsandbytes is slow.
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

LEVELS = 127  # for each sign


class OneModeLinear(Linear8bitLt):  # type: ignore[misc]  # bitsandbytes is untyped
    """An 8-bit layer that computes in evaluation as it does in training.

    It replaces the class of an existing layer, so that weights are not created twice.
    """

    training: bool  # declared by torch.nn.Module
    one_mode = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[..., O]`` in the dtype of ``x`` ``[..., I]``."""
        mode = self.training
        self.training = mode or self.one_mode
        try:
            output: torch.Tensor = super().forward(x)
        finally:
            self.training = mode
        return output

    def init_8bit_state(self) -> None:
        """Take the codes from the parameter, but leave its scales on it.

        PEFT's DoRA replaces the parameter at each forward and would otherwise lose the scales.
        """
        super().init_8bit_state()
        self.weight.SCB = self.state.SCB

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Move codes and scales too; torch alone would move only the parameter."""
        super()._apply(fn, recurse)
        self.weight.CB, self.weight.SCB = self.weight.data, fn(self.weight.SCB)
        self.init_8bit_state()
        return self


def in_one_mode(layers: Iterable[Any]) -> None:
    """Make quantized layers of bitsandbytes compute the same in both modes."""
    # bitsandbytes warns at every call that it rounds inputs to f16 before quantizing them.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    for layer in layers:
        layer.__class__ = OneModeLinear
        if layer.weight.CB is not None:  # None: the state already has the codes
            layer.init_8bit_state()
        layer.weight.SCB = layer.state.SCB


@contextmanager
def as_the_library_has_it(layers: Iterable[OneModeLinear]) -> Iterator[None]:
    """Within the context, evaluate as other programs that load the base do."""
    changed = list(layers)
    for layer in changed:
        layer.one_mode = False
    try:
        yield
    finally:
        for layer in changed:
            layer.one_mode = True
