"""GRPO by hand: advantages, the clipped ratio, and the KL from the base."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mens_exp.config.objective import OBJECTIVES, GroupLoss, GrpoObjective, RewardScale
from mens_exp.data.batch import packed_batch, padded_batch
from mens_exp.errors import DataError
from mens_exp.objective.causal import Passed, Sampled
from mens_exp.objective.groups import GroupRelative, SampledSide
from mens_exp.rows.documents import Labelling
from mens_exp.rows.encode import encode
from mens_exp.rows.rewards import groups_of, refuse_single_answers
from mens_exp.rows.schema import TrainingPair
from mens_exp.tokenizer.implementations import VoxTokenizer

SETTINGS = {"epsilon_low": 0.2, "epsilon_high": 0.5, "scale_rewards": "group", "chunk_tokens": 2}
# Three answers, of two tokens and of one each: token probabilities under the model, the
# initial adapter and the base; advantages.
NOW = [[0.5, 0.4], [0.2], [0.6]]
OLD = [[0.4, 0.2], [0.5], [0.6]]
BASE = [[0.5, 0.2], [0.4], [0.3]]
ADVANTAGES = [1.5, -2.0, 0.0]


def flat(values):
    return torch.tensor([value for one in values for value in one])


def passed():
    """Pass a batch whose targets have the given probabilities; documents end with them."""
    lengths = [len(one) for one in NOW]
    batch = SimpleNamespace(
        targets_M=torch.zeros(4, dtype=torch.long),
        target_places=torch.tensor([4, 5, 10, 15]),
        documents=((0, 6), (6, 11), (11, 16)),
        extra={"reward": torch.tensor([2.0, 2.0, 0.5, 1.0])},
    )
    hidden = torch.stack([flat(NOW), 1 - flat(NOW)], dim=1).log()
    known = Sampled(
        torch.repeat_interleave(torch.tensor(ADVANTAGES), torch.tensor(lengths)),
        flat(OLD).log(),
        flat(BASE).log(),
    )
    return Passed(batch, hidden.requires_grad_(), torch.nn.Identity(), sampled=known)


def test_loss_and_metrics_are_those_of_the_definition():
    """By hand: ratios 1.25, 2 (clipped to 1.5), 0.4 (clipped to 0.8, the smaller product) and 1."""
    found = GroupRelative(beta=0.1, **SETTINGS).loss(passed())
    k3 = [
        1.25 * (0.5 / 0.5 - math.log(0.5 / 0.5) - 1),
        2.0 * (0.2 / 0.4 - math.log(0.2 / 0.4) - 1),
        0.4 * (0.4 / 0.2 - math.log(0.4 / 0.2) - 1),
        1.0 * (0.3 / 0.6 - math.log(0.3 / 0.6) - 1),
    ]
    first = (-1.25 * 1.5 + 0.1 * k3[0] - 1.5 * 1.5 + 0.1 * k3[1]) / 2
    second = 0.8 * 2 + 0.1 * k3[2]
    third = 0.1 * k3[3]
    assert float(found.total.detach()) == pytest.approx(first + second + third, abs=1e-6)
    assert found.count == 3
    means = {name: float(v) / float(found.counts.get(name, 3)) for name, v in found.metrics.items()}
    assert means == pytest.approx(
        {"reward": 3.5 / 3, "equal_frac": 1 / 3, "base_kl": sum(k3) / 4, "clip_frac": 2 / 4}
    )


def test_a_clipped_token_has_no_gradient():
    """The second token gained enough, and the third lost enough."""
    one = passed()
    GroupRelative(beta=0.0, **SETTINGS).loss(one).total.backward()
    norms = one.hidden_MD.grad.norm(dim=1)
    assert (norms > 0).tolist() == [True, False, False, False]


def test_before_training_the_gradient_is_that_of_the_likelihood():
    """Before the first step there are no old log-probabilities: ratio and advantage are 1."""
    one = replace(passed(), sampled=None)
    found = GroupRelative(beta=0.0, **SETTINGS).loss(one)
    found.total.backward()
    assert float(found.total.detach()) == -3
    probabilities = torch.tensor([[0.5], [0.4], [0.2], [0.6]])
    grad_of_logp = torch.cat([1 - probabilities, probabilities - 1], dim=1)
    weights = torch.tensor([[0.5], [0.5], [1.0], [1.0]])
    torch.testing.assert_close(one.hidden_MD.grad, -weights * grad_of_logp)


@pytest.mark.parametrize(
    ("loss_type", "unit", "is_sum"),
    [
        ("grpo", "per answer", True),
        ("dr_grpo", "per answer", True),
        ("dapo", "per token", True),
        ("bnpo", "per token", False),
    ],
)
def test_the_unit_of_a_loss_is_that_of_its_mean(loss_type, unit, is_sum):
    """A mean per micro-batch is no sum over documents, so probes skip it."""
    spec = OBJECTIVES.named("grpo")
    assert spec.loss_unit({"objective.loss_type": loss_type}) == unit
    assert spec.is_sum(GrpoObjective(_target_="", loss_type=GroupLoss(loss_type))) is is_sum


def rows(*groups):
    """Return rows with these rewards, one group each."""
    return [
        TrainingPair(prompt=f"p{n}", response="a" * (1 + k), fields=(("reward", reward),))
        for n, rewards in enumerate(groups)
        for k, reward in enumerate(rewards)
    ]


def encoded(pairs):
    return encode(pairs, VoxTokenizer(), Labelling(objective="grpo", seq_len=200))


def test_advantages_are_rewards_against_the_group():
    """By hand: rows of a group may be scattered, and three rewards of 0.1 have no spread."""
    pairs = rows((1, 0, 0, 1), (0.1, 0.1, 0.1), (3.0, 1.0))
    order = [8, 0, 4, 1, 5, 2, 6, 3, 7]
    found = groups_of(encoded([pairs[i] for i in order]), RewardScale.group)
    half, one = 0.5 / (math.sqrt(1 / 3) + 1e-4), 1 / (math.sqrt(2) + 1e-4)
    expected = [half, -half, -half, half, 0, 0, 0, one, -one]
    assert found.advantages == pytest.approx([expected[i] for i in order], rel=1e-6)
    assert (found.groups, found.equal) == (3, 1)
    assert groups_of(encoded(pairs), RewardScale.none).advantages[-2:].tolist() == [1, -1]


@pytest.mark.parametrize("truncation", ["left", "right"])
def test_groups_are_those_of_whole_prompts(truncation):
    """Answers of different lengths leave different parts of a prompt, here equal ones of two."""
    tail = "x" * 60
    pairs = [
        TrainingPair(prompt=f"{n}{tail}", response="a" * length, fields=(("reward", reward),))
        for n in range(2)
        for length, reward in ((5, n), (5, n), (9, 1 - n), (14, n))
    ]
    how = Labelling(objective="grpo", seq_len=40 if truncation == "left" else 200)
    documents = encode(pairs, VoxTokenizer(), replace(how, truncation=truncation))
    assert documents.truncated == (8 if truncation == "left" else 0)
    found = groups_of(documents, RewardScale.none)
    assert (found.groups, found.equal) == (2, 0)
    # By hand: means of 0.25 and 0.75.
    expected = [-0.25, -0.25, 0.75, -0.25, 0.25, 0.25, -0.75, 0.25]
    assert found.advantages.tolist() == expected


def test_another_system_prompt_is_another_group():
    """Each answer is then alone in its group."""
    pairs = [replace(one, system=f"s{n}") for n, one in enumerate(rows((1, 0)))]
    with pytest.raises(DataError, match="a prompt has a single answer"):
        groups_of(encoded(pairs), RewardScale.group)


def test_rows_that_a_template_may_make_alike_are_left_to_it():
    """Prompts that differ in white space may be one group; another history makes another."""
    one, other = rows((1, 0))
    refuse_single_answers([one, replace(other, prompt="p0 \n"), *rows((), (0, 0, 1))])
    refuse_single_answers([])
    with pytest.raises(DataError, match="a prompt has a single answer") as caught:
        refuse_single_answers([one, replace(other, history=(("before", "yes"),))])
    assert "2 of 2 prompts" in str(caught.value)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (TrainingPair(prompt="p", response="a"), "the row has no reward"),
        (TrainingPair(prompt="p", response="a", fields=(("reward", "x"),)), "not a finite number"),
        (TrainingPair(prompt="p", response="a", fields=(("reward", 1e60),)), "not a finite number"),
        (TrainingPair(prompt="", response="a", fields=(("reward", 1),)), "a plain text has no"),
    ],
)
def test_rows_without_a_reward_are_refused(pair, said):
    """The error suggests another objective."""
    with pytest.raises(DataError, match=said):
        encoded([pair])


def test_rewards_are_not_ignored():
    """objective=assistant would imitate every answer."""
    labelling = Labelling(objective="assistant", seq_len=200)
    with pytest.raises(DataError, match="the row has the reward of its answer") as caught:
        encode(rows((1, 0)), VoxTokenizer(), labelling)
    assert "objective=grpo" in str(caught.value)


def test_a_reward_in_a_table_is_text():
    """CSV values are strings."""
    pair = TrainingPair(prompt="p", response="a", fields=(("reward", "0.25"),))
    assert set(encoded([pair]).extra["reward"].tolist()) == {0.25}


@pytest.mark.parametrize("packed", [True, False])
def test_each_target_has_the_values_of_its_token(packed):
    """This holds in any order, also with a document twice in a row at an epoch's end."""
    documents = encoded(rows((1, 0, 0), (0, 1)))
    supervised = np.flatnonzero(documents.supervised)
    bounds = list(pairwise(documents.offsets))
    lengths = [documents.supervised[a:b].sum() for a, b in bounds]
    side = SampledSide(
        torch.from_numpy(np.cumsum([0, *lengths[:-1]])),
        torch.arange(5.0) + 10,
        torch.from_numpy(supervised).float(),
        None,
    )
    blocks = [[3], [1, 4], [2], [2]]
    batch = (
        packed_batch(documents, blocks, 0, multiple=32)
        if packed
        else padded_batch(documents, blocks, 0, pad_id=0)
    )
    found = side.of(batch)
    chosen = [3, 1, 4, 2, 2]
    expected = [at for i in chosen for at in supervised if bounds[i][0] <= at < bounds[i][1]]
    assert found.old_logp_M.tolist() == expected
    assert found.advantage_M.tolist() == [10 + i for i in chosen for _ in range(lengths[i])]
    assert documents.ids[np.array(expected)].tolist() == batch.targets_M.tolist()
