"""Documents: the token sequences that an objective builds from a row, and their arrays.

An objective names a :class:`RowDocuments`, which determines the answers of a row that are rendered,
the resulting documents, and their supervised tokens. :mod:`mens_exp.rows.encode` encodes rows with
it.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from mens_exp.config.objective import OBJECTIVES
from mens_exp.config.plugins import named_object
from mens_exp.errors import ConfigError, DataError, expected_name
from mens_exp.rows.answers import answer_of
from mens_exp.rows.schema import LABEL, REJECTED, REWARD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.rows.answers import Answer, TextEncoder
    from mens_exp.rows.schema import TrainingPair

# Number of rows encoded at a time. Their texts are in memory, and RowDocuments.prepared receives
# them, so the documents of objective=kto depend on this number. Unverified guess.
ROWS_TOGETHER: Final = 2048


def spans(rows: int, size: int | None = None) -> list[slice]:
    """Return parts of a number of rows, none of a single row unless there is only one.

    Args:
        rows: number of rows.
        size: rows in each part, the last of which may have one more; None is `ROWS_TOGETHER`.
    """
    starts = list(range(0, rows, size or ROWS_TOGETHER))
    if rows > 1 and rows - starts[-1] == 1:
        del starts[-1]
    return [slice(start, end) for start, end in pairwise([*starts, rows])]


_ARRAYS: Final = ("ids", "supervised", "offsets")
_EXTRA: Final = "extra_"  # prefix of a further value's name in stored arrays


@dataclass(frozen=True, kw_only=True, slots=True)
class Labelling:
    """The settings that determine ids and masks, besides rows and tokenizer.

    Attributes:
        objective: the objective that determines the supervised tokens (`objective.labels`).
        seq_len: maximum tokens of a document, or of the documents of a row that stay together.
        turns: supervise ``all`` answers of a conversation, or the ``last``.
        truncation: the side that is truncated, ``right`` or ``left``.
        k: number of tokens that ``last_k`` supervises; 0 means every token after the prompt.
        options: further settings of an objective that select tokens.
        virtual_tokens: places before the tokens of each document that the adapter takes of
            ``seq_len``.
    """

    objective: str
    seq_len: int
    turns: str = "all"
    truncation: str = "right"
    k: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    virtual_tokens: int = 0

    @property
    def rows(self) -> RowDocuments:
        """The object that builds documents from rows.

        Raises:
            ConfigError: there is no such objective.
            SetupError: an installed objective cannot be used.
        """
        spec = OBJECTIVES.known(self.objective)
        if spec is None:
            raise ConfigError(
                "unknown labelling rule",
                where="objective.labels",
                found=self.objective,
                expected=expected_name(self.objective, OBJECTIVES.built_in),
            )
        found = named_object(spec.documents, RowDocuments, of=f"the objective {spec.name}")
        weight = dict(self.options).get("weight_field")
        return found if weight is None else _Weighted(found, str(weight))

    @property
    def document_tokens(self) -> int:
        """Maximum tokens of one document, without virtual tokens."""
        return self.seq_len // self.rows.together - self.virtual_tokens

    def record(self) -> dict[str, Any]:
        """Return the settings in the form used in cache keys."""
        found = asdict(self)
        optional = {"options", "virtual_tokens"}
        return {name: value for name, value in found.items() if name not in optional or value}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """Documents as flat arrays; document ``i`` is ``ids[offsets[i]:offsets[i + 1]]``.

    ``supervised[t]`` means that token ``t`` is a target, predicted from the tokens before it.
    ``truncated`` and ``dropped`` count documents that lost some or all tokens to the limit. Of the
    dropped, ``short`` ones have fewer than two tokens, so that nothing can be predicted.
    ``unrolled`` counts documents beyond the first of their row. ``extra`` holds further values of
    each token for the objective. Groups of ``together`` consecutive documents, such as an answer
    and the one to compare it with, stay in one micro-batch. ``shared`` is the length of the prefix
    that a document shares with the previous one and that packing computes only once; None if no
    document shares any. ``virtual_tokens`` is the number of places that each document takes besides
    its tokens, for the vectors of prompt tuning.
    """

    ids: np.ndarray  # [tokens] int32
    supervised: np.ndarray  # [tokens] bool
    offsets: np.ndarray  # [documents + 1] int64
    truncated: int
    dropped: int
    unrolled: int = 0
    short: int = 0
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # [tokens] float32
    together: int = 1
    shared: np.ndarray | None = None  # [documents] int64
    virtual_tokens: int = 0

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.offsets) - 1

    @property
    def units(self) -> np.ndarray:
        """Number of tokens in documents that stay together, ``[documents / together] int64``."""
        units: np.ndarray = self.lengths.reshape(-1, self.together).sum(axis=1)
        return units

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens in each document, ``[documents] int64``."""
        return np.diff(self.offsets)

    @property
    def room(self) -> np.ndarray:
        """Number of tokens that each unit takes in a block, without shared prefixes.

        Virtual tokens are counted once for the documents that share a prefix.
        """
        shared = np.zeros(len(self), np.int64) if self.shared is None else self.shared
        others = self.virtual_tokens * (shared == 0) - shared
        room: np.ndarray = self.units + others.reshape(-1, self.together).sum(axis=1)
        return room


