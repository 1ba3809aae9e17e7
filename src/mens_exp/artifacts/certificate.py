"""parity.json and inspection.json: parity certificates and the inspection of an artifact.

A certificate measures how far a merged or exported model is from the model that was trained. An
inspection states the kind of an artifact, its origin, and whether its records are consistent.
Numbers that are not finite are not written: an empty delta has no rank. Unknown values are null,
with the reason in `unknown`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping


class Evidence(StrEnum):
    """The compared values: next-token distributions, or tensors if no model can run."""

    GRAPH = "graph"
    WEIGHTS = "weights"


class WorstLayer(TypedDict):
    """The layer whose hidden states differ most; ``|h − h_ref| / |h_ref|``, Frobenius."""

    layer: str
    relative_error: float


class Comparison(TypedDict):
    """One graph compared with the reference on every token of the probe; see LogitDifference.

    ``exceeded`` lists the budget limits that it exceeds.
    """

    what: str
    tokens: int
    mean_kl: float
    p99_kl: float
    max_kl: float
    top1_agreement: float
    nll_difference: float
    worst_layer: WorstLayer
    exceeded: list[str]


_UPPER = ("mean_kl", "max_kl", "nll_difference", "hidden_error")


def over_limits(one: Comparison, limits: Mapping[str, float | None]) -> list[str]:
    """List the limits that a comparison exceeds, each with the figure and the limit."""
    figures: dict[str, Any] = {**one, "hidden_error": one["worst_layer"]["relative_error"]}
    over = []
    for name in _UPPER:
        value, limit = abs(figures[name]), limits.get(name)
        if limit is not None and value > limit:
            over.append(f"{name} {value:.3g} > {limit:g}")
    least, agreement = limits.get("top1_agreement"), one["top1_agreement"]
    if least is not None and agreement < least:
        over.append(f"top1_agreement {agreement:.4g} < {least:g}")
    return over


class TensorError(TypedDict):
    """One tensor compared with ``W + ΔW`` in f64, equally rounded; ``relative`` to ``|ΔW|``."""

    max_abs: float
    relative: float


class ProbeRecord(TypedDict):
    """The probe text; ``sha256`` covers its token ids, document by document."""

    source: str
    documents: int
    tokens: int
    sha256: str


@dataclass(kw_only=True, slots=True)
class Certificate(StoredRecord):
    """A measured comparison, its subjects, and whether it is within the budget.

    Attributes:
        format: always ``mens_exp_parity``.
        version: version of this layout.
        evidence: ``graph`` or ``weights``.
        reference: the reference of all comparisons, in words.
        reference_nll: its mean negative log likelihood on the probe, nats; None for weights.
        probe: the probe text; None for weights.
        judged: the comparison that decides, in addition to the tensors; None if only they decide.
        comparisons: by name.
        tensors: by key of the written file, or by layer of an adapter; may be empty.
        budget: the limits; None if there are none.
        passed: whether the judged values are within the budget.
        accepted: whether it was kept although over budget, by parity.accept=true.
        sources: content hashes and names of the inputs: adapter, base, quantizer.
        files: SHA-256 of every written file except this one, by its relative path.
        unknown: missing comparison or field -> reason.
    """

    format: str = "mens_exp_parity"
    version: int = 1
    evidence: Evidence
    reference: str
    reference_nll: float | None
    probe: ProbeRecord | None
    judged: str | None
    comparisons: dict[str, Comparison]
    tensors: dict[str, TensorError]
    budget: dict[str, float | None]
    passed: bool
    accepted: bool
    sources: dict[str, Any]
    files: dict[str, str]
    unknown: dict[str, str] = field(default_factory=dict)

    @property
    def measures_something(self) -> bool:
        """Whether a written tensor, or the judged model on a token, was compared."""
        judged = None if self.judged is None else self.comparisons.get(self.judged)
        return bool(self.tensors) or (judged is not None and judged["tokens"] > 0)

    def exceeded(self, limits: Mapping[str, float | None] | None = None) -> list[str]:
        """Describe the exceeded limits, with figures.

        Args:
            limits: by name; None means its own budget.
        """
        judged = None if self.judged is None else self.comparisons[self.judged]
        if judged is None:
            over = []
        else:
            over = judged["exceeded"] if limits is None else over_limits(judged, limits)
        limit = (self.budget if limits is None else limits).get("weight_error")
        return [
            *over,
            *(
                f"{name}: relative error {one['relative']:.3g} > {limit:g}"
                for name, one in self.tensors.items()
                if limit is not None and one["relative"] > limit
            ),
        ]

    def problems(self, where: str) -> list[DataError]:
        """Return inconsistencies, such as a verdict that contradicts the figures."""
        found = []
        if self.evidence == Evidence.GRAPH and self.judged not in self.comparisons:
            place = f"{where}: judged"
            known = ", ".join(sorted(self.comparisons)) or "a comparison"
            found.append(
                DataError("was not compared", where=place, found=self.judged, expected=known)
            )
        elif self.passed == bool(exceeded := self.exceeded()):
            found.append(
                DataError(
                    "the verdict contradicts the recorded figures",
                    where=f"{where}: passed",
                    found=self.passed,
                    expected=f"{not exceeded}, as {len(exceeded)} limits are exceeded",
                )
            )
        if self.passed and self.accepted:
            found.append(
                DataError("nothing had to be accepted", where=f"{where}: accepted", found=True)
            )
        return found


class ArtifactKind(StrEnum):
    """The kind of the inspected path."""

    RUN = "run"
    ADAPTER = "adapter"
    CHECKPOINT = "checkpoint"
    MODEL = "model"
    TENSORS = "tensors"
    SCORECARD = "scorecard"
    COMPARISON = "comparison"
    DECISION = "decision"


class Link(StrEnum):
    """A link in the chain of evidence, in order; ``run`` is a run's own record."""

    BASE = "base"
    ROWS = "rows"
    ENCODED = "encoded rows"
    RUN = "run"
    CHECKPOINT = "checkpoints"
    ADAPTER = "adapter"
    MERGED = "merged"
    SCORECARD = "scorecard"
    COMPARISON = "comparison"
    DECISION = "decision"


