"""Objectives: the loss of a micro-batch as a sum and a count, and next-token cross entropy.

:mod:`mens_exp.config.objective` has the facts of an objective that need no torch.

The gradient is computed in the same pass, a few rows at a time. torch makes several passes over
f32 copies of all logits; with a vocabulary of 49,152 these cost more than the head's matrix
products. A few rows at a time stay in the processor's cache (measured: 256 rows on one core take
330 ms with torch and 43 ms here, equal to within 2e-8).

Shapes: M supervised positions, D hidden width, V vocabulary, C positions in a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch.utils.checkpoint import checkpoint

from mens_exp.rows.documents import WEIGHT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from mens_exp.data.batch import Batch
    from mens_exp.model.liger import FusedHead


@dataclass(frozen=True, slots=True)
class LossSum:
    """Sum of token losses (nats, f32 scalar with a gradient) and the number of tokens.

    ``count`` may count other units, such as pairs of answers, or be the sum of token weights; the
    step divides by it. ``losses_M`` are the individual token losses, f32 without a gradient. An
    objective may return them when gradients are disabled; validation then records a loss for every
    document. ``metrics`` are sums over the same units, by the names that the objective declares;
    ``counts`` has the number of units of a metric that sums over others.
    """

    total: torch.Tensor
    count: float
    losses_M: torch.Tensor | None = None
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    counts: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Values of each target of sampled answers, known before training, f32 ``[M]``.

    Attributes:
        advantage_M: how much better its answer is than others to the same prompt.
        old_logp_M: its log-probability under the adapter that training starts from, in nats.
        base_logp_M: that under the base; None if the objective does not compare with it.
    """

    advantage_M: torch.Tensor
    old_logp_M: torch.Tensor
    base_logp_M: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TopTokens:
    """A teacher's K most probable tokens at each target, known before training.

    Attributes:
        ids_MK: their ids, int64.
        logp_ML: their log-probabilities, and last that of all others together, f32 ``[M, K + 1]``,
            in nats at the objective's temperature.
        target_logp_M: log-probability of the target at temperature 1, f32, in nats.
    """

    ids_MK: torch.Tensor
    logp_ML: torch.Tensor
    target_logp_M: torch.Tensor

    def __getitem__(self, piece: slice) -> TopTokens:
        """Return the top tokens of a slice of targets."""
        return TopTokens(self.ids_MK[piece], self.logp_ML[piece], self.target_logp_M[piece])


@dataclass(frozen=True, slots=True)
class Passed:
    """A micro-batch that has passed through the model.

    Attributes:
        batch: the micro-batch, on the model's device.
        hidden_MD: hidden states at the supervised positions.
        head: maps ``[C, D]`` to logits ``[C, V]``.
        reference: the micro-batch passed through the base alone, or the teacher, without gradients,
            if the objective needs it and ``reference_logp_S`` is not known.
        reference_logp_S: log-likelihood of each document under the base, f32 ``[S]``, if it was
            computed before training.
        sampled: values of sampled answers, if the objective compares them in groups.
        top_tokens: the teacher's top tokens, if they were computed before training.
        layers: hidden states at the supervised positions after the layers that are compared with
            the teacher's, ``[M, D]`` each; empty if none are.
        fused_head: the head with the loss in one kernel, for gradients; None if there is none.
    """

    batch: Batch
    hidden_MD: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    reference: Passed | None = None
    reference_logp_S: torch.Tensor | None = None
    sampled: Sampled | None = None
    top_tokens: TopTokens | None = None
    layers: tuple[torch.Tensor, ...] = ()
    fused_head: FusedHead | None = None

    @property
    def fused(self) -> FusedHead | None:
        """The head with the loss in one kernel, if gradients are needed and there are targets."""
        is_learned = torch.is_grad_enabled() and self.hidden_MD.requires_grad
        return self.fused_head if is_learned and len(self.batch.targets_M) else None

    @property
    def has_reference(self) -> bool:
        """Whether it can be compared with the base."""
        return self.reference is not None or self.reference_logp_S is not None


