"""task=inspect: say what something is and what it came from, and hold it against its records."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from rich.console import Console

from mens_exp.artifacts.certificate import Certificate
from mens_exp.artifacts.inspection import (
    Inspection,
    Kind,
    Verification,
)
from mens_exp.errors import MensError
from mens_exp.report.inspection_view import (
    inspection_view,
    replay_verdict,
    verification_verdict,
)
from mens_exp.tasks import adapter_anatomy, checkpoint_anatomy
from mens_exp.tasks.checking import compared, refuse_differences
from mens_exp.tasks.inspected import Inspected, inspected
from mens_exp.tasks.lineage import lineage
from mens_exp.tasks.replaying import replay
from mens_exp.tasks.row_lengths import tell_magnitudes
from mens_exp.tasks.told import named_base, shortened
from mens_exp.tasks.verifying import verification

if TYPE_CHECKING:
    from collections.abc import Callable

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
    record.base = named_base(found, record.base, certificate)
    if record.base is None:
        is_record = found.kind in {Kind.COMPARISON, Kind.DECISION}
        why = "each of its runs names its own" if is_record else "no record beside it names one"
        record.unknown["base"] = why
    if record.base is not None and record.base["base_quant"] is not None:
        record.unknown.pop("base.base_quant", None)
    if certificate is not None:
        record.certificate = shortened(certificate)
    line = _tried(config, damage, "lineage", lambda: lineage(found, record.base, certificate))
    record.lineage = line or []
    record.unknown |= dict.fromkeys((one["name"] for one in damage), "it cannot be read")
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
    console.print(f"Record: {run.dir.inspection}", soft_wrap=True, markup=False)
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
        why = {Kind.RUN: unfinished, Kind.MODEL: merged, Kind.TENSORS: merged}
        record.unknown["layers"] = why.get(found.kind, f"a {found.kind} has none")
        return
    record.layers, record.parameters = anatomy.layers, anatomy.parameters
    record.variant, record.base = anatomy.variant, anatomy.base
    record.unknown |= anatomy.unknown
