"""Distillation: the divergence between a teacher's and the student's token distributions.

With teacher p = softmax(y / T) and student q = softmax(z / T) over the vocabulary, of logits y and
z, the divergence of a token is one of

- forward KL, beta = 0: Σ p (log p - log q) (arXiv:1503.02531);
- reverse KL, beta = 1: Σ q (log q - log p) (arXiv:2306.08543);
- generalized Jensen-Shannon, between them: beta Σ p (log p - log m) +
  (1 - beta) Σ q (log q - log m) with m = beta p + (1 - beta) q (arXiv:2306.13649, eq. 1).

Their gradients by z are 1 / T times q - p; q (log q - log p - KL(q‖p)); and (1 - beta) q (log q -
log m - KL(q‖m)). They are computed here a few rows at a time, as those of the cross entropy are, so
that neither f32 logits nor distributions of all positions exist at the same time. Rows come from a
data set; the student generates none (lambda = 0 in arXiv:2306.13649).

The teacher can also be reduced to its K most probable tokens. All others then count as one outcome,
the "ghost token" of arXiv:2503.16870: p and q have K + 1 values. Such a divergence is at most that
over the vocabulary (data processing inequality) and equal to it for K = V - 1. If g is the gradient
of the outcome of all others, that of a logit among them is g times its share of their probability.

Hidden states may be compared too, as in arXiv:1909.10351, eq. 8, between models of the same width:
Σ over layers of the mean over D of (s - t)², of student's states s and teacher's t.

Shapes: M supervised positions, D hidden width, V vocabulary, C positions in a chunk, N rows that
are computed at a time, K kept tokens, L = K + 1 outcomes, T supervised tokens of a side.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from mens_exp.objective.causal import (
    ChunkGradients,
    LossSum,
    Objective,
    TopTokens,
    row_pieces,
)
from mens_exp.objective.groups import places

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from mens_exp.data.batch import Batch
    from mens_exp.objective.causal import Passed


# Values of a slice on a GPU, of which up to ten f32 copies exist. Unverified guess.
_GPU_ELEMENTS = 16_000_000


@dataclass(frozen=True, slots=True)
class Distillation(Objective):
    """Mean over tokens of (1 - ``ce_weight``) · divergence + ``ce_weight`` · cross entropy.

    ``hidden_weight`` · the difference between hidden states is added, if they are compared. Without
    gradients, the loss is the cross entropy alone, so that validation losses are comparable with
    those of runs without a teacher. Divergence and difference are always reported as metrics.
    """

    name: str
    chunk_tokens: int
    beta: float = 0.0
    temperature: float = 1.0
    ce_weight: float = 0.0
    hidden_weight: float = 0.0

    def loss(self, passed: Passed) -> LossSum:
        """Return the sum over the tokens of a micro-batch.

        The teacher is ``passed.reference`` or, if precomputed, ``passed.top_tokens``.
        """
        teacher, known, targets_M = passed.reference, passed.top_tokens, passed.batch.targets_M
        learns = torch.is_grad_enabled()
        sums = torch.zeros(4, dtype=torch.float32, device=targets_M.device)
        gradients = ChunkGradients(passed.hidden_MD)
        for start in range(0, len(targets_M), self.chunk_tokens):
            piece = slice(start, start + self.chunk_tokens)
            hidden_CD = (
                passed.hidden_MD[piece].detach().requires_grad_(gradients.hidden_MD is not None)
            )
            of_teacher: torch.Tensor | TopTokens
            if known is not None:
                of_teacher = known[piece]
            else:
                assert teacher is not None, "the objective has a teacher"
                of_teacher = teacher.head(teacher.hidden_MD[piece])
            found = summed_divergence(
                passed.head(hidden_CD),
                of_teacher,
                targets_M[piece],
                beta=self.beta,
                temperature=self.temperature,
                ce_weight=self.ce_weight,
            )
            if learns:
                gradients.add(piece, hidden_CD, found.loss)
            sums += torch.stack([one.detach() for one in found])
        total, divergence, nll, teacher_nll = sums
        total = gradients.attached_to(total) if learns else nll
        metrics = {"divergence": divergence, "teacher_nll": teacher_nll}
        if passed.layers:
            assert teacher is not None, "it has passed with the student"
            hidden_mse = summed_difference(passed.layers, teacher.layers)
            metrics["hidden_mse"] = hidden_mse.detach()
            if learns:
                total = total + self.hidden_weight * hidden_mse
        return LossSum(total=total, count=targets_M.numel(), metrics=metrics)


def summed_difference(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the sum over layers and positions of the mean over D of squared differences, f32.

    Args:
        ours: the student's states after each layer, ``[M, D]``.
        theirs: the teacher's.
    """
    each = [
        (one.float() - other.float()).square().sum() / one.shape[1]
        for one, other in zip(ours, theirs, strict=True)
    ]
    return torch.stack(each).sum()


