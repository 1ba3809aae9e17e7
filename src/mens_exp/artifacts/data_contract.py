"""The data-contract certificate: what a run's rows became, measured before its first step."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.record import StoredRecord, write_record
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


class TokenPart(TypedDict):
    """The training documents, token by token.

    Roles are system, user, assistant, end_marker (of an answer) and template. ``ends`` counts
    documents that reach the end marker of their last answer, ``ends_trained`` those that learn it;
    ``end_marker_trained`` says whether all of them do. ``answer_tokens_missed`` are tokens of last
    answers that are there and not learned. Shares: of all tokens, of the learned tokens
    that there would be without a limit, of all documents.
    """

    documents: int
    tokens: int
    trained_tokens: int
    trained_frac: float
    tokens_by_role: dict[str, int] | None
    trained_by_role: dict[str, int] | None
    end_marker_trained: bool | None
    ends: int | None
    ends_trained: int | None
    end_marker_trained_frac: float | None
    answer_tokens_missed: int | None
    trained_tokens_lost: int
    trained_tokens_lost_frac: float
    nothing_to_learn: int
    nothing_to_learn_frac: float
    longest: int
    truncated: int


class Clash(TypedDict):
    """A training row and the benchmark's item that it shares most n-grams with."""

    row: str
    item: str
    shared: int
    share: float


class OverlapPart(TypedDict):
    """Training rows against a benchmark: word n-grams, shorter items whole, functions by tree.

    ``sharing`` items have an n-gram or a function in some row; of ``contained`` ones a row has half
    or more.
    """

    against: str
    items: int
    ngram_words: int
    sharing: int
    contained: int
    contained_frac: float
    rows_sharing: int
    worst: list[Clash]


class RowsPart(TypedDict):
    """Facts that follow from the rows themselves.

    ``prompts_checked`` rows were rendered as evaluation renders them; ``prompts_otherwise`` begin
    otherwise in training. ``mix_off`` is how many rows the source furthest from its share is off.
    """

    groups_on_two_sides: list[str]
    rows_on_two_sides: int
    conversations: int
    repeated_answers: int
    prompts_checked: int
    prompts_otherwise: int
    mix_off: float | None


class ReferencePart(TypedDict):
    """Our loss and gradient against those of transformers alone, both in f32.

    The reference is the model's own ``forward(labels=...)`` on the same weights, one document at a
    time, with eager attention and a filled adapter. Differences are relative, ``|a − b| / |b|``;
    the gradient's is of all ``parameters`` as one vector. A run over a tolerance is refused.
    ``from_cache``: an earlier run of the same base, adapter, code and packages was compared.
    """

    loss: float
    gradient: float
    parameters: int
    loss_tolerance: float
    gradient_tolerance: float
    seconds: float
    from_cache: bool


class ProbePart(TypedDict):
    """Trials on a few documents with the run's own model, before step 1.

    Differences are relative: ``|a − b| / |b|``. ``together`` is a batch against its documents
    alone: the sum of losses, and the hidden states at learned positions. ``peek`` is how far the
    loss or a hidden state moves when a document's last token, which nothing is predicted from, is
    another one.
    ``accumulation`` is one batch against micro-batches of one document: loss and gradients, over
    ``parameters_compared`` of them. ``reference`` is null where ``reference_unknown`` says why.
    """

    documents: int
    tokens: int
    packed: bool
    dropout: str
    tolerance: float
    targets_follow: bool
    as_asked: list[str]
    together_loss: float | None
    together_hidden: float | None
    peek: float | None
    accumulation_documents: int | None
    accumulation_loss: float | None
    accumulation_gradient: float | None
    parameters_compared: int | None
    reference: ReferencePart | None
    reference_unknown: str | None
    seconds: float


class _Cached(StoredRecord):
    """A cached record that carries the digest of its own content.

    A file without the digest, or with another, cannot be read, and the record is made again.
    """

    __slots__ = ()

    def write(self: Any, path: Path) -> None:
        """Write the record with its digest, atomically."""
        write_record(replace(self, sha256=_content_of(self)), path)

    def problems(self: Any, where: str) -> list[DataError]:
        """Return an error if the content differs from its digest."""
        expected = _content_of(self)
        if self.sha256 == expected:
            return []
        place = f"{where}: sha256"
        return [DataError("wrong value", where=place, found=self.sha256, expected=expected)]


def _content_of(record: Any) -> str:
    return digest({**asdict(record), "sha256": None})


@dataclass(kw_only=True, slots=True)
class StoredTokens(_Cached):
    """A token part kept beside the encoding that it is of, and why parts of it are null."""

    format: str = "mens_exp_token_contract"
    version: int = 1
    encoding_sha256: str
    tokens: TokenPart
    unknown: dict[str, str] = field(default_factory=dict)
    sha256: str = field(default="", compare=False)


@dataclass(kw_only=True, slots=True)
class StoredReference(_Cached):
    """A comparison with transformers, kept for the next run of the same graph."""

    format: str = "mens_exp_reference"
    version: int = 1
    part: ReferencePart
    sha256: str = field(default="", compare=False)


@dataclass(kw_only=True, slots=True)
class DataContract(StoredRecord):
    """The certificate, a node of the manifest.

    Attributes:
        format: always ``mens_exp_data_contract``.
        version: of this layout.
        tokens: the training documents.
        rows: the rows.
        overlap: the rows against each benchmark of the run.
        probe: what was tried on the model.
        limits: the settings that it was judged by.
        violations: what is over a limit, with figures; a run that trained has none.
        unknown: dotted field that is null -> why.
    """

    format: str = "mens_exp_data_contract"
    version: int = 1
    tokens: TokenPart
    rows: RowsPart
    overlap: list[OverlapPart]
    probe: ProbePart | None
    limits: dict[str, Any]
    violations: list[str] = field(default_factory=list)
    unknown: dict[str, str] = field(default_factory=dict)

    def problems(self, where: str) -> list[Any]:
        """Return nothing: every value of the right types can be."""
        del where
        return []

    def as_json(self) -> dict[str, Any]:
        """Return the node as plain JSON."""
        return dataclasses.asdict(self)