def share_prompts(documents: Encoded) -> Encoded:
    """Let the second document of each pair share its prefix with the first one.

    The shared prefix ends before the second document's first supervised token, and leaves each
    document at least one token.
    """
    assert documents.together == _PAIR, "documents to compare come in pairs"
    ids, offsets = documents.ids, documents.offsets.tolist()
    shared = np.zeros(len(documents), np.int64)
    for second in range(1, len(documents), _PAIR):
        first, start, end = offsets[second - 1 : second + 2]
        most = min(start - first - 1, int(documents.supervised[start:end].argmax()))
        differs = ids[first : first + most] != ids[start : start + most]
        shared[second] = differs.argmax() if differs.any() else most
    return replace(documents, shared=shared)


_PAIR: Final = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """The text that ends with one answer; ``ids[start:end]`` is the answer and its end."""

    ids: list[int]
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its ids, its supervision mask, and further values of each token."""

    ids: list[int]
    learned: list[bool]
    extra: dict[str, list[float]] = field(default_factory=dict)


class RowDocuments:
    """The documents that an objective builds from a row, and their supervised tokens.

    The defaults are those of an objective over all answers of a conversation. Each answer is
    supervised once, in the longest document that contains it with the context of its generation.
    Objects are pickled, because several processes may encode.
    """

    only_answers = True
    """Whether only answers and their end markers are supervised."""
    as_rendered = False
    """Whether documents end as the template does, with nothing appended."""
    follows_prompts = True
    """Whether documents begin with the prompts used in evaluation."""
    needs_another_row = False
    """Whether documents of a row depend on another row of its side."""
    together = 1
    """Number of consecutive documents that stay together in a micro-batch."""
    extra: tuple[str, ...] = ()
    """Names of further values that documents have for each token."""
    fields: frozenset[str] = frozenset()
    """Names of the further fields that each row must have."""

    def check(self, pair: TrainingPair) -> None:
        """Refuse a row that lacks a field, or has one that would be ignored.

        Raises:
            DataError: it lacks one, or has one.
        """
        found = {name for name, _ in pair.fields}
        if found == self.fields:
            return
        unread = [name for name in _JUDGEMENTS if name in found - self.fields]
        lacking = [name for name in _JUDGEMENTS if name in self.fields - found]
        for name in (*unread, *lacking):
            what, objectives = _JUDGEMENTS[name][name not in unread]
            raise DataError(what, where=pair.name, remedy=f"choose {objectives}")
        raise DataError(
            "a row lacks the fields that the objective reads",
            where=pair.name,
            found=", ".join(sorted(found)) or "no fields",
            expected=", ".join(sorted(self.fields)) or "no fields",
            remedy="choose the objective that reads them, or name other columns with "
            "data.columns={fields:{name:column}}; objective.weight_field weighs rows by one",
        )

    def check_tokenizer(self, encoder: TextEncoder, labelling: Labelling) -> None:
        """Refuse, before any row is read, a tokenizer without the tokens that documents need.

        Raises:
            ConfigError: it lacks them.
        """

    def prepared(self, pairs: Sequence[TrainingPair]) -> Sequence[TrainingPair]:
        """Return rows that are encoded together, each with the values that it needs of others."""
        return pairs

    def variants(self, pair: TrainingPair) -> list[TrainingPair]:
        """Return copies of the row, one for each last answer that it is rendered with."""
        return [pair]

    def rendered(
        self, pair: TrainingPair, encoder: TextEncoder, labelling: Labelling
    ) -> list[Answer]:
        """Render the answers of a row that documents are built from, oldest first.

        Raises:
            DataError: the objective cannot learn from the row, or the template alters it.
        """
        chosen = self.answers(pair, labelling)
        return [answer_of(one, number, encoder) for one in self.variants(pair) for number in chosen]

    def answers(self, pair: TrainingPair, labelling: Labelling) -> Sequence[int]:
        """Return the indices of the answers of a row that are rendered, in order."""
        first = 0 if labelling.turns == "all" else len(pair.history)
        return [
            number for number in range(first, len(pair.exchanges)) if number not in pair.unlearned
        ]

    def documents_of(
        self, pair: TrainingPair, endings: Sequence[Ending], labelling: Labelling
    ) -> list[Document]:
        """Return the documents of a row, which may depend on more than its answers.

        Args:
            pair: the row.
            endings: the rendered text up to each answer, oldest first.
            labelling: the settings.
        """
        del pair
        return self.documents(endings, labelling)

    def documents(self, endings: Sequence[Ending], labelling: Labelling) -> list[Document]:
        """Return the documents of a row.

        Args:
            endings: the rendered text up to each answer, oldest first.
            labelling: the settings.
        """
        del labelling
        documents: list[Document] = []
        left = list(endings)
        while left:
            whole = left.pop()
            mask = [False] * len(whole.ids)
            changed = []
            for own in [*left, whole]:
                if own.ids[: own.end] == whole.ids[: own.end]:
                    mask[own.start : own.end] = [True] * (own.end - own.start)
                else:
                    changed.append(own)
            documents.append(Document(whole.ids, mask))
            left = changed
        return documents[::-1]


class _EveryToken(RowDocuments):
    """Every token of a row is supervised."""

    only_answers = False

    def answers(self, pair: TrainingPair, labelling: Labelling) -> Sequence[int]:
        """Return the last answer, because the text up to it is the whole row."""
        del labelling
        return [len(pair.history)]

    def documents(self, endings: Sequence[Ending], labelling: Labelling) -> list[Document]:
        """Return the row, with every token supervised."""
        del labelling
        return [Document(own.ids, [True] * len(own.ids)) for own in endings]


class _End(_EveryToken):
    """The last ``k`` tokens of a row's text are supervised; with 0, all tokens after its prompt."""

    as_rendered = True

    def documents(self, endings: Sequence[Ending], labelling: Labelling) -> list[Document]:
        """Return the row up to its last answer's end."""
        last = endings[-1]
        first = max(last.end - labelling.k, 0) if labelling.k else last.start
        return [Document(last.ids[: last.end], [place >= first for place in range(last.end)])]


class _Pair(RowDocuments):
    """A row with its chosen and then its rejected answer; only this last answer is supervised."""

    together = 2
    fields = frozenset({REJECTED})

    def variants(self, pair: TrainingPair) -> list[TrainingPair]:
        """Return the row with its own answer, and with its rejected one."""
        return [pair, with_answer(pair, str(dict(pair.fields)[REJECTED]))]

    def answers(self, pair: TrainingPair, labelling: Labelling) -> Sequence[int]:
        """Return the last answer."""
        del labelling
        return [len(pair.history)]

    def documents(self, endings: Sequence[Ending], labelling: Labelling) -> list[Document]:
        """Return a document for each answer."""
        del labelling
        return [Document(own.ids, marked(own)) for own in endings]


class _WholePair(_Pair):
    """A pair whose chosen row is supervised with its prompt; `answer` is 1 for answer tokens."""

    only_answers = False
    extra = ("answer",)

    def documents(self, endings: Sequence[Ending], labelling: Labelling) -> list[Document]:
        """Return a document for each answer; supervise nothing if an answer would be cut off."""
        limit = labelling.document_tokens
        cut = labelling.truncation == "right" and any(own.start >= limit for own in endings)
        made = []
        for own, is_chosen in zip(endings, (True, False), strict=True):
            answer = marked(own)
            learned = [not cut and (one or is_chosen) for one in answer]
            learned[own.end :] = [False] * (len(answer) - own.end)
            made.append(Document(own.ids, learned, {"answer": [float(one) for one in answer]}))
        return made


_MISMATCHED: Final = "mismatched"
_TRIED: Final = 64  # rows searched for one with a different prompt; unverified guess


class _Labelled(_Pair):
    """A row with its own answer (`label` 1 or -1), then with another row's answer (`label` 0).

    The other row is the nearest preceding one with a different prompt, cyclically among the rows
    that are encoded together.
    """

    fields = frozenset({LABEL})
    extra = ("label",)
    needs_another_row = True

    def prepared(self, pairs: Sequence[TrainingPair]) -> Sequence[TrainingPair]:
        """Return the rows, each with another row's answer as a further field."""
        found = []
        for number, pair in enumerate(pairs):
            before = (pairs[number - back] for back in range(1, min(len(pairs), _TRIED)))
            other = next((one for one in before if one.prompt != pair.prompt), pairs[number - 1])
            found.append(replace(pair, fields=(*pair.fields, (_MISMATCHED, other.response))))
        return found

    def variants(self, pair: TrainingPair) -> list[TrainingPair]:
        """Return the row with its own answer, and with the other row's."""
        return [pair, with_answer(pair, str(dict(pair.fields)[_MISMATCHED]))]

    def documents_of(
        self, pair: TrainingPair, endings: Sequence[Ending], labelling: Labelling
    ) -> list[Document]:
        """Return a document for each answer."""
        del labelling
        label = 1.0 if dict(pair.fields)[LABEL] else -1.0
        return [
            Document(own.ids, marked(own), {"label": [value] * len(own.ids)})
            for own, value in zip(endings, (label, 0.0), strict=True)
        ]


def number_of(pair: TrainingPair, name: str) -> float | None:
    """Return a field of a row, possibly a text, as a finite f32 number; None if it is not one."""
    try:
        with np.errstate(over="ignore"):
            found = float(np.float32(float(dict(pair.fields)[name])))
    except (OverflowError, ValueError):
        return None
    return found if math.isfinite(found) else None


WEIGHT: Final = "weight"  # the further value that multiplies a token's loss


class _Weighted(RowDocuments):
    """The documents of another object, with a field of the row as the `weight` of each token.

    A row with weight 0 has no supervised token.
    """

    def __init__(self, inner: RowDocuments, field_name: str) -> None:
        """Weigh the documents of ``inner`` by a field of their rows."""
        self.inner, self.field = inner, field_name
        self.only_answers, self.as_rendered = inner.only_answers, inner.as_rendered
        self.follows_prompts, self.together = inner.follows_prompts, inner.together
        self.needs_another_row = inner.needs_another_row
        self.extra = (*inner.extra, WEIGHT)
        self.fields = inner.fields | {field_name}

    def check(self, pair: TrainingPair) -> None:
        """Refuse a row without the weight or another field, or with an invalid weight.

        Raises:
            DataError: it has one of these problems.
        """
        super().check(pair)
        self.weight(pair)

    def weight(self, pair: TrainingPair) -> float:
        """Return the weight of a row as an f32 number; it may be stored as text.

        Raises:
            DataError: it is not a number of at least 0.
        """
        found = number_of(pair, self.field)
        if found is None or found < 0:
            raise DataError(
                f"the row's weight, {self.field!r} of its fields, is not a number of at least 0",
                where=pair.name,
                found=repr(dict(pair.fields)[self.field]),
                expected="a finite number; 0 leaves the row out",
                remedy="correct the row, or leave out objective.weight_field",
            )
        return found

    def check_tokenizer(self, encoder: TextEncoder, labelling: Labelling) -> None:
        """Refuse a tokenizer that the other object refuses."""
        self.inner.check_tokenizer(encoder, labelling)

    def prepared(self, pairs: Sequence[TrainingPair]) -> Sequence[TrainingPair]:
        """Return the rows with what the other object adds."""
        return self.inner.prepared(pairs)

    def variants(self, pair: TrainingPair) -> list[TrainingPair]:
        """Delegate to the other object."""
        return self.inner.variants(pair)

    def answers(self, pair: TrainingPair, labelling: Labelling) -> Sequence[int]:
        """Delegate to the other object."""
        return self.inner.answers(pair, labelling)

    def rendered(
        self, pair: TrainingPair, encoder: TextEncoder, labelling: Labelling
    ) -> list[Answer]:
        """Delegate to the other object."""
        return self.inner.rendered(pair, encoder, labelling)

    def documents_of(
        self, pair: TrainingPair, endings: Sequence[Ending], labelling: Labelling
    ) -> list[Document]:
        """Return the other object's documents, each token with the row's weight."""
        weight = self.weight(pair)
        return [
            Document(
                one.ids,
                [learned and weight > 0 for learned in one.learned],
                {**one.extra, WEIGHT: [weight] * len(one.ids)},
            )
            for one in self.inner.documents_of(pair, endings, labelling)
        ]