class Summed(NamedTuple):
    """Sums over the tokens of a chunk, f32 scalars in nats; only the loss has a gradient.

    Attributes:
        loss: the mixed loss.
        divergence: the divergence.
        nll: cross entropy of the targets under the student.
        teacher_nll: the same under the teacher.
    """

    loss: torch.Tensor
    divergence: torch.Tensor
    nll: torch.Tensor
    teacher_nll: torch.Tensor


def summed_divergence(
    logits_CV: torch.Tensor,
    teacher: torch.Tensor | TopTokens,
    targets_C: torch.Tensor,
    *,
    beta: float,
    temperature: float = 1.0,
    ce_weight: float = 0.0,
) -> Summed:
    """Return the loss of a chunk, computed in f32 whatever the dtype of the logits.

    Its gradient can be computed only once, because it is scaled in place.

    Args:
        logits_CV: the student's logits; the gradient has the same format.
        teacher: the teacher's logits ``[C, V]`` without a gradient, or its top tokens.
        targets_C: target ids.
        beta: 0 is the forward KL, 1 the reverse, else the generalized Jensen-Shannon divergence.
        temperature: T, of the divergence alone.
        ce_weight: share of the cross entropy.
    """
    settings = (beta, temperature, ce_weight)
    found = _Summed.apply(logits_CV, teacher, targets_C, *settings)  # type: ignore[no-untyped-call]
    return Summed(*cast("tuple[torch.Tensor, ...]", found))


class _Summed(torch.autograd.Function):
    """The sums; saves the gradient of the loss, in the dtype of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_CV: torch.Tensor,
        teacher: torch.Tensor | TopTokens,
        targets_C: torch.Tensor,
        beta: float,
        temperature: float,
        ce_weight: float,
    ) -> tuple[torch.Tensor, ...]:
        """Sum in f32."""
        gradient_CV = torch.empty_like(logits_CV) if ctx.needs_input_grad[0] else None
        sums = torch.zeros(3, dtype=torch.float32, device=logits_CV.device)
        for piece in row_pieces(logits_CV, on_gpu=_GPU_ELEMENTS):
            chosen_N1 = targets_C[piece, None]
            z_logs_NV, q_logs_NV = _log_softmax(logits_CV[piece], temperature)
            nll = -z_logs_NV.gather(1, chosen_N1).sum()
            if isinstance(teacher, TopTokens):
                known = teacher[piece]
                teacher_nll = -known.target_logp_M.sum()
                divergence, by_z_NV = _over_outcomes(q_logs_NV, known, beta)
            else:
                y_logs_NV, p_logs_NV = _log_softmax(teacher[piece], temperature)
                teacher_nll = -y_logs_NV.gather(1, chosen_N1).sum()
                divergence, by_z_NV = _divergence(q_logs_NV, p_logs_NV, beta)
            sums += torch.stack([divergence, nll, teacher_nll])
            if gradient_CV is None:
                continue
            by_z_NV.mul_((1 - ce_weight) / temperature)
            if ce_weight:
                by_z_NV.add_(z_logs_NV.exp(), alpha=ce_weight)
                at_target = by_z_NV.new_full((len(chosen_N1), 1), -ce_weight)
                by_z_NV.scatter_add_(1, chosen_N1, at_target)
            gradient_CV[piece] = by_z_NV
        ctx.save_for_backward(gradient_CV)
        divergence, nll, teacher_nll = (one.clone() for one in sums)
        ctx.mark_non_differentiable(divergence, nll, teacher_nll)
        loss = (1 - ce_weight) * divergence + ce_weight * nll
        return loss, divergence, nll, teacher_nll

    @staticmethod
    def backward(ctx: Any, *upstream: torch.Tensor) -> Any:
        """Scale the saved gradient."""
        (gradient_CV,) = ctx.saved_tensors
        return gradient_CV.mul_(upstream[0].to(gradient_CV.dtype)), *(None,) * 5


def _log_softmax(logits_NV: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities at temperature 1 and at the given one, f32 ``[N, V]``."""
    logits_NV = logits_NV.float()
    logs_NV = torch.log_softmax(logits_NV, dim=-1)
    if temperature == 1:
        return logs_NV, logs_NV
    return logs_NV, torch.log_softmax(logits_NV / temperature, dim=-1)


