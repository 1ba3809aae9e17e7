from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional

from mens_exp.errors import MensError
from mens_exp.evals import logit_comparison
from mens_exp.evals.logit_comparison import LogitComparison


def compared(reference, other, *, bounds=(0,)):
    tokens = len(reference)
    comparison = LogitComparison(bounds)
    comparison.add(reference, other, torch.zeros(tokens, dtype=torch.long), torch.arange(tokens))
    return comparison.result()


def two_way(odds):
    """Return logits over two ids with the given odds of the first to the second."""
    return torch.tensor([[math.log(odd), 0.0] for odd in odds], dtype=torch.float64)


def test_kl_agreement_and_loss_are_those_worked_out_by_hand():
    """P = (1/2, 1/2), Q = (3/4, 1/4): KL(P‖Q) = ln 2/√3, and Q's NLL is less by ln 3/2."""
    result = compared(two_way([1.0]), two_way([3.0]))
    assert result.mean_kl == pytest.approx(math.log(2 / math.sqrt(3)), rel=1e-12)
    assert result.p99_kl == result.max_kl == result.mean_kl
    assert result.nll_difference == pytest.approx(-math.log(1.5), rel=1e-12)
    assert result.reference_nll == pytest.approx(math.log(2), rel=1e-12)
    assert result.top1_agreement == 1.0  # of two equal logits the lowest id wins


def test_kl_is_of_the_reference_from_the_other():
    """KL((3/4, 1/4) ‖ (1/2, 1/2)) = 3/4 ln 3/2 + 1/4 ln 1/2; the other direction differs."""
    result = compared(two_way([3.0]), two_way([1.0]))
    assert result.mean_kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5), rel=1e-12)


def test_equal_logits_differ_by_nothing():
    """A model compared with itself has zero KL and full agreement."""
    logits = torch.randn(9, 31, generator=torch.Generator().manual_seed(0))
    result = compared(logits, logits)
    assert (result.mean_kl, result.max_kl, result.nll_difference) == (0.0, 0.0, 0.0)
    assert result.top1_agreement == 1.0


def test_a_small_difference_of_f32_logits_is_not_lost():
    """Logits 1e-4 apart over two equally likely ids: KL = e²/8 to second order, 1.25e-9."""
    result = compared(torch.zeros(1, 2), torch.tensor([[1e-4, 0.0]]))
    assert result.mean_kl == pytest.approx(1e-8 / 8, rel=1e-6)


def test_standard_error_is_that_of_paired_differences():
    """Differences of 0 and 2d have mean d and standard error d, whatever the losses."""
    result = compared(two_way([1.0, 5.0]), two_way([1.0, 1.0]))
    d = (math.log(2) - math.log(6 / 5)) / 2
    assert result.nll_difference == pytest.approx(d, rel=1e-12)
    assert result.nll_difference_se == pytest.approx(d, rel=1e-12)
    assert compared(two_way([1.0]), two_way([3.0])).nll_difference_se == 0.0  # a single token


def test_agreement_counts_the_same_likeliest_id():
    """The same id is most likely at two of three positions."""
    result = compared(two_way([2.0, 0.5, 2.0]), two_way([3.0, 2.0, 1.5]))
    assert result.top1_agreement == pytest.approx(2 / 3)


@pytest.mark.parametrize(("tokens", "rank"), [(1, 1), (100, 99), (101, 100), (250, 248)])
def test_p99_is_the_nearest_rank(tokens, rank):
    """The p99 of n KLs is the one at rank ceil(0.99 n) in ascending order."""
    odds = [1 + i / 10 for i in range(tokens)]
    result = compared(two_way([1.0] * tokens), two_way(odds))
    odd = odds[rank - 1]
    assert result.p99_kl == pytest.approx(math.log((1 + odd) / (2 * math.sqrt(odd))), abs=1e-12)


def test_chunks_and_pieces_change_nothing(monkeypatch):
    """Thirteen positions added in three calls, in chunks of two, match torch's own functions."""
    generator = torch.Generator().manual_seed(1)
    reference, other = (torch.randn(13, 17, generator=generator) * 3 for _ in range(2))
    targets = torch.randint(17, (13,), generator=generator)
    positions = torch.arange(13)
    monkeypatch.setattr(logit_comparison, "_ELEMENTS", 2 * 17)
    comparison = LogitComparison((0, 5))
    for part in (slice(0, 4), slice(4, 5), slice(5, 13)):
        comparison.add(reference[part], other[part], targets[part], positions[part])
    result = comparison.result()
    logs = [functional.log_softmax(x.double(), -1) for x in (reference, other)]
    kl = functional.kl_div(logs[1], logs[0], log_target=True, reduction="none").sum(-1)
    losses = [functional.nll_loss(x, targets) for x in logs]
    assert result.tokens == 13
    assert result.mean_kl == pytest.approx(float(kl.mean()), rel=1e-12)
    assert result.max_kl == pytest.approx(float(kl.max()), rel=1e-12)
    assert result.nll_difference == pytest.approx(float(losses[1] - losses[0]), rel=1e-9)
    assert result.reference_nll == pytest.approx(float(losses[0]), rel=1e-12)
    assert [one.mean_kl for one in result.by_position] == pytest.approx(
        [float(kl[:5].mean()), float(kl[5:].mean())], rel=1e-12
    )


def test_buckets_hold_their_positions_and_empty_ones_are_left_out():
    """Positions 0 to 4 in buckets from 0, 2 and 100 give two tokens, three, and no third bucket."""
    result = compared(two_way([1.0] * 5), two_way([1, 1, 3, 3, 3]), bounds=(0, 2, 100))
    buckets = [(one.first, one.last, one.tokens) for one in result.by_position]
    assert buckets == [(0, 1, 2), (2, 99, 3)]
    assert result.by_position[0].mean_kl == 0
    assert result.by_position[1].mean_kl == pytest.approx(math.log(2 / math.sqrt(3)))


@pytest.mark.parametrize("broken", [0, 1])
def test_a_logit_that_is_not_finite_is_refused(broken):
    """The message names the model with the non-finite logit."""
    logits = [torch.zeros(2, 3), torch.zeros(2, 3)]
    logits[broken][1, 2] = math.nan
    with pytest.raises(MensError, match=("reference", "other")[broken]):
        compared(*logits)


def test_logits_of_two_vocabularies_are_refused():
    """The message contains both shapes."""
    with pytest.raises(MensError, match=r"\(2, 3\), \(2, 4\)"):
        compared(torch.zeros(2, 3), torch.zeros(2, 4))


def test_a_comparison_of_nothing_is_refused():
    """A mean over zero tokens is undefined."""
    with pytest.raises(MensError, match="no token"):
        LogitComparison().result()
