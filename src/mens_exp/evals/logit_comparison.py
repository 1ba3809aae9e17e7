"""Distance between two models' next-token distributions: KL, agreement, loss.

Logits are processed a few positions at a time and then released. Only three numbers per token are
kept, so the logits of all tokens never exist at the same time.

Shapes: M positions of one call, C of them processed at a time, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mens_exp.errors import MensError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# f64 values of one model processed at a time; measured: 507 tokens with 49,152 entries on one core
# take 0.12 s in chunks of a few rows, which fit in the processor's cache, and 0.65 s at once.
_ELEMENTS = 100_000
_P99 = 0.99


@dataclass(frozen=True, kw_only=True, slots=True)
class PositionBucket:
    """The comparison over some positions.

    Attributes:
        first: lowest position.
        last: highest position, inclusive; None if unbounded.
        tokens: number of compared tokens.
        mean_kl: mean of KL(reference‖other), nats.
        top1_agreement: share of tokens.
        nll_difference: other minus reference, mean, nats.
    """

    first: int
    last: int | None
    tokens: int
    mean_kl: float
    top1_agreement: float
    nll_difference: float


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitDifference:
    """The comparison over all tokens.

    Attributes:
        tokens: number of compared tokens.
        mean_kl: mean of KL(reference‖other), nats.
        p99_kl: 99th percentile of the KL over tokens (nearest rank, exact), nats.
        max_kl: maximum KL of a token, nats.
        top1_agreement: share of tokens for which both models have the same argmax; among equal
            logits the lowest id counts.
        nll_difference: mean of the targets' negative log likelihood, other minus reference, nats.
        nll_difference_se: standard error of `nll_difference`, assuming independent tokens; 0 for a
            single token.
        reference_nll: mean of the targets' negative log likelihood under the reference, nats.
        by_position: the same by position, without empty buckets.
    """

    tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    nll_difference: float
    nll_difference_se: float
    reference_nll: float
    by_position: tuple[PositionBucket, ...]


class LogitComparison:
    """Collects chunks of two models' logits over the same tokens; sums are f64."""

    def __init__(self, position_bounds: Sequence[int] = (0,)) -> None:
        """Begin a comparison.

        Args:
            position_bounds: the lowest position of each bucket, ascending, the first 0.
        """
        bounds = list(position_bounds)
        assert bounds[:1] == [0], "the first bucket begins at position 0"
        assert bounds == sorted(set(bounds)), "buckets ascend"
        self._bounds = bounds
        self._kl: list[torch.Tensor] = []
        self._agrees: list[torch.Tensor] = []
        self._reference_nll: list[torch.Tensor] = []
        self._other_nll: list[torch.Tensor] = []
        self._positions: list[torch.Tensor] = []

    def add(
        self,
        reference_logits_MV: torch.Tensor,
        other_logits_MV: torch.Tensor,
        target_ids_M: torch.Tensor,
        positions_M: torch.Tensor,
    ) -> None:
        """Compare the distributions at some positions.

        Args:
            reference_logits_MV: the reference's logits, any floating-point dtype; computed in f64.
            other_logits_MV: the other model's logits, on the same device.
            target_ids_M: ids of the next tokens.
            positions_M: position of each token in its document, from 0.

        Raises:
            MensError: shapes differ, or a logit is not finite.
        """
        _refuse_shapes(reference_logits_MV, other_logits_MV, target_ids_M, positions_M)
        for piece in _pieces(*reference_logits_MV.shape):
            reference_CV = _log_probabilities(reference_logits_MV[piece], "reference")
            other_CV = _log_probabilities(other_logits_MV[piece], "other")
            targets_C1 = target_ids_M[piece, None].to(reference_CV.device)
            same_C = reference_logits_MV[piece].argmax(-1) == other_logits_MV[piece].argmax(-1)
            self._agrees.append(same_C.cpu())
            self._reference_nll.append(-reference_CV.gather(1, targets_C1)[:, 0].cpu())
            self._other_nll.append(-other_CV.gather(1, targets_C1)[:, 0].cpu())
            difference_CV = reference_CV - other_CV
            kl_C = torch.linalg.vecdot(reference_CV.exp_(), difference_CV)
            self._kl.append(kl_C.clamp(min=0).cpu())  # only rounding gives negative values
        self._positions.append(positions_M.cpu())

    def result(self) -> LogitDifference:
        """Return the comparison of everything added so far.

        Raises:
            MensError: nothing was added.
        """
        kl_M, positions_M = _joined(self._kl), _joined(self._positions)
        if not len(kl_M):
            raise MensError("no token was compared", expected="logits of at least one position")
        agrees_M, reference_M = _joined(self._agrees), _joined(self._reference_nll)
        difference_M = _joined(self._other_nll) - reference_M
        buckets = []
        for first, following in zip(self._bounds, [*self._bounds[1:], None], strict=True):
            inside_M = positions_M >= first
            if following is not None:
                inside_M &= positions_M < following
            if inside_M.any():
                buckets.append(
                    PositionBucket(
                        first=first,
                        last=None if following is None else following - 1,
                        tokens=int(inside_M.sum()),
                        mean_kl=_mean(kl_M[inside_M]),
                        top1_agreement=_mean(agrees_M[inside_M]),
                        nll_difference=_mean(difference_M[inside_M]),
                    )
                )
        rank = math.ceil(_P99 * len(kl_M))  # from 1
        return LogitDifference(
            tokens=len(kl_M),
            mean_kl=_mean(kl_M),
            p99_kl=float(kl_M.sort().values[rank - 1]),
            max_kl=float(kl_M.max()),
            top1_agreement=_mean(agrees_M),
            nll_difference=_mean(difference_M),
            nll_difference_se=float(difference_M.std(correction=min(1, len(kl_M) - 1)))
            / math.sqrt(len(kl_M)),
            reference_nll=_mean(reference_M),
            by_position=tuple(buckets),
        )


def _refuse_shapes(
    reference: torch.Tensor, other: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor
) -> None:
    """Refuse logits, targets and positions that do not belong to the same tokens.

    Raises:
        MensError: their shapes do not match.
    """
    shapes = [tuple(tensor.shape) for tensor in (reference, other, targets, positions)]
    rows = shapes[0][:1]
    if len(shapes[0]) != 2 or shapes != [shapes[0], shapes[0], rows, rows]:  # noqa: PLR2004 - [M, V]
        raise MensError(
            "the logits of the two models are not over the same tokens",
            found=", ".join(map(str, shapes)),
            expected="reference and other [M, V], targets and positions [M]",
        )


def _pieces(rows: int, vocabulary: int) -> Iterator[slice]:
    step = max(_ELEMENTS // vocabulary, 1)
    return (slice(start, start + step) for start in range(0, rows, step))


def _log_probabilities(logits_CV: torch.Tensor, whose: str) -> torch.Tensor:
    """Return log probabilities, f64.

    Raises:
        MensError: a logit is not finite.
    """
    if not torch.isfinite(logits_CV).all():
        raise MensError(f"a logit of the {whose} model is not finite", expected="finite logits")
    return torch.log_softmax(logits_CV, dim=-1, dtype=torch.float64)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(parts) if parts else torch.empty(0)


def _mean(values: torch.Tensor) -> float:
    return float(values.double().mean())
