"""Next-token cross entropy as a sum and a count, without ever holding all logits.

Shapes: M supervised positions, D hidden width, V vocabulary, C positions in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from mens_exp.objective.token_loss import each_cross_entropy, summed_cross_entropy

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CrossEntropy", "LossSum", "Objective"]


@dataclass(frozen=True, slots=True)
class LossSum:
    """Sum of token losses (nats, f32 scalar with a gradient) and the number of tokens.

    ``losses_M`` are the token losses themselves, f32 without a gradient. An objective may give
    them while gradients are off; validation then records a loss for every document.
    """

    total: torch.Tensor
    count: int
    losses_M: torch.Tensor | None = None


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
        """Sum the losses; the head runs on ``chunk_tokens`` positions at a time.

        Gradients reach the hidden states and whatever parameters of the head learn. Each
        chunk's are made while its logits exist, which saves running the head twice and storing
        ``[M, V]`` anything.
        """
        if not torch.is_grad_enabled():
            return self._each(hidden_MD, targets_M, head)
        total = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        gradients = _Gradients(hidden_MD)
        for start in range(0, len(targets_M), self.chunk_tokens):
            piece = slice(start, start + self.chunk_tokens)
            hidden_CD = hidden_MD[piece].detach().requires_grad_(gradients.hidden_MD is not None)
            loss = summed_cross_entropy(head(hidden_CD), targets_M[piece])
            gradients.add(piece, hidden_CD, loss)
            total += loss.detach()
        return LossSum(total=gradients.attached_to(total), count=targets_M.numel())

    def _each(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> LossSum:
        """Return the same sum without gradients, with the loss of each token."""
        total = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        losses = []
        for start in range(0, len(targets_M), self.chunk_tokens):
            piece = slice(start, start + self.chunk_tokens)
            loss, losses_C = each_cross_entropy(head(hidden_MD[piece]), targets_M[piece])
            total += loss
            losses.append(losses_C)
        losses_M = torch.cat(losses) if losses else total.new_zeros(0)
        return LossSum(total=total, count=targets_M.numel(), losses_M=losses_M)


class _Gradients:
    """The gradients of a loss sum, collected chunk by chunk."""

    def __init__(self, hidden_MD: torch.Tensor) -> None:
        """Make room for the gradient of the hidden states, where they want one."""
        self.of = hidden_MD
        wanted = torch.is_grad_enabled() and hidden_MD.requires_grad
        self.hidden_MD = torch.zeros_like(hidden_MD) if wanted else None
        self.parameters: list[torch.Tensor] | None = None
        self.sums: list[torch.Tensor] = []

    def add(self, piece: slice, hidden_CD: torch.Tensor, loss: torch.Tensor) -> None:
        """Take the gradients of one chunk, whose graph is let go afterwards."""
        if not loss.requires_grad:
            return
        if self.parameters is None:
            self.parameters = [leaf for leaf in _leaves(loss) if leaf is not hidden_CD]
            self.sums = [torch.zeros_like(parameter) for parameter in self.parameters]
        inputs = [] if self.hidden_MD is None else [hidden_CD]
        found = list(torch.autograd.grad(loss, [*inputs, *self.parameters]))
        if self.hidden_MD is not None:
            self.hidden_MD[piece] = found.pop(0)
        for so_far, gradient in zip(self.sums, found, strict=True):
            so_far.add_(gradient)

    def attached_to(self, total: torch.Tensor) -> torch.Tensor:
        """Return the loss sum with these gradients behind it."""
        inputs = [] if self.hidden_MD is None else [self.of]
        known = [] if self.hidden_MD is None else [self.hidden_MD]
        attached: torch.Tensor = _KnownGradients.apply(  # type: ignore[no-untyped-call]
            total, [*known, *self.sums], *inputs, *(self.parameters or [])
        )
        return attached


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that a graph accumulates gradients in, in a fixed order.

    Asked of the graph, so that no caller can forget to name a parameter of its head.
    """
    found: dict[int, torch.Tensor] = {}
    nodes, seen = [loss.grad_fn], set()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # AccumulateGrad, at a leaf
            found[id(node.variable)] = node.variable
        nodes += [parent for parent, _ in node.next_functions]
    return list(found.values())


class _KnownGradients(torch.autograd.Function):
    """A number whose gradients are known already; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, gradients: list[torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the number, keeping the gradient of each input."""
        del inputs
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Scale the kept gradients."""
        return None, None, *(gradient * upstream[0] for gradient in ctx.gradients)
