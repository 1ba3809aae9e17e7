"""The certificate of something written, measured again and held against the one beside it."""

from __future__ import annotations

import copy
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts import provenance
from mens_exp.artifacts.certificate import Certificate, Evidence
from mens_exp.artifacts.inspection import Check, Kind, Outcome
from mens_exp.artifacts.manifest import Manifest
from mens_exp.config.merge import MergeBase, MergeConfig, MergeMode
from mens_exp.config.parity import BudgetConfig, ParityConfig
from mens_exp.config.task import ExportFormat, OllamaForm
from mens_exp.errors import MensError
from mens_exp.tasks.checking import compared, not_here
from mens_exp.tasks.lineage import trained_by
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.inspected import Inspected

__all__ = ["MACHINE", "certificate_checks", "other_conditions"]

# What of the provenance decides which bits a sum ends in.
MACHINE = ("packages", "python", "cpu", "environment")
_RELATIVE, _ABSOLUTE = 0.01, 1e-5  # between machines (unverified guess)


def certificate_checks(
    config: RunConfig,
    found: Inspected,
    certificate: Certificate,
    writer: RunDir | None,
    *,
    files_hold: bool,
) -> Iterator[Check]:
    """Yield each figure of a certificate beside the same, measured again.

    Args:
        config: of the command.
        found: what was written.
        certificate: beside it.
        writer: the run that wrote it; None where it is not at hand.
        files_hold: whether the files are those that the certificate is of.
    """
    if not files_hold:
        yield not_here("certificate", None, "the files are not those that it is of")
        return
    own = None if writer is None else _copy_of(writer)
    if own is not None:
        yield from _figure_checks(certificate, own, "certificate of its run: ", tolerance=None)
    asked, why = _asked(config, found, certificate, writer)
    if asked is None:
        yield not_here("certificate", None, why)
        return
    try:
        again = _measured(asked, found)
    except (MensError, OSError) as error:
        yield not_here("certificate", None, f"it cannot be measured here: {error}")
        return
    yield from _figure_checks(certificate, again, "certificate: ", tolerance=_tolerance(writer))


def _copy_of(writer: RunDir) -> Certificate | None:
    return Certificate.read(writer.parity) if writer.parity.is_file() else None


def _asked(
    config: RunConfig, found: Inspected, certificate: Certificate, writer: RunDir | None
) -> tuple[RunConfig | None, str]:
    """Return the command that would write the same again, or why there is none."""
    adapter = _adapter(certificate, found)
    if writer is not None:
        asked = config_of(writer)
        asked.trainer.accelerator = config.trainer.accelerator
        if adapter is not None:
            asked.path = str(adapter)
        elif asked.path is not None and not Path(asked.path).expanduser().exists():
            return None, f"{asked.path}, which it was made of, is no longer there"
        return asked, ""
    if adapter is None:
        return None, "neither the run that wrote it nor the one that trained it is at hand"
    return _like(config, found, certificate, adapter)


def _adapter(certificate: Certificate, found: Inspected) -> Path | None:
    """Return the directory of the adapter that it was made of, where its run is at hand."""
    sha256 = certificate.sources.get("adapter_sha256")
    run = trained_by(sha256, found.path)
    if run is None:
        return None
    outputs = Manifest.read(run.manifest).outputs
    return (run.path / next(name for name, one in outputs.items() if one == sha256)).parent


def _like(
    config: RunConfig, found: Inspected, certificate: Certificate, adapter: Path
) -> tuple[RunConfig | None, str]:
    """Return a command that would have written it, as far as the certificate tells."""
    probe, accept = certificate.probe, certificate.accepted
    if probe is not None and probe["source"].startswith("text:"):
        return None, f"its {probe['source']} is not named by a path"
    asked = copy.deepcopy(config)
    asked.path = str(adapter)
    limits = {one.name: certificate.budget.get(one.name) for one in fields(BudgetConfig)}
    tokens = asked.parity.tokens if probe is None else probe["tokens"]
    asked.parity = ParityConfig(tokens=tokens, text=None, accept=accept)
    asked.parity.budget = BudgetConfig(**limits)
    if found.adapter is not None:
        asked.task.name, asked.format = "export", ExportFormat[found.adapter.form]
        return asked, ""
    asked.task.name = "merge"
    published = certificate.sources.get("quantizer") is None
    asked.merge = MergeConfig(
        mode=MergeMode.subset if found.kind is Kind.TENSORS else MergeMode.full,
        base=MergeBase.original if published and certificate.evidence is Evidence.WEIGHTS else None,
        untie=certificate.sources.get("merge_untie", True),
    )
    return asked, ""


