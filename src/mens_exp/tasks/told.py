"""Facts from the records next to an output: its base, and a summary of its certificate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.inspection import BaseRecord, CertificateRecord
from mens_exp.artifacts.manifest import Manifest
from mens_exp.report.parity_view import verdict
from mens_exp.tasks.lineage import base_of_run

if TYPE_CHECKING:
    from mens_exp.artifacts.certificate import Certificate
    from mens_exp.tasks.inspected import Inspected

__all__ = ["named_base", "shortened"]


def named_base(
    found: Inspected, own: BaseRecord | None, certificate: Certificate | None
) -> BaseRecord | None:
    """Name the base of something, or nothing where no record does.

    Args:
        found: it.
        own: what the adapter itself says, which goes before the others.
        certificate: beside it.
    """
    others: BaseRecord | None = None
    if found.run is not None:
        others = base_of_run(Manifest.read(found.run.manifest))
    elif certificate is not None:
        others = _of_sources(certificate.sources)
    if own is None or others is None:
        return own or others
    told = {name: value for name, value in own.items() if value is not None}
    return BaseRecord(**{**others, **told})  # type: ignore[typeddict-item]


def _of_sources(sources: dict[str, Any]) -> BaseRecord | None:
    quant = sources.get("quant") or {}
    told = BaseRecord(
        name=sources.get("base_model"),
        revision=None,
        weights_sha256=sources.get("base_weights_sha256"),
        base_quant=quant.get("base_quant"),
        double_quant=quant.get("double_quant"),
        quantizer=sources.get("quantizer"),
    )
    return told if any(value is not None for value in told.values()) else None


def shortened(certificate: Certificate) -> CertificateRecord:
    """Return a certificate without its files, and of its tensors the worst."""
    worst = sorted(certificate.tensors.items(), key=lambda item: -item[1]["relative"])[:1]
    return CertificateRecord(
        verdict=verdict(certificate),
        passed=certificate.passed,
        accepted=certificate.accepted,
        evidence=certificate.evidence,
        comparisons=certificate.comparisons,
        tensors=len(certificate.tensors),
        worst=dict(worst),
    )
