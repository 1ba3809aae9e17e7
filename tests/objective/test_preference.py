"""Preference losses worked out by hand, and the values they are computed from."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mens_exp.errors import DataError
from mens_exp.objective.causal import Passed
from mens_exp.objective.preference import (
    KahnemanTversky,
    OddsRatio,
    Preference,
    SimPO,
    log_of_rest,
    segments,
)
from mens_exp.rows.documents import Labelling, spans
from mens_exp.rows.encode import encode
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import VoxTokenizer

# Two pairs: answers of two tokens and one, then of one and one. Probabilities of each target.
OURS = [[0.5, 0.4], [0.2], [0.3], [0.6]]
BASE = [[0.4, 0.4], [0.4], [0.3], [0.3]]
LENGTHS = [len(one) for one in OURS]
D = [math.log(0.5 / 0.4) - math.log(0.2 / 0.4), 0 - math.log(0.6 / 0.3)]  # sums over the pairs
MEAN = [math.log(0.5 / 0.4) / 2 - math.log(0.2 / 0.4), D[1]]
NLL = [-(math.log(0.5) + math.log(0.4)) / 2, -math.log(0.3)]


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


def passed(ours=OURS, base=BASE, **extra):
    """Pass a batch whose targets have the given probabilities; documents are numbered 4 to 7."""

    def side(found, reference=None):
        probabilities = [p for one in found for p in one]
        hidden = torch.tensor([[p, 1 - p] for p in probabilities]).log()
        batch = SimpleNamespace(
            targets_M=torch.zeros(len(probabilities), dtype=torch.long),
            document_M=torch.repeat_interleave(torch.arange(4, 8), torch.tensor(LENGTHS)),
            extra=extra,
        )
        return Passed(batch, hidden.requires_grad_(), torch.nn.Identity(), reference)

    return side(ours, None if base is None else side(base))


SETTINGS = {"beta": 0.5, "chunk_tokens": 2}
BY_HAND = {
    "sigmoid": ({}, [-log_sigmoid(0.5 * d) for d in D]),
    "smoothed": (
        {"label_smoothing": 0.1},
        [-0.9 * log_sigmoid(0.5 * d) - 0.1 * log_sigmoid(-0.5 * d) for d in D],
    ),
    "robust": (
        {"loss": "robust", "label_smoothing": 0.1},
        [(-0.9 * log_sigmoid(0.5 * d) + 0.1 * log_sigmoid(-0.5 * d)) / 0.8 for d in D],
    ),
    "hinge": ({"loss": "hinge"}, [max(0, 1 - 0.5 * d) for d in D]),
    "hinge of means": (
        {"loss": "hinge", "length_normalised": True},
        [max(0, 1 - 0.5 * d) for d in MEAN],
    ),
    "ipo": ({"loss": "ipo"}, [(d - 1) ** 2 for d in MEAN]),
    "with imitation": (
        {"nll_weight": 2.0},
        [-log_sigmoid(0.5 * d) + 2 * nll for d, nll in zip(D, NLL, strict=True)],
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_losses_of_pairs_by_hand(name):
    """Losses are summed over two pairs; every answer of the first has a gradient."""
    settings, expected = BY_HAND[name]
    one = passed()
    found = Preference(**SETTINGS, **settings).loss(one)
    assert found.total.item() == pytest.approx(sum(expected), rel=1e-6)
    assert found.count == 2
    assert found.metrics["reward_margin"].item() == pytest.approx(0.5 * sum(D), rel=1e-6)
    assert found.metrics["reward_accuracy"].item() == 1
    assert found.metrics["chosen_nll"].item() == pytest.approx(sum(NLL), rel=1e-6)
    found.total.backward()
    assert (one.hidden_MD.grad[:3, 0] != 0).all()
    assert one.reference.hidden_MD.grad is None


def test_simpo_has_a_target_and_no_reference():
    """By hand: equation 6 of the SimPO paper."""
    means = [[math.log(0.5 * 0.4) / 2, math.log(0.2)], [math.log(0.3), math.log(0.6)]]
    expected = [-log_sigmoid(2 * (chosen - rejected) - 0.7) for chosen, rejected in means]
    found = SimPO(beta=2.0, target=0.7, chunk_tokens=8).loss(passed(base=None))
    assert found.total.item() == pytest.approx(sum(expected), rel=1e-6)


def test_orpo_by_hand():
    """The prompt counts for the likelihood but not for the odds."""
    ours = [[0.9, 0.4], [0.2], [0.3], [0.6]]  # the first token belongs to the prompt
    found = OddsRatio(beta=0.5, chunk_tokens=8).loss(
        passed(ours, base=None, answer=torch.tensor([0.0, 1, 1, 1, 1]))
    )

    def odds(p):
        return math.log(p / (1 - p))

    imitated = [-(math.log(0.9) + math.log(0.4)) / 2, -math.log(0.3)]
    ratios = [log_sigmoid(odds(0.4) - odds(0.2)), log_sigmoid(odds(0.3) - odds(0.6))]
    assert found.total.item() == pytest.approx(sum(imitated) - 0.5 * sum(ratios), rel=1e-6)
    assert found.metrics["chosen_nll"].item() == pytest.approx(-math.log(0.4) - math.log(0.3))


@pytest.mark.parametrize("logp", [-40.0, -3.0, -0.7, -0.6, -1e-4])
def test_the_rest_of_a_probability_keeps_its_digits(logp):
    """log(1 - p) agrees with float64 on both sides of one half."""
    found = log_of_rest(torch.tensor([logp], requires_grad=True))
    assert found.item() == pytest.approx(math.log1p(-math.exp(logp)), rel=1e-4, abs=1e-12)
    found.backward()


def test_a_certain_answer_has_finite_odds():
    """In float32 its log-likelihood is 0."""
    logp = torch.zeros(1, requires_grad=True)
    found = log_of_rest(logp)
    found.sum().backward()
    assert found.isfinite().all()
    assert logp.grad.isfinite().all()


@pytest.mark.parametrize("swapped", [False, True])
def test_kto_by_hand(swapped):
    """By hand: one wanted and one unwanted answer, with mismatched answers for the KL."""
    ours, base = (BASE, OURS) if swapped else (OURS, BASE)
    gains = [math.log(math.prod(o) / math.prod(b)) for o, b in zip(ours, base, strict=True)]
    kl = max(0, (gains[1] + gains[3]) / 2)
    one = passed(ours, base, label=torch.tensor([1.0, 1, 0, -1, 0]))
    settings = {"wanted_weight": 2.0, "unwanted_weight": 3.0, "chunk_tokens": 8}
    found = KahnemanTversky(beta=0.5, **settings).loss(one)

    def loss(margin):
        return 1 - 1 / (1 + math.exp(-0.5 * margin))

    expected = 2 * loss(gains[0] - kl) + 3 * loss(kl - gains[2])
    assert found.total.item() == pytest.approx(expected, rel=1e-6)
    assert found.metrics["kl"].item() == pytest.approx(2 * kl, abs=1e-6)
    assert found.metrics["chosen_reward"].item() == pytest.approx(0.5 * gains[0], abs=1e-6)
    assert [found.counts[f"{one}_reward"].item() for one in ("chosen", "rejected")] == [1, 1]
    found.total.backward()
    assert not one.hidden_MD.grad[2].any()  # a mismatched answer


def test_a_pair_twice_in_a_batch_is_two_pairs():
    """A micro-batch across epochs may contain the same documents again."""
    batch = SimpleNamespace(document_M=torch.tensor([6, 6, 7, 6, 7, 7]))
    assert segments(batch).tolist() == [0, 0, 1, 2, 3, 3]


PAIR = TrainingPair(prompt="p", response="good", fields=(("rejected", "bad"),))


def test_orpo_imitates_the_prompt_of_the_chosen_answer():
    """The prompt of the rejected answer is context only."""
    documents = encode([PAIR], VoxTokenizer(), Labelling(objective="orpo", seq_len=200))
    chosen, rejected = (
        documents.supervised[a:b]
        for a, b in zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    )
    answer = documents.extra["answer"]
    assert chosen.sum() > answer[: len(chosen)].sum()
    assert rejected.sum() == answer[len(chosen) :].sum()


def test_a_pair_without_room_for_an_answer_is_left_out():
    """Only its prompt would be imitated, and the odds would be undefined."""
    long = replace(PAIR, prompt="p" * 90)
    documents = encode([PAIR, long], VoxTokenizer(), Labelling(objective="orpo", seq_len=180))
    assert (len(documents), documents.dropped) == (2, 2)


def wanted(prompt, response, label=1):
    return TrainingPair(prompt=prompt, response=response, fields=(("label", label),))


def spelled(documents):
    bounds = zip(documents.offsets[:-1], documents.offsets[1:], strict=True)
    return [
        VoxTokenizer().spell(documents.ids[a:b][documents.supervised[a:b]].tolist())[:1]
        for a, b in bounds
    ]


def test_an_answer_stands_beside_that_of_a_row_with_another_prompt():
    """Another answer to the same prompt is not mismatched; the last row takes the first's."""
    rows = [wanted("p", "a"), wanted("p", "b", 0), wanted("q", "c"), wanted("q", "d")]
    documents = encode(rows, VoxTokenizer(), Labelling(objective="kto", seq_len=200))
    assert spelled(documents) == [*"ad", *"bd", *"cb", *"db"]
    labels = [documents.extra["label"][a] for a in documents.offsets[:-1]]
    assert labels == [1, 0, -1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize(("many", "last"), [(5, "ed"), (4, "dc"), (1, "aa")])
def test_no_row_is_left_alone_by_the_size_of_a_part(monkeypatch, many, last):
    """The last of five, encoded two at a time, has the answer of the row before it."""
    monkeypatch.setattr("mens_exp.rows.documents.ROWS_TOGETHER", 2)
    rows = [wanted(f"p{n}", "abcde"[n]) for n in range(many)]
    found = spelled(encode(rows, VoxTokenizer(), Labelling(objective="kto", seq_len=200)))
    assert found[-2:] == list(last)
    assert found[::2] == list("abcde"[:many])


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [(0, []), (1, [1]), (2, [2]), (4, [4]), (5, [5]), (6, [4, 2]), (9, [4, 5]), (12, [4, 4, 4])],
)
def test_parts_have_a_row_more_rather_than_a_single_one(rows, sizes):
    """They cover all rows in order."""
    found = spans(rows, 4)
    assert [part.stop - part.start for part in found] == sizes
    assert [n for part in found for n in range(rows)[part]] == list(range(rows))


def test_a_row_that_is_alone_has_its_own_answer_twice():
    """There is no other row; a plan shows it like that, and a run refuses it."""
    documents = encode([wanted("p", "a")], VoxTokenizer(), Labelling(objective="kto", seq_len=200))
    assert spelled(documents) == ["a", "a"]


def test_a_row_of_another_objective_is_not_given_another_s_answer():
    """The row is refused first."""
    with pytest.raises(DataError, match="ignore the other one"):
        encode([PAIR], VoxTokenizer(), Labelling(objective="kto", seq_len=200))
