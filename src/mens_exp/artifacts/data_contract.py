"""The data-contract certificate: statistics of a run's encoded rows, before its first step."""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypedDict

from mens_exp.artifacts.atomic import remove_stale
from mens_exp.artifacts.digest import digest
from mens_exp.artifacts.record import StoredRecord, write_record
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path


class TokenPart(TypedDict):
    """Token statistics of the training documents.

    Roles are system, user, assistant, end_marker (of an answer) and template. ``ends`` counts the
    documents that include the end marker of their last answer, and ``ends_trained`` those where it
    is supervised; ``end_marker_trained`` states whether all of them do. ``answer_tokens_missed``
    counts tokens of last answers that are present but not supervised. Shares are relative to all
    tokens, to the supervised tokens without a length limit, and to all documents.
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
    """A training row and the benchmark item with which it shares the most n-grams."""

    row: str
    item: str
    shared: int
    share: float


class OverlapPart(TypedDict):
    """Overlap of training rows with a benchmark: word n-grams, short items whole, functions by AST.

    ``sharing`` items have an n-gram or a function in common with some row; for ``contained`` items,
    a single row has half of them or more.
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
    """Facts about the rows themselves.

    ``prompts_checked`` rows were rendered as in evaluation; ``prompts_otherwise`` start differently
    in training. ``mix_off`` is the number of rows by which a source deviates most from its share.
    """

    groups_on_two_sides: list[str]
    rows_on_two_sides: int
    conversations: int
    repeated_answers: int
    prompts_checked: int
    prompts_otherwise: int
    mix_off: float | None


class ReferencePart(TypedDict):
    """Our loss and gradient compared with those of plain transformers, both in f32.

    The reference is the model's own ``forward(labels=...)`` on the same weights, one document at a
    time, with eager attention and a nonzero adapter. Differences are relative, ``|a − b| / |b|``;
    the gradient difference is over all ``parameters`` as one vector. A run above a tolerance is
    refused. ``from_cache``: the comparison was made by an earlier run with the same base, adapter,
    code and packages.
    """

    loss: float
    gradient: float
    parameters: int
    loss_tolerance: float
    gradient_tolerance: float
    seconds: float
    from_cache: bool


class ProbePart(TypedDict):
    """Probes of the run's own model on a few documents, before step 1.

    Differences are relative: ``|a − b| / |b|``. ``together`` compares a batch with its documents
    processed separately: the sum of losses, and the hidden states at supervised positions. The
    whole first micro-batch of training is compared too: its hidden states, and the gradients of a
    fixed linear function of them, which records of earlier releases lack. ``peek``
    is the change of the loss or of a hidden state when a document's last token, from which nothing
    is predicted, is replaced. ``accumulation`` compares one batch with micro-batches of one
    document: loss and gradients, over ``parameters_compared`` of them. ``reference`` is null if
    ``reference_unknown`` gives a reason.
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
    together_gradient: float | None
    peek: float | None
    accumulation_documents: int | None
    accumulation_loss: float | None
    accumulation_gradient: float | None
    parameters_compared: int | None
    reference: ReferencePart | None
    reference_unknown: str | None
    seconds: float


class _Cached(StoredRecord):
    """A cached record that contains the digest of its own content.

    A file whose digest is missing or wrong is rejected, and the record is created again.
    """

    __slots__ = ()

    def write(self: Any, path: Path) -> None:
        """Write the record with its digest, atomically."""
        write_record(replace(self, sha256=_content_of(self)), path)

    def keep(self: Any, path: Path) -> str | None:
        """Write the record; return the reason if it cannot be written, since no run needs it."""
        try:
            remove_stale(path.parent)  # of all entries: this one may never be written again
            self.write(path)
        except OSError as error:
            return f"{path} was not kept for later runs: {error.strerror or error}"
        return None

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
    """A token part cached next to its encoding, with the reasons for its null values."""

    format: str = "mens_exp_token_contract"
    version: int = 1
    encoding_sha256: str
    tokens: TokenPart
    unknown: dict[str, str] = field(default_factory=dict)
    sha256: str = field(default="", compare=False)


@dataclass(kw_only=True, slots=True)
class StoredReference(_Cached):
    """A comparison with transformers, cached for the next run of the same graph."""

    format: str = "mens_exp_reference"
    version: int = 1
    part: ReferencePart
    sha256: str = field(default="", compare=False)


@dataclass(kw_only=True, slots=True)
class DataContract(StoredRecord):
    """The certificate, a node of the manifest.

    Attributes:
        format: always ``mens_exp_data_contract``.
        version: version of this layout.
        tokens: the training documents.
        rows: the rows.
        overlap: the rows compared with each benchmark of the run.
        probe: results of the probes on the model.
        limits: the limits that were applied.
        violations: exceeded limits, with figures; empty for a run that trained.
        unknown: dotted path of a null field -> reason.
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
        """Return an empty list: all values of the right types are valid."""
        del where
        return []

    def as_json(self) -> dict[str, Any]:
        """Return the node as plain JSON."""
        return dataclasses.asdict(self)