class Role(StrEnum):
    """The role of an ancestor for its descendant."""

    BASE = "base"
    START = "starting adapter"
    RUN = "run"
    ADAPTER = "adapter"
    WRITTEN = "written"
    RECORD = "record"


class Outcome(StrEnum):
    """The result of a comparison; ``close`` means within the tolerance stated in its note."""

    EQUAL = "equal"
    CLOSE = "close"
    DIFFERS = "differs"
    NOT_HERE = "not here"


class BaseRecord(TypedDict):
    """The base model, as named in the records; ``quantizer`` has the form of adapter schema v3."""

    name: str | None
    revision: str | None
    weights_sha256: str | None
    base_quant: str | None
    double_quant: bool | None
    quantizer: dict[str, Any] | None


class LayerRecord(TypedDict):
    """One adapted layer: the ``shape`` [out, in] of its weight, and its delta ``scale · B A``.

    ``scale`` is null if it is not recorded; the norms are then those of ``B A``. For DoRA,
    ``magnitude_change`` is ``|m - m0| / |m0|`` of the row norms, where m0 are those of the weight
    at the start of training.
    """

    base_key: str | None
    shape: list[int]
    rank: int
    scale: float | None
    frobenius: float
    spectral: float
    effective_rank: float | None
    stable_rank: float | None
    magnitude_change: float | None


class CertificateRecord(TypedDict):
    """The content of a parity.json; ``worst`` is the tensor with the largest relative error."""

    verdict: str
    passed: bool
    accepted: bool
    evidence: Evidence
    comparisons: dict[str, Comparison]
    tensors: int
    worst: dict[str, TensorError]


class Ancestor(TypedDict):
    """One ancestor of the inspected artifact, oldest first; ``place`` is null if not available."""

    role: Role
    name: str
    place: str | None
    hashes: dict[str, str]
    missing: str | None