def _measured(asked: RunConfig, found: Inspected) -> Certificate:
    """Measure again what a command wrote; nothing is written but scratch files beside it."""
    if asked.task.name == "export" and asked.format is ExportFormat.gguf:
        return _of_gguf(asked, found.path)
    if asked.task.name == "export" and _is_an_adapter(asked):
        from mens_exp.tasks.conversion import conversion_of
        from mens_exp.tasks.export_certificate import certify_adapter

        return certify_adapter(asked, conversion_of(asked), found.path)
    from mens_exp.tasks.merging import decided_merge

    return decided_merge(asked).certificate(asked, found.path)


def _is_an_adapter(asked: RunConfig) -> bool:
    of_ollama = asked.format is ExportFormat.ollama and asked.ollama.form is OllamaForm.adapter
    return of_ollama or asked.format not in {ExportFormat.hf, ExportFormat.ollama}


def _of_gguf(asked: RunConfig, directory: Path) -> Certificate:
    from mens_exp.tasks.certifying import certify_gguf, certify_gguf_of
    from mens_exp.tasks.merge_certificate import trained_for
    from mens_exp.tasks.merging import decided_merge

    assert asked.path is not None, "it was made of something"
    if (Path(asked.path) / "config.json").is_file():
        return certify_gguf_of(asked, Path(asked.path), directory)
    merging = decided_merge(asked)
    trained = trained_for(asked, merging.inputs, merging.choices)
    return certify_gguf(trained, directory, asked.parity, what="GGUF")


def _tolerance(writer: RunDir | None) -> str | None:
    """Say why figures may differ a little; None where they may not."""
    if writer is None:
        return "written on a machine that nothing names"
    others = other_conditions(Manifest.read(writer.manifest))
    return f"written under other conditions: {', '.join(others)}" if others else None


def other_conditions(manifest: Manifest) -> list[str]:
    """Name what of a run's machine and libraries is not as it is here."""
    here = provenance.collect(Path.cwd())
    return [name for name in MACHINE if manifest.provenance.get(name) != here[name]]


def _figure_checks(
    certificate: Certificate, again: Certificate, prefix: str, *, tolerance: str | None
) -> Iterator[Check]:
    before, after = dict(_figures(certificate)), dict(_figures(again))
    for name, recorded in before.items():
        if name in after:
            yield _figure(f"{prefix}{name}", recorded, after[name], tolerance)
        else:
            why = next((why for what, why in again.unknown.items() if what in name), "not measured")
            yield not_here(f"{prefix}{name}", recorded, why)
    for name in after.keys() - before.keys():
        yield compared(f"{prefix}{name}", "not in the certificate", after[name])


def _figure(name: str, recorded: Any, found: Any, tolerance: str | None) -> Check:
    check = compared(name, recorded, found)
    are_numbers = type(recorded) is float and type(found) is float
    if tolerance is None or not are_numbers or check["outcome"] == Outcome.EQUAL:
        return check
    if abs(recorded - found) <= _ABSOLUTE + _RELATIVE * abs(recorded):
        check["outcome"] = Outcome.CLOSE
    check["note"] = f"within {_RELATIVE:.0%} or {_ABSOLUTE:g} counts as close: {tolerance}"
    return check


def _figures(certificate: Certificate) -> Iterator[tuple[str, Any]]:
    """Yield every value and limit by its dotted name; what is told in words is left out."""
    yield "evidence", str(certificate.evidence)
    for name, limit in certificate.budget.items():
        yield f"budget.{name}", limit
    yield "passed", certificate.passed
    if certificate.reference_nll is not None:
        yield "reference_nll", certificate.reference_nll
    if certificate.probe is not None:
        yield "probe.tokens", certificate.probe["tokens"]
        yield "probe.sha256", certificate.probe["sha256"]
    for name, one in certificate.comparisons.items():
        for figure in ("mean_kl", "p99_kl", "max_kl", "top1_agreement", "nll_difference"):
            yield f"{name}.{figure}", dict(one)[figure]
        yield f"{name}.worst_layer", one["worst_layer"]["layer"]
        yield f"{name}.worst_layer.relative_error", one["worst_layer"]["relative_error"]
    for name, error in certificate.tensors.items():
        yield f"{name}.max_abs", error["max_abs"]
        yield f"{name}.relative", error["relative"]
