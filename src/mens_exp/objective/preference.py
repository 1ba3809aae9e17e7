"""Objectives over judged answers: pairs of a better and a worse one, and answers with a label.

A pair is two documents side by side in a micro-batch. The loss of a micro-batch is the sum over its
pairs, so that a step is the mean over all pairs of its micro-batches and processes.

Shapes: M supervised positions, S documents of a micro-batch and D of a side of the rows, P pairs of
answers, N answers with a label.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import logsigmoid

from mens_exp.config.objective import PairLoss
from mens_exp.objective.causal import LossSum, Objective, Passed, token_losses

if TYPE_CHECKING:
    from mens_exp.data.batch import Batch


@dataclass(frozen=True, slots=True)
class Answers:
    """Log-likelihood of each answer of a micro-batch, f32 ``[S]`` in nats, and its token count."""

    logp_S: torch.Tensor
    tokens_S: torch.Tensor

    @property
    def mean(self) -> torch.Tensor:
        """Mean log-likelihood of a token, f32 ``[S]``."""
        return self.logp_S / self.tokens_S

    def less(self, other: Answers) -> Answers:
        """Return the log-likelihoods minus those under another model."""
        return Answers(self.logp_S - other.logp_S, self.tokens_S)


def segments(batch: Batch) -> torch.Tensor:
    """Return the document of each target, counted from 0 within the micro-batch, int64 ``[M]``.

    Document numbers are not unique: a batch that reaches into the next epoch may repeat a document.
    """
    document_M = batch.document_M
    assert document_M is not None, "streams number their documents"
    begins_M = torch.ones_like(document_M)
    begins_M[1:] = document_M.diff() != 0
    return begins_M.cumsum(0) - 1


def summed(losses_M: torch.Tensor, segment_M: torch.Tensor) -> Answers:
    """Sum the token losses of each document to its log-likelihood."""
    sums_S = losses_M.new_zeros(int(segment_M[-1]) + 1)
    return Answers(
        logp_S=sums_S.index_add(0, segment_M, -losses_M),
        tokens_S=sums_S.index_add(0, segment_M, torch.ones_like(losses_M)),
    )


def answers_of(passed: Passed, chunk_tokens: int) -> Answers:
    """Return the log-likelihoods of the answers under the model."""
    return summed(token_losses(passed, chunk_tokens), segments(passed.batch))


def against_base(passed: Passed, ours: Answers, chunk_tokens: int) -> Answers:
    """Return the log-likelihoods minus those under the base, if the objective compares with it."""
    if passed.reference_logp_S is not None:
        return ours.less(Answers(passed.reference_logp_S, ours.tokens_S))
    if passed.reference is None:
        return ours
    with torch.no_grad():
        base = answers_of(passed.reference, chunk_tokens)
    return ours.less(base)


@dataclass(frozen=True, slots=True)
class KnownReference:
    """Log-likelihoods under the base in nats, f32 ``[D]`` of each side; NaN where not computed."""

    train_D: torch.Tensor
    val_D: torch.Tensor

    def of(self, batch: Batch, *, trains: bool) -> torch.Tensor:
        """Return the log-likelihoods of a micro-batch's documents, ``[S]``, on its device.

        Args:
            batch: the micro-batch.
            trains: whether it is a training micro-batch; otherwise it is one of validation.
        """
        side_D = self.train_D if trains else self.val_D
        found_S: torch.Tensor = side_D.index_select(0, documents_of(batch))
        assert not found_S.isnan().any(), "all that the run needs was computed"
        return found_S.to(batch.targets_M.device)


def documents_of(batch: Batch) -> torch.Tensor:
    """Return the numbers of a micro-batch's documents, int64 ``[S]``, in host memory."""
    document_M = batch.host.document_M
    assert document_M is not None, "streams number their documents"
    documents_S: torch.Tensor = torch.unique_consecutive(document_M)
    return documents_S


class OfAnswers(Objective):
    """An objective over log-likelihoods of answers; those under the base can be precomputed."""

    chunk_tokens: int

    def reference_logp(self, reference: Passed) -> torch.Tensor:
        """Return the log-likelihood of each document under the base, f32 ``[S]``, in nats.

        Args:
            reference: a micro-batch that has passed through the base.
        """
        with torch.no_grad():
            return answers_of(reference, self.chunk_tokens).logp_S


class Preference(OfAnswers):
    """DPO, CPO and SimPO: a loss of the margin between the rewards of two answers.

    The score of an answer is its log-likelihood, less that under the base if the objective has a
    reference (DPO, arXiv:2305.18290, eq. 7; without one CPO, arXiv:2401.08417, eq. 3). With
    ``length_normalised`` it is divided by the answer's tokens (SimPO, arXiv:2405.14734, eq. 4). The
    margin m is ``beta`` times the difference of the scores, less the ``target`` margin. Its loss is

    - sigmoid: -(1 - ε) log σ(m) - ε log σ(-m), with ε the ``label_smoothing`` (conservative DPO,
      https://ericmitchell.ai/cdpo.pdf);
    - robust: the same with +ε, divided by 1 - 2ε, which is unbiased if a share ε of the labels is
      wrong (arXiv:2403.00409, eq. 12);
    - hinge: max(0, 1 - m) (arXiv:2305.10425);
    - ipo: (d - 1 / (2 beta))², with d the difference of the mean scores of a token
      (arXiv:2310.12036, eq. 17). The paper has sums; TRL divides by the tokens, as its authors
      say that they did.

    ``nll_weight`` adds the mean token loss of each pair's chosen answer (arXiv:2404.19733, eq. 1).
    TRL takes the mean over the tokens of a micro-batch, which is the same for one pair.

    Reported rewards are ``beta`` times the summed score with a reference, and ``beta`` times the
    compared score without one, as in TRL.
    """

    def __init__(
        self,
        *,
        beta: float,
        chunk_tokens: int,
        loss: PairLoss = PairLoss.sigmoid,
        label_smoothing: float = 0.0,
        length_normalised: bool = False,
        nll_weight: float = 0.0,
        target: float = 0.0,
    ) -> None:
        """Set the settings; see :class:`mens_exp.config.objective.PairObjective`.

        ``target`` is the target margin between rewards.
        """
        self.beta, self.target = beta, target
        self.form, self.label_smoothing = PairLoss(loss), label_smoothing
        self.averages = length_normalised or self.form is PairLoss.ipo
        self.nll_weight, self.chunk_tokens = nll_weight, chunk_tokens

    def loss(self, passed: Passed) -> LossSum:
        """Return the sum over the pairs of a micro-batch, and their number."""
        ours = answers_of(passed, self.chunk_tokens)
        scores = against_base(passed, ours, self.chunk_tokens)
        compared_S = scores.mean if self.averages else scores.logp_S
        losses_P = self.of_margin(compared_S[::2] - compared_S[1::2])
        nll_P = -ours.mean[::2]
        rewarded_S = scores.logp_S if passed.has_reference else compared_S
        return LossSum(
            total=(losses_P + self.nll_weight * nll_P if self.nll_weight else losses_P).sum(),
            count=len(losses_P),
            metrics=pair_metrics(self.beta * rewarded_S.detach(), nll_P),
        )

    def of_margin(self, difference_P: torch.Tensor) -> torch.Tensor:
        """Return the loss of each pair, ``[P]``, given the differences of its scores."""
        margin_P = self.beta * difference_P - self.target
        wrong = self.label_smoothing
        match self.form:
            case PairLoss.sigmoid:
                return -(1 - wrong) * logsigmoid(margin_P) - wrong * logsigmoid(-margin_P)
            case PairLoss.robust:
                clean_P, flipped_P = logsigmoid(margin_P), logsigmoid(-margin_P)
                return (wrong * flipped_P - (1 - wrong) * clean_P) / (1 - 2 * wrong)
            case PairLoss.hinge:
                return (1 - margin_P).relu()
            case PairLoss.ipo:
                squared_P: torch.Tensor = (difference_P - 1 / (2 * self.beta)) ** 2
                return squared_P


class SimPO(Preference):
    """SimPO: the sigmoid loss of mean log-likelihoods, with a target margin and no reference."""

    def __init__(
        self,
        *,
        beta: float,
        target: float,
        chunk_tokens: int,
        label_smoothing: float = 0.0,
        nll_weight: float = 0.0,
    ) -> None:
        """Set the settings; see :class:`mens_exp.config.objective.SimpoObjective`."""
        super().__init__(
            beta=beta,
            target=target,
            chunk_tokens=chunk_tokens,
            label_smoothing=label_smoothing,
            nll_weight=nll_weight,
            length_normalised=True,
        )