class CheckpointRecord(TypedDict):
    """A training state; ``optimizer_tensors`` is 0 if it holds no optimizer state."""

    step: int
    bytes: int
    optimizer_tensors: int
    optimizer_bytes: int
    resumable: bool
    why: str


class Check(TypedDict):
    """One recorded value, compared with the value found.

    ``step`` is set in a replay. ``link`` is the value's place in the chain of evidence, and ``of``
    the run, file or entry that records it. Both are null in a replay, and in records of version 1.
    """

    name: str
    step: int | None
    outcome: Outcome
    recorded: Any
    found: Any
    note: str | None
    link: Link | None
    of: str | None


class Verification(TypedDict):
    """Every comparison of inspect.verify.

    ``unchecked`` are the files and directories next to the records whose hash no record states,
    such as pages rendered from the records.
    """

    checks: list[Check]
    unchecked: list[str]


class Replay(TypedDict):
    """The first steps of a run, repeated; ``conditions`` are those that differed."""

    steps: int
    identical_through: int
    conditions: list[str]
    first_difference: str | None
    checks: list[Check]


def _inspection_of_1(value: dict[str, Any]) -> dict[str, Any]:
    """Migrate a record of version 1 to version 2; its checks had no link in the chain."""
    try:
        for part in (value.get("verification"), value.get("replay")):
            for check in () if part is None else part["checks"]:
                check.update(link=None, of=None)
    except (AttributeError, KeyError, TypeError):  # reported by the check of keys and types
        pass
    return value


def _inspection_of_2(value: dict[str, Any]) -> dict[str, Any]:
    """Migrate a record of version 2 to version 3; it did not name unchecked files."""
    verification = value.get("verification")
    if isinstance(verification, dict):
        verification.setdefault("unchecked", [])
    return value


@dataclass(kw_only=True, slots=True)
class Inspection(StoredRecord):
    """The findings of an inspection.

    Attributes:
        format: always ``mens_exp_inspection``.
        version: version of this layout.
        kind: kind of the inspected path.
        path: the inspected path.
        what: the kind in words.
        form: format of its adapter, ``v3``, ``v2`` or ``peft``; None without an adapter.
        variant: method of its adapter, such as ``lora``; None without an adapter.
        base: the base model; None if no record names it.
        parameters: number of parameters of the adapter.
        layers: adapted layers, by logical name.
        checkpoint: the training state, if it is one.
        certificate: the certificate of a merge or an export.
        lineage: ancestors, oldest first.
        verification: result of inspect.verify.
        replay: result of inspect.replay.
        unknown: null field or missing figure -> reason.
    """

    MIGRATIONS: ClassVar[dict[int, Any]] = {1: _inspection_of_1, 2: _inspection_of_2}

    format: str = "mens_exp_inspection"
    version: int = 3
    kind: ArtifactKind
    path: str
    what: str
    form: str | None = None
    variant: str | None = None
    base: BaseRecord | None = None
    parameters: int | None = None
    layers: dict[str, LayerRecord] = field(default_factory=dict)
    checkpoint: CheckpointRecord | None = None
    certificate: CertificateRecord | None = None
    lineage: list[Ancestor] = field(default_factory=list)
    verification: Verification | None = None
    replay: Replay | None = None
    unknown: dict[str, str] = field(default_factory=dict)

    def problems(self, where: str) -> list[DataError]:
        """Return the comparisons whose outcome contradicts their values."""
        named: list[tuple[str, list[Check]]] = []
        if self.verification is not None:
            named.append(("verification", self.verification["checks"]))
        if self.replay is not None:
            named.append(("replay", self.replay["checks"]))
        return [
            DataError(
                "the outcome contradicts the recorded values",
                where=f"{where}: {name}.checks[{number}].outcome",
                found=str(check["outcome"]),
                expected=f"{check['recorded']!r} and {check['found']!r}",
            )
            for name, checks in named
            for number, check in enumerate(checks)
            if check["outcome"] != Outcome.NOT_HERE
            and (check["outcome"] == Outcome.EQUAL) != (check["recorded"] == check["found"])
        ]
