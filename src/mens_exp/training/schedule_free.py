"""Schedule-free AdamW whose model holds the average, except while a gradient is computed.

The method (arXiv:2405.15682) has three points: z, which takes the steps; x, the average of all z,
which is the result; and y, between the two, where gradients are computed. The schedulefree package
keeps y in the model while it trains, and computes x and then y again by interpolation, which
rounds: a run that validates more often would learn other weights. Here y is stored, so that a round
trip changes no bit, and the model holds x whenever other code may read it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from schedulefree import AdamWScheduleFree

if TYPE_CHECKING:
    from collections.abc import Callable

_POINT = "y"  # key in a parameter's state


class ScheduleFreeAdamW(AdamWScheduleFree):  # type: ignore[misc]  # an untyped package's
    """The package's optimizer; its state has y besides z and the second moment.

    Call :meth:`to_gradient_point` before a forward pass that is learned from, and
    :meth:`to_average` after its backward pass. The steps are those of the package.
    """

    @torch.no_grad()
    def to_gradient_point(self) -> None:
        """Put y into the parameters, bit for bit as the last step left it."""
        for group in self.param_groups:
            for parameter in () if group["train_mode"] else group["params"]:
                state = self.state[parameter]
                if _POINT in state:  # before the first step, all three are equal
                    parameter.copy_(state[_POINT])
            group["train_mode"] = True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step from y, and leave the average in the parameters.

        Args:
            closure: computes the loss and the gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.to_gradient_point()
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                if state := self.state[parameter]:
                    state[_POINT] = parameter.clone()
        self.to_average()
        return loss

    def to_average(self) -> None:
        """Put x into the parameters, with the same bits each time."""
        self.eval()