class OddsRatio(Objective):
    """ORPO (arXiv:2403.07691, eq. 6 and 7): imitate the chosen row, and raise its odds.

    The likelihood p of an answer is the geometric mean of its tokens', its odds are p / (1 - p).
    The loss of a pair is the mean token loss of the chosen row, its prompt included as in the
    authors' code and in TRL, minus ``beta`` times log σ(log odds chosen - log odds rejected). TRL
    takes that mean over the tokens of a micro-batch, which is the same for one pair.
    """

    def __init__(self, *, beta: float, chunk_tokens: int) -> None:
        """Set the settings; see :class:`mens_exp.config.objective.OrpoObjective`."""
        self.beta, self.chunk_tokens = beta, chunk_tokens

    def loss(self, passed: Passed) -> LossSum:
        """Return the sum over the pairs of a micro-batch, and their number."""
        losses_M = token_losses(passed, self.chunk_tokens)
        segment_M = segments(passed.batch)
        is_answer_M = passed.batch.extra["answer"] > 0
        whole = summed(losses_M, segment_M)
        answers = summed(losses_M[is_answer_M], segment_M[is_answer_M])
        odds_S = answers.mean - log_of_rest(answers.mean)
        ratio_P = logsigmoid(odds_S[::2] - odds_S[1::2])
        losses_P = -whole.mean[::2] - self.beta * ratio_P
        return LossSum(
            total=losses_P.sum(),
            count=len(losses_P),
            metrics=pair_metrics(self.beta * answers.mean.detach(), -answers.mean[::2]),
        )


_CERTAIN = -1e-7  # log-likelihood above which 1 - p is 0 in f32 (its spacing below 1 is 6e-8)


def log_of_rest(logp_S: torch.Tensor) -> torch.Tensor:
    """Return log(1 - p), given log p ``[S]``; a certain answer counts as almost certain.

    Uses the form that keeps the digits on either side of p = 1/2 (Mächler 2012, eq. 7).
    """
    below_S = logp_S.clamp_max(_CERTAIN)
    near_S = torch.log(-torch.expm1(below_S))
    far_S = torch.log1p(-torch.exp(below_S))
    return torch.where(below_S > -math.log(2), near_S, far_S)


def pair_metrics(reward_S: torch.Tensor, nll_P: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the reported metrics, summed over pairs; see ``PAIR_METRICS``."""
    chosen_P, rejected_P = reward_S[::2], reward_S[1::2]
    return {
        "chosen_reward": chosen_P.sum(),
        "rejected_reward": rejected_P.sum(),
        "reward_margin": (chosen_P - rejected_P).sum(),
        "reward_accuracy": (chosen_P > rejected_P).sum(),
        "chosen_nll": nll_P.detach().sum(),
    }


class KahnemanTversky(OfAnswers):
    """KTO (arXiv:2402.01306, eq. 7 and 8): wanted answers gain on the base, unwanted ones lose.

    With r the log-likelihood of an answer minus that under the base, the loss of a wanted one is
    ``wanted_weight`` times 1 - σ(beta (r - KL)), and of an unwanted one ``unwanted_weight`` times
    1 - σ(beta (KL - r)). KL is the mean of r over the micro-batch's prompts with answers of other
    rows, clamped to at least 0 and without a gradient. Each process uses the KL of its own
    micro-batch, so that the number of processes changes nothing; TRL averages over processes.
    """

    def __init__(
        self, *, beta: float, wanted_weight: float, unwanted_weight: float, chunk_tokens: int
    ) -> None:
        """Set the settings; see :class:`mens_exp.config.objective.KtoObjective`."""
        self.beta, self.chunk_tokens = beta, chunk_tokens
        self.wanted_weight, self.unwanted_weight = wanted_weight, unwanted_weight

    def loss(self, passed: Passed) -> LossSum:
        """Return the sum over the answers of a micro-batch, and their number."""
        ours = answers_of(passed, self.chunk_tokens)
        gain_S = against_base(passed, ours, self.chunk_tokens).logp_S
        gain_N, kl = gain_S[::2], gain_S[1::2].detach().mean().clamp_min(0)
        labels_S = torch.zeros_like(gain_S).index_add(
            0, segments(passed.batch), passed.batch.extra["label"]
        )
        wanted_N = labels_S[::2] > 0
        sign_N = wanted_N.float() * 2 - 1
        weight_N = torch.where(wanted_N, self.wanted_weight, self.unwanted_weight)
        losses_N = weight_N * (1 - torch.sigmoid(self.beta * sign_N * (gain_N - kl)))
        reward_N = self.beta * gain_N.detach()
        return LossSum(
            total=losses_N.sum(),
            count=len(losses_N),
            metrics={
                "chosen_reward": reward_N[wanted_N].sum(),
                "rejected_reward": reward_N[~wanted_N].sum(),
                "kl": kl * len(losses_N),
            },
            counts={"chosen_reward": wanted_N.sum(), "rejected_reward": (~wanted_N).sum()},
        )