class Objective:
    """The loss of a micro-batch.

    A class whose loss depends on tokens alone need not extend this; it implements `TokenLoss`
    instead.
    """

    def loss(self, passed: Passed) -> LossSum:
        """Return the loss of a micro-batch."""
        raise NotImplementedError


class OverTokens(Objective):
    """An objective over tokens alone."""

    def __init__(self, each: TokenLoss) -> None:
        """Wrap a token loss."""
        self.each = each

    def loss(self, passed: Passed) -> LossSum:
        """Return the loss over all targets."""
        return self.each(passed.hidden_MD, passed.batch.targets_M, passed.head)


class TokenLoss(Protocol):
    """Interface of a loss over tokens: maps supervised hidden states to a loss sum and count."""

    def __call__(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> LossSum:
        """Return the loss over all M targets; ``head`` maps ``[C, D]`` to ``[C, V]`` logits."""


def token_losses(passed: Passed, chunk_tokens: int) -> torch.Tensor:
    """Return the cross entropy of each target with a gradient, f32 ``[M]``, in nats.

    For losses that weight tokens or sum them by document. Logits of a chunk are recomputed in the
    backward pass instead of saved.

    Args:
        passed: the micro-batch.
        chunk_tokens: positions whose logits exist at the same time.
    """

    def of_chunk(hidden_CD: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
        logits_CV = passed.head(hidden_CD).float()
        return torch.nn.functional.cross_entropy(logits_CV, targets_C, reduction="none")

    hidden_MD, targets_M = passed.hidden_MD, passed.batch.targets_M
    if passed.fused is not None:
        return passed.fused.each(hidden_MD, targets_M)
    pieces = [
        slice(start, start + chunk_tokens) for start in range(0, len(targets_M), chunk_tokens)
    ]
    return torch.cat(
        [checkpoint(of_chunk, hidden_MD[i], targets_M[i], use_reentrant=False) for i in pieces]
    )


@dataclass(frozen=True, slots=True)
class CrossEntropy(Objective):
    """Cross entropy of each supervised token under the head's logits, in f32.

    With gradients, ``label_smoothing``, ``z_loss`` and ``dft`` apply (see `summed_cross_entropy`),
    and documents with weights give the sum of weighted losses and of token weights. Without
    gradients none of these apply, so that validation losses of different runs are comparable.
    """

    name: str
    chunk_tokens: int
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    dft: bool = False

    def loss(self, passed: Passed) -> LossSum:
        """Return the loss over all targets of a micro-batch, weighted if its documents are."""
        batch = passed.batch
        weights_M = batch.extra.get(WEIGHT) if torch.is_grad_enabled() else None
        if passed.fused is not None and not self.dft:
            found = self._of_kernel(passed.fused, passed, weights_M)
        else:
            found = self(passed.hidden_MD, batch.targets_M, passed.head, weights_M)
        if weights_M is None:
            return found
        return replace(found, count=float(batch.host.extra[WEIGHT].double().sum()))

    def _of_kernel(
        self, fused: FusedHead, passed: Passed, weights_M: torch.Tensor | None
    ) -> LossSum:
        """Return the result of `__call__`, computed by the fused kernel."""
        hidden_MD, targets_M = passed.hidden_MD, passed.batch.targets_M
        changes = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        if weights_M is None:
            total = fused.summed(hidden_MD, targets_M, **changes)
        else:
            total = (fused.each(hidden_MD, targets_M, **changes) * weights_M).sum()
        return LossSum(total=total, count=targets_M.numel())

    def __call__(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
        weights_M: torch.Tensor | None = None,
    ) -> LossSum:
        """Sum the losses; the head runs on ``chunk_tokens`` positions at a time.

        Gradients reach the hidden states and all trained parameters of the head. Those of a chunk
        are computed while its logits exist, which avoids running the head twice and storing
        anything of shape ``[M, V]``.
        """
        if not torch.is_grad_enabled():
            return self._each(hidden_MD, targets_M, head)
        total = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        gradients = ChunkGradients(hidden_MD)
        for start in range(0, len(targets_M), self.chunk_tokens):
            piece = slice(start, start + self.chunk_tokens)
            hidden_CD = hidden_MD[piece].detach().requires_grad_(gradients.hidden_MD is not None)
            loss = summed_cross_entropy(
                head(hidden_CD),
                targets_M[piece],
                label_smoothing=self.label_smoothing,
                z_loss=self.z_loss,
                dft=self.dft,
                weights_C=None if weights_M is None else weights_M[piece],
            )
            gradients.add(piece, hidden_CD, loss)
            total += loss.detach()
        return LossSum(total=gradients.attached_to(total), count=targets_M.numel())

    def _each(
        self,
        hidden_MD: torch.Tensor,
        targets_M: torch.Tensor,
        head: Callable[[torch.Tensor], torch.Tensor],
    ) -> LossSum:
        """Return the plain sum without gradients, with the loss of each token."""
        total = torch.zeros((), dtype=torch.float32, device=hidden_MD.device)
        losses = []
        for start in range(0, len(targets_M), self.chunk_tokens):
            piece = slice(start, start + self.chunk_tokens)
            loss, losses_C = each_cross_entropy(head(hidden_MD[piece]), targets_M[piece])
            total += loss
            losses.append(losses_C)
        losses_M = torch.cat(losses) if losses else total.new_zeros(0)
        return LossSum(total=total, count=targets_M.numel(), losses_M=losses_M)


class ChunkGradients:
    """The gradients of a loss sum, accumulated chunk by chunk."""

    def __init__(self, hidden_MD: torch.Tensor) -> None:
        """Allocate the gradient of the hidden states, if they require one."""
        self.of = hidden_MD
        wanted = torch.is_grad_enabled() and hidden_MD.requires_grad
        self.hidden_MD = torch.zeros_like(hidden_MD) if wanted else None
        self.parameters: list[torch.Tensor] | None = None
        self.sums: list[torch.Tensor] = []

    def add(self, piece: slice, hidden_CD: torch.Tensor, loss: torch.Tensor) -> None:
        """Add the gradients of one chunk, whose graph is freed afterwards."""
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
        """Return the loss sum with these gradients attached."""
        inputs = [] if self.hidden_MD is None else [self.of]
        known = [] if self.hidden_MD is None else [self.hidden_MD]
        attached: torch.Tensor = _KnownGradients.apply(  # type: ignore[no-untyped-call]
            total, [*known, *self.sums], *inputs, *(self.parameters or [])
        )
        return attached


def _leaves(loss: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in which a graph accumulates gradients, in a fixed order.

    They are read from the graph, so that no caller has to list the parameters of its head.
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
    """A scalar with precomputed gradients; the backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, total: torch.Tensor, gradients: list[torch.Tensor], *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the scalar, saving the gradient of each input."""
        del inputs
        ctx.gradients = gradients
        return total.clone()

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Scale the saved gradients."""
        return None, None, *(gradient * upstream[0] for gradient in ctx.gradients)


_CPU_ELEMENTS = 800_000  # f32 values processed at a time; measured: best of 4 to 32 rows of 49,152


class _Summed(torch.autograd.Function):
    """The loss sum; saves its gradient, in the dtype of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: torch.Tensor,
        targets_C: torch.Tensor,
        weights_C: torch.Tensor | None,
        label_smoothing: float,
        z_loss: float,
        dft: bool,
    ) -> torch.Tensor:
        """Sum the losses in f32."""
        wanted = ctx.needs_input_grad[0]
        gradient_CV = torch.empty_like(logits_CV) if wanted else None
        total = torch.zeros((), dtype=torch.float32, device=logits_CV.device)
        for piece, chosen, logs in _pieces(logits_CV, targets_C):
            picked = logs.gather(1, chosen)
            log_z = logits_CV[piece].gather(1, chosen).float() - picked if z_loss else None
            losses = picked * (label_smoothing - 1)
            if label_smoothing:
                losses -= label_smoothing * logs.mean(dim=1, keepdim=True)
            if log_z is not None:
                losses += z_loss * log_z.square()
            weights = None if weights_C is None else weights_C[piece, None]
            if dft:
                weights = picked.exp() if weights is None else picked.exp() * weights
            total += losses.sum() if weights is None else (losses * weights).sum()
            if gradient_CV is not None:
                found = logs.exp_()
                if log_z is not None:
                    found.mul_(1 + 2 * z_loss * log_z)
                if label_smoothing:
                    found.sub_(label_smoothing / found.shape[1])
                at_target = found.new_full((len(chosen), 1), label_smoothing - 1)
                found.scatter_add_(1, chosen, at_target)
                gradient_CV[piece] = found if weights is None else found.mul_(weights)
        ctx.save_for_backward(gradient_CV)
        return total

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Scale the saved gradient."""
        (gradient_CV,) = ctx.saved_tensors
        return gradient_CV.mul_(upstream[0].to(gradient_CV.dtype)), *(None,) * 5


def row_pieces(logits_CV: torch.Tensor, *, on_gpu: int | None = None) -> Iterator[slice]:
    """Yield slices of a few rows, as many as a processor's cache holds in f32.

    Args:
        logits_CV: the logits.
        on_gpu: values of a slice on a GPU; None takes all rows together.
    """
    many, width = logits_CV.shape
    elements = _CPU_ELEMENTS if logits_CV.device.type == "cpu" else on_gpu
    rows = max(many if elements is None else elements // width, 1)
    for start in range(0, many, rows):
        yield slice(start, start + rows)


def _pieces(
    logits_CV: torch.Tensor, targets_C: torch.Tensor
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
    """Yield a few rows at a time: their slice, targets ``[rows, 1]``, and log-probabilities."""
    for piece in row_pieces(logits_CV):
        logs = torch.log_softmax(logits_CV[piece].float(), dim=-1)
        yield piece, targets_C[piece, None], logs


def each_cross_entropy(
    logits_CV: torch.Tensor, targets_C: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of token losses, as in `summed_cross_entropy`, and each token's loss.

    Neither has a gradient.

    Args:
        logits_CV: logits in any floating-point format.
        targets_C: target ids.

    Returns:
        The sum, a scalar, and ``[C]``; both f32, in nats.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits_CV.device)
    losses_C = torch.empty(len(targets_C), dtype=torch.float32, device=logits_CV.device)
    for piece, chosen, logs in _pieces(logits_CV.detach(), targets_C):
        picked = logs.gather(1, chosen)
        total -= picked.sum()
        losses_C[piece] = -picked[:, 0]
    return total, losses_C


def summed_cross_entropy(
    logits_CV: torch.Tensor,
    targets_C: torch.Tensor,
    *,
    weights_C: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dft: bool = False,
) -> torch.Tensor:
    """Return the sum of token losses in nats, computed in f32 whatever the dtype of the logits.

    Its gradient can be computed only once, because it is scaled in place.

    Args:
        logits_CV: logits in any floating-point format; the gradient has the same format.
        targets_C: target ids.
        weights_C: factor of each token's loss, f32; None weights them equally.
        label_smoothing: share ε of a target that is spread evenly over the vocabulary: the loss of
            a token is -(1 - ε) log p(target) - ε · mean over v of log p(v) (arXiv:1512.00567, §7).
        z_loss: weight of (log Z)² that is added for each token, Z the sum of the exponentials of
            its logits (arXiv:2204.02311, §5).
        dft: whether each token's loss is multiplied by its probability, which has no gradient
            (arXiv:2508.05629, eq. 9).
    """
    settings = (weights_C, label_smoothing, z_loss, dft)
    return cast("torch.Tensor", _Summed.apply(logits_CV, targets_C, *settings))  # type: ignore[no-untyped-call]