def _over_outcomes(
    q_logs_NV: torch.Tensor, known: TopTokens, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `_divergence` over the teacher's top tokens and one outcome for all others."""
    q_logs_NL = _with_others(q_logs_NV, known.ids_MK)
    divergence, by_outcome_NL = _divergence(q_logs_NL, known.logp_ML, beta)
    shares_NV = (q_logs_NV - q_logs_NL[:, -1:]).exp()  # of the others; top tokens are overwritten
    by_z_NV = shares_NV.mul_(by_outcome_NL[:, -1:])
    return divergence, by_z_NV.scatter_(1, known.ids_MK, by_outcome_NL[:, :-1])


def _with_others(logs_NV: torch.Tensor, ids_NK: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of some tokens and, last, of all others, ``[N, K + 1]``."""
    others_NV = logs_NV.scatter(1, ids_NK, -torch.inf)
    others_N1 = torch.logsumexp(others_NV, dim=1, keepdim=True)
    return torch.cat([logs_NV.gather(1, ids_NK), others_N1], dim=1)


def top_tokens(teacher: Passed, top_k: int, *, chunk_tokens: int, temperature: float) -> TopTokens:
    """Return the top tokens of a micro-batch that has passed through the teacher.

    Args:
        teacher: the micro-batch.
        top_k: K, less than V.
        chunk_tokens: positions whose logits exist at the same time.
        temperature: T, of the log-probabilities except the target's.
    """
    found = []
    targets_M1 = teacher.batch.targets_M[:, None]
    for start in range(0, len(targets_M1), chunk_tokens):
        piece = slice(start, start + chunk_tokens)
        plain_CV, p_logs_CV = _log_softmax(teacher.head(teacher.hidden_MD[piece]), temperature)
        ids_CK = p_logs_CV.topk(top_k, dim=1).indices
        target_C1 = plain_CV.gather(1, targets_M1[piece])
        found.append((ids_CK, _with_others(p_logs_CV, ids_CK), target_C1[:, 0]))
    return TopTokens(*(torch.cat(of_all) for of_all in zip(*found, strict=True)))


@dataclass(frozen=True, slots=True)
class KnownTeacher:
    """A teacher's top tokens over one side of the rows, in host memory or a mapped file.

    Attributes:
        before_D: number of supervised tokens before each document, int64.
        values: K ids, L log-probabilities and the target's, f32 ``[T, 2 K + 2]``, in which an id is
            exact up to 2^24; NaN where not computed.
    """

    before_D: torch.Tensor
    values: np.ndarray

    def of(self, batch: Batch) -> TopTokens:
        """Return the top tokens of a micro-batch, on its device."""
        found = torch.from_numpy(self.values[places(batch, self.before_D).numpy()])
        assert not found.isnan().any(), "all that the run needs was computed"
        kept = (found.shape[1] - 2) // 2
        there = found.to(batch.targets_M.device)
        return TopTokens(there[:, :kept].long(), there[:, kept:-1], there[:, -1])


@dataclass(frozen=True, slots=True)
class KnownTeachers:
    """A teacher's top tokens over training, validation and the documents of the probe.

    Attributes:
        train: of the training documents that the run reads.
        val: of the validation documents.
        probe: of the documents of :func:`mens_exp.training.contract_probe.probe`; None without it.
    """

    train: KnownTeacher
    val: KnownTeacher
    probe: KnownTeacher | None = None

    def side(self, *, is_probed: bool, trains: bool) -> KnownTeacher:
        """Return the side that a micro-batch belongs to.

        Args:
            is_probed: whether it has documents of the probe.
            trains: whether it is a training micro-batch; otherwise it is one of validation.
        """
        if is_probed:
            assert self.probe is not None, "a run without a probe has no such micro-batch"
            return self.probe
        return self.train if trains else self.val


def _divergence(
    q_logs_NV: torch.Tensor, p_logs_NV: torch.Tensor, beta: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed divergence, and T times its gradient by the student's logits, ``[N, V]``.

    Args:
        q_logs_NV: log-probabilities of the student.
        p_logs_NV: log-probabilities of the teacher.
        beta: see `summed_divergence`.
    """
    q_NV = q_logs_NV.exp()
    if beta == 0:
        p_NV = p_logs_NV.exp()
        return (p_NV * (p_logs_NV - q_logs_NV)).sum(), q_NV.sub_(p_NV)
    if beta == 1:
        ratio_NV = q_logs_NV - p_logs_NV
        kl_N1 = (q_NV * ratio_NV).sum(dim=1, keepdim=True)
        return kl_N1.sum(), ratio_NV.sub_(kl_N1).mul_(q_NV)
    m_logs_NV = torch.logaddexp(p_logs_NV + math.log(beta), q_logs_NV + math.log1p(-beta))
    of_teacher = (p_logs_NV.exp() * (p_logs_NV - m_logs_NV)).sum()
    ratio_NV = q_logs_NV - m_logs_NV
    kl_N1 = (q_NV * ratio_NV).sum(dim=1, keepdim=True)
    divergence = beta * of_teacher + (1 - beta) * kl_N1.sum()
    return divergence, ratio_NV.sub_(kl_N1).mul_(q_NV).mul_(1 - beta)
