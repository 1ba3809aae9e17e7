"""Documents of sampled answers with rewards, and the advantage of each over its group.

A group is all answers to one prompt on one side of the split. Answers belong to the same group if
their documents have the same tokens before the answer, before any are truncated.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from mens_exp.config.objective import RewardScale
from mens_exp.errors import DataError
from mens_exp.rows.documents import Document, RowDocuments, marked, number_of
from mens_exp.rows.schema import REWARD

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from mens_exp.rows.documents import Encoded, Ending, Labelling
    from mens_exp.rows.schema import TrainingPair

PROMPT: Final = ("prompt_0", "prompt_1", "prompt_2")
"""Further values of each token: a hash of the prompt, 24 bits each, which f32 holds exactly."""
_LEAST_SPREAD = 1e-4  # added to the standard deviation, as in TRL


class _Rewarded(RowDocuments):
    """A row with the reward of its last answer, which is supervised."""

    fields = frozenset({REWARD})
    extra = (REWARD, *PROMPT)

    def check(self, pair: TrainingPair) -> None:
        """Refuse a row without a prompt or a reward, or whose reward is not a number.

        Raises:
            DataError: it has one of these problems.
        """
        super().check(pair)
        if pair.is_text:
            raise DataError(
                "a plain text has no prompt that others could answer",
                where=pair.name,
                expected="a row of prompt, response and fields: {reward: <number>}",
            )
        if number_of(pair, REWARD) is None:
            raise DataError(
                "the row's reward is not a finite number",
                where=pair.name,
                found=repr(dict(pair.fields)[REWARD]),
                expected="a number, such as 1 for an answer that passes and 0 for another",
            )

    def answers(self, pair: TrainingPair, labelling: Labelling) -> Sequence[int]:
        """Return the last answer."""
        del labelling
        return [len(pair.history)]

    def documents_of(
        self, pair: TrainingPair, endings: Sequence[Ending], labelling: Labelling
    ) -> list[Document]:
        """Return one document, each token with the reward and a hash of the whole prompt."""
        del labelling
        reward = number_of(pair, REWARD)
        assert reward is not None, "rows are checked before"
        return [_rewarded(own, reward) for own in endings]


def _rewarded(own: Ending, reward: float) -> Document:
    prompt = np.asarray(own.ids[: own.start], np.int32).tobytes()
    found = hashlib.sha256(prompt).digest()
    parts = [float(int.from_bytes(found[3 * n : 3 * n + 3])) for n in range(len(PROMPT))]
    values = {REWARD: reward, **dict(zip(PROMPT, parts, strict=True))}
    extra = {name: [value] * len(own.ids) for name, value in values.items()}
    return Document(own.ids, marked(own), extra)


REWARDED = _Rewarded()


@dataclass(frozen=True, slots=True)
class Groups:
    """The advantage of each document's answer, ``[documents]`` f32, and the number of groups."""

    advantages: np.ndarray
    groups: int
    equal: int  # groups whose answers all have the same reward, and so no gradient


def _without_others(where: str, alone: int, prompts: int) -> DataError:
    return DataError(
        "a prompt has a single answer, which can be compared with none",
        where=where,
        found=f"{alone} of {prompts} prompts",
        expected="two answers or more to each prompt, with the same turns before them",
        remedy="sample more answers to it, or leave the row out",
    )


def refuse_single_answers(pairs: Iterable[TrainingPair]) -> None:
    """Refuse one side of the split if a prompt has only one answer, before rows are encoded.

    Here, rows are answers to the same prompt if their system prompts and users' texts are equal up
    to white space. A chat template may distinguish more prompts; `groups_of` compares tokens.

    Raises:
        DataError: there is such a prompt; the message names the first one's row.
    """
    answers: Counter[tuple[str, ...]] = Counter()
    rows: dict[tuple[str, ...], TrainingPair] = {}
    for pair in pairs:
        texts = (pair.system or "", *(user for user, _ in pair.exchanges))
        asked = tuple(" ".join(text.split()) for text in texts)
        answers[asked] += 1
        rows.setdefault(asked, pair)
    alone = [rows[asked].name for asked, number in answers.items() if number == 1]
    if alone:
        raise _without_others(alone[0], len(alone), len(answers))


def groups_of(documents: Encoded, scale: RewardScale) -> Groups:
    """Compute the advantage of each answer over the other answers to its prompt.

    The advantage is the reward minus the mean of the group. Depending on `scale`, it is divided by
    the standard deviation (with Bessel's correction) of the group or of all answers, plus 1e-4
    (arXiv:2402.03300, 4.1.2; TRL).

    Args:
        documents: the answers of one side of the split, with their rewards.
        scale: the divisor.

    Raises:
        DataError: a prompt has only one answer.
    """
    last = documents.offsets[1:] - 1
    members: dict[tuple[float, ...], list[int]] = {}
    prompts = zip(*(documents.extra[name][last].tolist() for name in PROMPT), strict=True)
    for number, prompt in enumerate(prompts):
        members.setdefault(prompt, []).append(number)
    rewards = documents.extra[REWARD][last].astype(np.float64)
    if alone := sum(len(one) == 1 for one in members.values()):
        raise _without_others("data", alone, len(members))
    advantages, equal = np.zeros(len(rewards)), 0
    for one in members.values():
        mine = rewards[one]
        if (mine == mine[0]).all():  # dividing the mean's rounding error by ~0 would amplify it
            equal += 1
            continue
        advantages[one] = mine - mine.mean()
        if scale is not RewardScale.none:
            spread = mine if scale is RewardScale.group else rewards
            advantages[one] /= spread.std(ddof=1) + _LEAST_SPREAD
    return Groups(advantages.astype(np.float32), groups=len(members), equal=equal)
