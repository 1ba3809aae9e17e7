"""parity.json: how far a merged or exported model is from the model that was trained."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

from mens_exp.artifacts.record import StoredRecord
from mens_exp.errors import DataError

__all__ = ["Certificate", "Comparison", "Evidence", "ProbeRecord", "TensorError", "WorstLayer"]


class Evidence(StrEnum):
    """The compared values: next-token distributions, or tensors where no model can run."""

    GRAPH = "graph"
    WEIGHTS = "weights"


class WorstLayer(TypedDict):
    """The layer whose hidden states differ most; ``|h − h_ref| / |h_ref|``, Frobenius."""

    layer: str
    relative_error: float


class Comparison(TypedDict):
    """One graph against the reference, on every token of the probe; see LogitDifference.

    ``exceeded`` names the limits of the budget that it is over.
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


class TensorError(TypedDict):
    """One tensor against ``W + ΔW`` in f64, rounded alike; ``relative`` is a share of ``|ΔW|``."""

    max_abs: float
    relative: float


class ProbeRecord(TypedDict):
    """The text that was compared on; ``sha256`` is over its ids, document by document."""

    source: str
    documents: int
    tokens: int
    sha256: str


@dataclass(kw_only=True, slots=True)
class Certificate(StoredRecord):
    """A measured comparison, its subjects, and whether it is within the budget.

    Attributes:
        format: always ``mens_exp_parity``.
        version: of this layout.
        evidence: ``graph`` or ``weights``.
        reference: what everything was compared with, in words.
        reference_nll: its mean negative log likelihood on the probe, nats; None for weights.
        probe: the text; None for weights.
        judged: the comparison that decides, beside the tensors; None where they alone do.
        comparisons: by name.
        tensors: by key of the written file, or by layer of an adapter; empty where there are none.
        budget: the limits, None where there is none.
        passed: whether what is judged is within the budget.
        accepted: whether it was kept in spite of that, by parity.accept=true.
        sources: content hashes and names of what went in: adapter, base, quantizer.
        files: SHA-256 of every written file by its relative path, this one left out.
        unknown: comparison or field that is absent -> why.
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

    def exceeded(self) -> list[str]:
        """Name what is over the budget, with figures."""
        judged = [] if self.judged is None else self.comparisons[self.judged]["exceeded"]
        limit = self.budget.get("weight_error")
        return [
            *judged,
            *(
                f"{name}: relative error {one['relative']:.3g} > {limit:g}"
                for name, one in self.tensors.items()
                if limit is not None and one["relative"] > limit
            ),
        ]

    def problems(self, where: str) -> list[DataError]:
        """Return what no certificate can say: a verdict that its own figures deny."""
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
                    "the verdict is not that of its own figures",
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
