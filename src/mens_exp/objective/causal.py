"""Next-token cross entropy as a sum and a count, without ever holding all logits.

Shapes: M supervised positions, D hidden width, V vocabulary, C positions in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CrossEntropy", "LossSum", "Objective"]


@dataclass(frozen=True, slots=True)
class LossSum:
    """Sum of token losses (nats, f32 scalar with a gradient) and the number of tokens."""

    total: torch.Tensor
    count: int


class Objective(Protocol):
    """From hidden states at supervised positions to a loss sum and a token count."""

    def __call__(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> LossSum:
        """Return the loss over all M targets; ``head`` maps ``[C, D]`` to ``[C, V]`` logits."""


@dataclass(frozen=True, slots=True)
class CrossEntropy:
    """Cross entropy of each supervised token under the head's logits, in f32."""

    name: str
    chunk_tokens: int

    def __call__(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> LossSum:
        """Sum the losses; the head runs on ``chunk_tokens`` positions at a time."""
        train = torch.is_grad_enabled() and hidden_MD.requires_grad
        total = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
            hidden_MD, targets_M, head, self.chunk_tokens, train
        )
        return LossSum(total=total, count=targets_M.numel())


class _ChunkedLoss(torch.autograd.Function):
    """Loss sum whose gradient to the hidden states is made chunk by chunk in the forward pass.

    The head is frozen, so its only gradient is the one to its input; computing it while a
    chunk's logits exist saves running the head twice and storing ``[M, V]`` anything.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        chunk: int,
        train: bool,
    ) -> torch.Tensor:
        """Return the loss sum, keeping its gradient ``[M, D]`` for the backward pass."""
        total = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        gradient_MD = torch.empty_like(hidden_MD) if train else None
        for start in range(0, len(targets_M), chunk):
            piece = slice(start, start + chunk)
            with torch.set_grad_enabled(train):
                hidden_CD = hidden_MD[piece].detach().requires_grad_(train)
                loss = functional.cross_entropy(
                    head(hidden_CD).float(), targets_M[piece], reduction="sum"
                )
            if gradient_MD is not None:
                (gradient_MD[piece],) = torch.autograd.grad(loss, hidden_CD)
            total += loss.detach()
        ctx.gradient_MD = gradient_MD
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Scale the kept gradient."""
        return ctx.gradient_MD * upstream[0], None, None, None, None
