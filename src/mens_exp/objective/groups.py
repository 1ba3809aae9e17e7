"""GRPO: make sampled answers likelier if their reward exceeds that of others to the same prompt.

The clipped ratio compares the model with the adapter that training starts from, which is the one
that sampled the answers, token by token. Log-probabilities under it and under the base are computed
once, before the first step (:mod:`mens_exp.training.precompute`), so that several steps on the
same answers are corrected for what the earlier ones changed.

Shapes: M supervised positions, S answers of a micro-batch, D documents and T supervised tokens of a
side of the rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mens_exp.config.objective import GroupLoss, RewardScale
from mens_exp.objective.causal import LossSum, Objective, Passed, Sampled, token_losses
from mens_exp.objective.preference import summed
from mens_exp.rows.schema import REWARD

if TYPE_CHECKING:
    from mens_exp.data.batch import Batch


class GroupRelative(Objective):
    """GRPO (arXiv:2402.03300, eq. 3), with four of TRL's loss types.

    With A the advantage of an answer and r the probability of a token divided by that under the
    adapter that training starts from, the loss of a token is -min(r A, clip(r) A), clip(r) being
    between 1 - ``epsilon_low`` and 1 + ``epsilon_high``, plus ``beta`` times r (q - log q - 1), q
    being the probability under the base divided by that under the model. That is the KL estimator
    k3 (http://joschu.net/blog/kl-approx.html); with the factor r, which the paper lacks, its
    gradient is that of the KL divergence (arXiv:2512.02556, eq. 7; TRL's default).

    A step is a mean over all its micro-batches and processes, by ``loss_type``:

    - grpo: over answers, the loss of an answer being the mean over its tokens;
    - dr_grpo: over answers, the sum over its tokens divided by ``max_completion_tokens``
      (arXiv:2503.20783);
    - dapo: over tokens (arXiv:2503.14476). TRL divides by the tokens of all steps that share
      sampled answers, divided by the number of these steps, which is the same for one step;
    - bnpo: over micro-batches, the loss of one being the mean over its tokens, as in TRL.
    """

    def __init__(
        self,
        *,
        beta: float,
        epsilon_low: float,
        epsilon_high: float,
        scale_rewards: RewardScale,
        chunk_tokens: int,
        loss_type: GroupLoss = GroupLoss.grpo,
        max_completion_tokens: int = 256,
    ) -> None:
        """Set the settings; see :class:`mens_exp.config.objective.GrpoObjective`."""
        self.beta, self.chunk_tokens = beta, chunk_tokens
        self.epsilon_low, self.epsilon_high = epsilon_low, epsilon_high
        self.scale, self.form = RewardScale(scale_rewards), GroupLoss(loss_type)
        self.max_completion_tokens = max_completion_tokens

    def loss(self, passed: Passed) -> LossSum:
        """Return the sum over a micro-batch, and its share of the divisor of the step's mean."""
        logp_M = -token_losses(passed, self.chunk_tokens)
        known = passed.sampled or self._before_training(passed, logp_M)
        advantage_M = known.advantage_M
        ratio_M = torch.exp(logp_M - known.old_logp_M)
        clipped_M = ratio_M.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        losses_M = -torch.minimum(ratio_M * advantage_M, clipped_M * advantage_M)
        metrics = {}
        if self.beta > 0:
            assert known.base_logp_M is not None, "the passes before training computed it"
            gap_M = known.base_logp_M - logp_M
            kl_M = ratio_M * (gap_M.exp() - gap_M - 1)
            losses_M = losses_M + self.beta * kl_M
            metrics["base_kl"] = kl_M.detach().sum()
        low_M = (ratio_M < 1 - self.epsilon_low) & (advantage_M < 0)
        high_M = (ratio_M > 1 + self.epsilon_high) & (advantage_M > 0)
        first_M = begins(passed.batch)
        total, count = self._summed(losses_M, first_M)
        tokens = torch.full_like(logp_M[0].detach(), len(logp_M))
        answers = first_M.sum()
        return LossSum(
            total=total,
            count=count,
            metrics={
                **metrics,
                "reward": passed.batch.extra[REWARD][first_M].sum(),
                "equal_frac": (advantage_M[first_M] == 0).sum(),
                "clip_frac": (low_M | high_M).sum(),
            },
            counts={
                **dict.fromkeys(("reward", "equal_frac"), answers),
                **dict.fromkeys(("base_kl", "clip_frac"), tokens),
            },
        )

    def _summed(self, losses_M: torch.Tensor, first_M: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return a micro-batch's share of the step's sum and of its divisor."""
        match self.form:
            case GroupLoss.grpo:
                each = summed(losses_M, first_M.cumsum(0) - 1)
                return -each.mean.sum(), len(each.tokens_S)
            case GroupLoss.dr_grpo:
                return losses_M.sum() / self.max_completion_tokens, int(first_M.sum())
            case GroupLoss.dapo:
                return losses_M.sum(), len(losses_M)
            case GroupLoss.bnpo:
                return losses_M.mean(), 1

    def _before_training(self, passed: Passed, logp_M: torch.Tensor) -> Sampled:
        """Return placeholders for the unknown values: as on the first step, with advantage 1.

        The checks of a model before its first step compare such losses and their gradients.
        """
        base_logp_M = None
        if self.beta > 0 and passed.reference is not None:
            with torch.no_grad():
                base_logp_M = -token_losses(passed.reference, self.chunk_tokens)
        return Sampled(torch.ones_like(logp_M), logp_M.detach(), base_logp_M)

    def logp(self, passed: Passed) -> torch.Tensor:
        """Return the log-probability of each target without a gradient, f32 ``[M]``, in nats."""
        with torch.no_grad():
            return -token_losses(passed, self.chunk_tokens)


def begins(batch: Batch) -> torch.Tensor:
    """Return which targets are the first of their document, bool ``[M]``.

    The targets of a document need not be consecutive: a conversation may have learned turns apart.
    """
    places_M = batch.target_places
    if batch.documents is None:
        document_M = places_M // batch.input_ids_BT.shape[1]
    else:
        starts = [start for start, _ in batch.documents]
        document_M = torch.searchsorted(places_M.new_tensor(starts), places_M, right=True)
    first_M = torch.ones_like(places_M, dtype=torch.bool)
    first_M[1:] = document_M.diff() != 0
    return first_M


def places(batch: Batch, before_D: torch.Tensor) -> torch.Tensor:
    """Return the index of each target among all supervised tokens of its side, int64 ``[M]``.

    Args:
        batch: the micro-batch, whose document numbers are read in host memory.
        before_D: number of supervised tokens before each document.
    """
    document_M = batch.host.document_M
    assert document_M is not None, "streams number their documents"
    every_M = torch.arange(len(document_M))
    first_M = begins(batch.host)
    start_M = torch.where(first_M, every_M, 0).cummax(0).values
    return before_D[document_M] + every_M - start_M


@dataclass(frozen=True, slots=True)
class SampledSide:
    """Values of one side of the rows, known before training, in host memory.

    Attributes:
        before_D: number of supervised tokens before each document, int64.
        advantage_D: advantage of each document's answer, f32.
        old_logp_T: log-probabilities under the starting adapter, f32; NaN where not computed.
        base_logp_T: those under the base; None if the objective does not compare with it.
    """

    before_D: torch.Tensor
    advantage_D: torch.Tensor
    old_logp_T: torch.Tensor
    base_logp_T: torch.Tensor | None

    def of(self, batch: Batch) -> Sampled:
        """Return the values of a micro-batch, on its device."""
        place_M = places(batch, self.before_D)
        old_M = self.old_logp_T[place_M]
        assert not old_M.isnan().any(), "all that the run needs was computed"
        document_M = batch.host.document_M
        assert document_M is not None, "streams number their documents"
        there = batch.targets_M.device
        return Sampled(
            self.advantage_D[document_M].to(there),
            old_M.to(there),
            None if self.base_logp_T is None else self.base_logp_T[place_M].to(there),
        )