def marked(own: Ending) -> list[bool]:
    """Return a mask of the answer's tokens."""
    return [own.start <= place < own.end for place in range(len(own.ids))]


def with_answer(pair: TrainingPair, text: str) -> TrainingPair:
    """Return a row with a different last answer, a text without tool calls."""
    held = pair.conversation
    if held is not None:
        found = json.loads(held)
        found["messages"][-1] = {"role": "assistant", "content": text}
        held = json.dumps(found, ensure_ascii=False)
    return replace(pair, response=text, conversation=held)


_COLUMNS: Final = (
    "or leave it out: where TRL's rows have a prompt, data.columns={prompt:prompt,response:"
)
# For each judgement: the problem and the remedy of rows that have it unread, and that lack it.
_JUDGEMENTS: Final = {
    REJECTED: (
        (
            "the row prefers one answer to another, and the objective would ignore the other one",
            f"objective=dpo, which learns from both answers, {_COLUMNS}chosen}}",
        ),
        (
            "the row has no rejected answer to compare its answer with",
            "objective=assistant, or give rows of prompt, chosen and rejected",
        ),
    ),
    LABEL: (
        (
            "the row says whether its answer is wanted, and the objective would ignore that",
            f"objective=kto, which learns from both kinds, {_COLUMNS}completion}}",
        ),
        (
            "the row has no label that says whether its answer is wanted",
            "another objective, or give rows of prompt, completion and label",
        ),
    ),
    REWARD: (
        (
            "the row has the reward of its answer, and the objective would ignore it",
            "objective=grpo, which learns from rewards, or leave 'reward' out of the row's fields",
        ),
        (
            "the row has no reward of its answer",
            "objective=assistant, or give rows of prompt, response and fields: {reward: <number>}",
        ),
    ),
}

ASSISTANT = RowDocuments()
CAUSAL = _EveryToken()
LAST_K = _End()
PAIR = _Pair()
WHOLE_PAIR = _WholePair()
LABELLED = _Labelled()


def arrays_of(part: Encoded) -> dict[str, np.ndarray]:
    """Return the arrays of documents in their stored form, by name."""
    extra = {f"{_EXTRA}{name}": values for name, values in part.extra.items()}
    return {**{name: getattr(part, name) for name in _ARRAYS}, **extra}


def opened(
    arrays: Mapping[str, np.ndarray], counts: Mapping[str, int], *, together: int = 1
) -> Encoded:
    """Return stored documents.

    Args:
        arrays: the arrays by name, as returned by :func:`arrays_of`.
        counts: numbers of truncated, dropped, unrolled and short documents.
        together: number of documents that stay together.
    """
    extra = {n.removeprefix(_EXTRA): v for n, v in arrays.items() if n.startswith(_EXTRA)}
    known: dict[str, Any] = {**{name: arrays[name] for name in _ARRAYS}, **counts}
    return Encoded(**known, extra=extra, together=together)
