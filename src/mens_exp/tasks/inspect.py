"""task=inspect: say what something is and what it came from, and hold it against its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from mens_exp.artifacts.certificate import Certificate
from mens_exp.artifacts.inspection import (
    BaseRecord,
    CertificateRecord,
    Inspection,
    Kind,
    Verification,
)
from mens_exp.artifacts.manifest import Manifest
from mens_exp.errors import MensError
from mens_exp.report.inspection_view import (
    inspection_view,
    replay_verdict,
    verification_verdict,
)
from mens_exp.report.parity_view import verdict
from mens_exp.tasks import adapter_anatomy, checkpoint_anatomy
from mens_exp.tasks.checking import compared, refuse_differences
from mens_exp.tasks.inspected import Inspected, inspected
from mens_exp.tasks.lineage import base_of_run, lineage
from mens_exp.tasks.replaying import replay
from mens_exp.tasks.row_lengths import tell_magnitudes
from mens_exp.tasks.verifying import verification

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from mens_exp.artifacts.inspection import Check
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["inspect"]

T = TypeVar("T")


def inspect(config: RunConfig, run: Run) -> None:
    """Describe what `path` names, and write what was found before anything is judged."""
    assert config.path is not None, "validation has asked for it"
    found = inspected(config.path)
    record = Inspection(kind=found.kind, path=str(found.path), what=found.what)
    run.manifest.inputs.update(subject=str(found.path), subject_kind=found.kind.value)
    damage: list[Check] = []
    certificate = _tried(config, damage, "certificate", lambda: _certificate(found))
    _tried(config, damage, "layers", lambda: _anatomy(config, record, found))
    record.unknown |= dict.fromkeys((one["name"] for one in damage), "it cannot be read")
    _base(record, found, certificate)
    if certificate is not None:
        record.certificate = _told(certificate, found)
    record.lineage = lineage(found, record.base, certificate)
    if config.verify:
        checks = [*damage, *verification(config, found, certificate)]
        record.verification = Verification(checks=checks)
    if config.replay:
        assert found.run is not None, "the command was refused otherwise"
        record.replay = replay(found.run, config.inspect.replay_steps)
    record.write(run.dir.inspection)
    run.manifest.results.update(layers=len(record.layers), parameters=record.parameters)
    if record.parameters is None:
        run.unknown("results.parameters", record.unknown["layers"])
    console = Console()
    console.print(inspection_view(record))
    console.print(f"Record: {run.dir.inspection}", soft_wrap=True)
    _judge(record, run)


def _judge(record: Inspection, run: Run) -> None:
    """Let what differs decide how the task ends, once everything is on record.

    Raises:
        GateError: something does.
    """
    checks: list[Check] = []
    if record.verification is not None:
        checks += record.verification["checks"]
        run.manifest.results.update(verified=verification_verdict(checks))
    if record.replay is not None:
        checks += record.replay["checks"]
        run.manifest.results.update(replayed=replay_verdict(record.replay))
    remedy = f"read {run.dir.inspection}: it has every value, and what of this machine is other"
    refuse_differences("is not what its records say", record.path, checks, remedy)


def _tried(config: RunConfig, damage: list[Check], name: str, read: Callable[[], T]) -> T | None:
    """Read something; under verify=true, what cannot be read is one more thing that differs.

    Raises:
        MensError: it cannot be read, and nothing is to be verified.
    """
    try:
        return read()
    except MensError as error:
        if not config.verify:
            raise
        damage.append(compared(name, "something that can be read", str(error)))
        return None


def _certificate(found: Inspected) -> Certificate | None:
    path = found.certificate
    return Certificate.read(path) if path is not None and path.is_file() else None


def _anatomy(config: RunConfig, record: Inspection, found: Inspected) -> None:
    """Fill in the layers, of a training state or of an adapter."""
    if found.kind is Kind.CHECKPOINT:
        record.checkpoint, anatomy = checkpoint_anatomy.anatomy_of(found.path, found.run)
    elif found.adapter is not None:
        record.form = found.adapter.form
        anatomy = adapter_anatomy.of_adapter(found.adapter)
        tell_magnitudes(anatomy, found.adapter, config)
    else:
        unfinished = "the run has no adapter: it has not ended, or it trained every weight"
        merged = "what was merged is no adapter any more"
        record.unknown["layers"] = unfinished if found.kind is Kind.RUN else merged
        return
    record.layers, record.parameters = anatomy.layers, anatomy.parameters
    record.variant, record.base = anatomy.variant, anatomy.base
    record.unknown |= anatomy.unknown


def _base(record: Inspection, found: Inspected, certificate: Certificate | None) -> None:
    """Name the base: by the run's manifest, else the adapter itself, else the certificate."""
    own = record.base
    if found.run is not None:
        record.base = base_of_run(Manifest.read(found.run.manifest))
        if own is not None:
            told = {name: value for name, value in own.items() if value is not None}
            record.base = BaseRecord(**{**record.base, **told})  # type: ignore[typeddict-item]
            record.unknown.pop("base.base_quant", None)
    elif certificate is not None and (own is None or own["weights_sha256"] is None):
        record.base = _base_of(certificate.sources, own)
    if record.base is None:
        record.unknown["base"] = "no record beside it names one"


def _base_of(sources: dict[str, Any], own: BaseRecord | None) -> BaseRecord | None:
    """Return the base that a certificate names, as far as the adapter does not tell."""
    quant = sources.get("quant") or {}
    told = BaseRecord(
        name=sources.get("base_model"),
        revision=None,
        weights_sha256=sources.get("base_weights_sha256"),
        base_quant=quant.get("base_quant"),
        double_quant=quant.get("double_quant"),
        quantizer=sources.get("quantizer"),
    )
    if own is not None:
        known = {name: value for name, value in own.items() if value is not None}
        told = BaseRecord(**{**told, **known})  # type: ignore[typeddict-item]
    return told if any(value is not None for value in told.values()) else None


def _told(certificate: Certificate, found: Inspected) -> CertificateRecord:
    place: Path | None = found.certificate
    assert place is not None, "it was read from there"
    worst = sorted(certificate.tensors.items(), key=lambda item: -item[1]["relative"])[:1]
    return CertificateRecord(
        file=place.name,
        verdict=verdict(certificate),
        passed=certificate.passed,
        accepted=certificate.accepted,
        evidence=certificate.evidence,
        comparisons=certificate.comparisons,
        tensors=len(certificate.tensors),
        worst=dict(worst),
    )
