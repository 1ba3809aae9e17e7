"""Muon for matrices and AdamW for all other parameters, as one optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.optim import AdamW, Muon, Optimizer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

_MATRIX = 2


class MuonAndAdamW(Optimizer):
    """torch's Muon and AdamW, whose groups and state are those of this optimizer.

    A schedule sees one group for each of the two. The state is saved and loaded like that of any
    other optimizer.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        betas: Sequence[float],
        eps: float,
        **of_muon: Any,
    ) -> None:
        """Divide the parameters by their number of dimensions.

        Args:
            params: parameters, of which Muon trains those with two dimensions.
            lr: rate of both.
            weight_decay: decoupled decay of both.
            betas: AdamW's.
            eps: AdamW's.
            of_muon: other arguments of `torch.optim.Muon`.
        """
        every = list(params)
        matrices = [one for one in every if one.ndim == _MATRIX]
        others = [one for one in every if one.ndim != _MATRIX]
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        self.parts: list[Optimizer] = []
        if matrices:
            self.parts.append(Muon(matrices, **shared, **of_muon))
        if others:
            self.parts.append(AdamW(others, **shared, betas=(betas[0], betas[1]), eps=eps))
        super().__init__([part.param_groups[0] for part in self.parts], {})
        self._share()

    def _share(self) -> None:
        """Make both use the groups and the state of this optimizer."""
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of both; torch replaces groups and state with new objects."""
        super().load_state_dict(state_dict)
        self._share()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step of both.

        Args:
            closure: computes the loss and the gradients.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss
