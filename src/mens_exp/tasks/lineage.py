"""Trace an output to its ancestors, oldest first, as far as the available records reach.

The module also finds the run behind merged weights that are scored, and summarises the provenance
of an output.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME
from mens_exp.artifacts.certificate import (
    Ancestor,
    ArtifactKind,
    BaseRecord,
    CertificateRecord,
    Role,
)
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.decision_ledger import read_ledger
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir, runs
from mens_exp.config.backend import LoraGraphConfig
from mens_exp.config.lora import plain_lora
from mens_exp.config.model import HfModel
from mens_exp.config.quant import unquantized
from mens_exp.errors import RequestError
from mens_exp.export.certificate import certificate_place, hashes_of
from mens_exp.export.subject import config_of
from mens_exp.report.evidence_views import verdict

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.artifacts.certificate import Certificate
    from mens_exp.config.root import RunConfig
    from mens_exp.export.adapter import AdapterPlace
    from mens_exp.model.sources import BaseModel

_OUTPUTS = Path("outputs")
_ABOVE = 3  # directories from a PEFT view up to its run
_WRITERS = {"merge", "export"}
_RECORDS = {ArtifactKind.SCORECARD, ArtifactKind.COMPARISON, ArtifactKind.DECISION}
_WITHOUT_CERTIFICATE = {
    ArtifactKind.CHECKPOINT,
    ArtifactKind.SCORECARD,
    ArtifactKind.COMPARISON,
    ArtifactKind.DECISION,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """An inspected object on disk.

    Attributes:
        kind: kind of the object.
        path: a directory, or a file with a checkpoint, merged tensors or decisions.
        run: the training run that it is or belongs to; for a scorecard, the scored run.
        adapter: the adapter that it is, or that the run has.
        what: description of the object.
    """

    kind: ArtifactKind
    path: Path
    run: RunDir | None
    adapter: AdapterPlace | None
    what: str

    @property
    def certificate(self) -> Path | None:
        """Path of the certificate of an output; None for a run's own files."""
        if self.run is not None or self.kind in _WITHOUT_CERTIFICATE:
            return None
        return certificate_place(self.path)


def lineage(
    found: Inspected, base: BaseRecord | None, certificate: Certificate | None
) -> list[Ancestor]:
    """List the ancestors of an inspected object, with the object itself last.

    Args:
        found: the object.
        base: its base model, as named in its records.
        certificate: the certificate of an output.
    """
    if found.kind in _RECORDS:
        return _of_record(found)
    if found.run is not None:
        return _of_run(found.run, frozenset())
    if certificate is None:
        return [_base(base), _unnamed(found)]
    sources = certificate.sources
    run = source_run(certificate, found.path)
    line = _of_run(run, frozenset()) if run is not None else [_base(base), _absent(sources, found)]
    files = {name or found.path.name: one for name, one in certificate.files.items()}
    return [*line, _ancestor(Role.WRITTEN, found.path.resolve().name, found.path, files)]


def _of_record(found: Inspected) -> list[Ancestor]:
    """List the sources of a scorecard, a comparison or a ledger, with itself last."""
    if found.kind is ArtifactKind.SCORECARD:
        line = [] if found.run is None else _of_run(found.run, frozenset())
        file = RunDir(found.path).scorecard
    elif found.kind is ArtifactKind.COMPARISON:
        file = RunDir(found.path).comparison
        line = [
            _recorded(Role.RUN, Path(one["path"]), one["manifest_sha256"])
            for one in Comparison.read(file).runs
        ]
    else:
        file = found.path
        if file.is_dir():  # a run that added a decision
            file = Path(str(config_of(RunDir(file)).ledger)).expanduser()
        decisions = [entry["decision"] for entry in read_ledger(file)]
        evidence = [one for made in decisions if made is not None for one in made["evidence"]]
        files = {one["path"]: one["sha256"] for one in evidence}
        line = [_recorded(Role.RECORD, Path(path), sha) for path, sha in files.items()]
    return [*line, _recorded(Role.RECORD, file, sha256_file(file) if file.is_file() else None)]


def _recorded(role: Role, place: Path, sha256: str | None) -> Ancestor:
    hashes = {} if sha256 is None else {"sha256": sha256}
    missing = None if place.exists() else "it is not on this machine"
    return _ancestor(role, place.name, place if place.exists() else None, hashes, missing)


def _unnamed(found: Inspected) -> Ancestor:
    """Describe an object whose records name no ancestor except its base."""
    if found.adapter is None:
        missing = "no certificate next to it names its inputs"
        return _ancestor(Role.WRITTEN, found.path.resolve().name, found.path, {}, missing)
    hashes = {"adapter_sha256": sha256_file(found.adapter.tensors)}
    run = trained_by(hashes["adapter_sha256"], found.path)
    if run is not None:
        return _ancestor(Role.ADAPTER, f"of run {run.path.resolve().name}", found.path, hashes)
    why = "no run found that wrote this adapter"
    return _ancestor(Role.ADAPTER, found.path.resolve().name, found.path, hashes, why)


def _absent(sources: Mapping[str, Any], found: Inspected) -> Ancestor:
    return _ancestor(
        Role.RUN if "run" in sources else Role.ADAPTER,
        str(sources.get("run", "unknown")),
        None,
        {name: str(sources[name]) for name in ("adapter_sha256",) if name in sources},
        f"no run below {_OUTPUTS} or next to {found.path} has an adapter of this hash",
    )


def _ancestor(
    role: Role,
    name: str,
    place: Path | None,
    hashes: Mapping[str, str],
    missing: str | None = None,
) -> Ancestor:
    return Ancestor(
        role=role,
        name=name,
        place=None if place is None else str(place),
        hashes=dict(hashes),
        missing=missing,
    )


def base_of_run(manifest: Manifest) -> BaseRecord:
    """Return a run's base model from its manifest."""
    inputs, facts = manifest.inputs, manifest.facts
    quant = facts.get("quant")
    return BaseRecord(
        name=inputs.get("base_model"),
        revision=inputs.get("base_revision"),
        weights_sha256=inputs.get("base_weights_sha256"),
        base_quant=None if quant is None else str(quant),
        double_quant=facts.get("double_quant"),
        quantizer=None,
    )


def trained_by(adapter_sha256: str | None, near: Path) -> RunDir | None:
    """Return the training run that wrote a file of tensors.

    Args:
        adapter_sha256: hash of the file; None finds nothing.
        near: the inspected path; runs next to it and all runs below ``outputs`` are searched.
    """
    for run, manifest in _at_hand(near):
        if manifest.task == "train" and adapter_sha256 in manifest.outputs.values():
            return run
    return None


def source_run(certificate: Certificate, near: Path) -> RunDir | None:
    """Return the training run whose adapter an output was made of.

    Args:
        certificate: the output's certificate.
        near: location of the output. If no run near it has the adapter, the path from which the
            merge or export read the adapter is searched too.
    """
    sha256 = certificate.sources.get("adapter_sha256")
    at_hand, writer = trained_by(sha256, near), written_by(certificate, near)
    if at_hand is not None or writer is None:
        return at_hand
    inputs = Manifest.read(writer.manifest).inputs
    place = Path(str(inputs.get("adapter") or inputs.get("subject")))
    above = (RunDir(one) for one in (place, *place.parents)[:_ABOVE])
    owners = (run for run in above if run.manifest.is_file())
    return next((r for r in owners if sha256 in Manifest.read(r.manifest).outputs.values()), None)


def written_by(certificate: Certificate, near: Path) -> RunDir | None:
    """Return the task=merge or task=export run that wrote the output of a certificate.

    Args:
        certificate: the certificate; its files are matched with the run's records.
        near: location of the output.
    """
    # The same output may have been written twice, and certified on different texts.
    found = [
        (not _wrote_at(near, run, manifest), run)
        for run, manifest in _at_hand(near)
        if _wrote(set(certificate.files.values()), manifest)
    ]
    return min(found, key=lambda one: one[0])[1] if found else None


def writer_of(place: Path) -> RunDir | None:
    """Return the merge or export that wrote an output without a certificate; None if not found.

    Args:
        place: location of the output, which may have been moved or edited since, but not both.
    """
    hashes = set(hashes_of(place).values())
    found = [
        (len(hashes & {*written_hashes(manifest).values()}), manifest.started_utc, run)
        for run, manifest in _at_hand(place)
        if _wrote_at(place, run, manifest) or _wrote_model(hashes, manifest)
    ]
    return max(found, key=lambda one: one[:2])[2] if found else None


def written_hashes(manifest: Manifest) -> dict[str, str]:
    """Return the recorded hashes of a merge's or an export's output, by path in the output.

    The path of a single file is empty. An export to another form of adapter has none.
    """
    merged: dict[str, str] = manifest.results.get("out_sha256") or {}
    exported: dict[str, str] = manifest.results.get("files_sha256") or {}
    return {name.partition("/")[2]: sha256 for name, sha256 in merged.items()} or exported


def _wrote(hashes: set[str], manifest: Manifest) -> bool:
    """Return whether a run wrote all of some files, or the adapter's tensors among them."""
    is_adapter = manifest.task == "export" and manifest.results.get("tensors_sha256") in hashes
    return is_adapter or _wrote_model(hashes, manifest)


def _wrote_model(hashes: set[str], manifest: Manifest) -> bool:
    whole = {*written_hashes(manifest).values()}
    return manifest.task in _WRITERS and bool(hashes) and hashes <= whole


def _wrote_at(place: Path, run: RunDir, manifest: Manifest) -> bool:
    out = output_of(manifest) if manifest.task in _WRITERS else None
    places = () if out is None else (run.path / out, Path(out).expanduser())
    return place.resolve() in {one.resolve() for one in places}


def run_without_manifest(place: Path) -> RunDir | None:
    """Return the run that a path is, or is inside of, if only its manifest is missing."""
    for directory in (place, *place.absolute().parents[:_ABOVE]):
        run = RunDir(directory)
        if run.manifest.is_file():
            return None
        if run.config.is_file() and run.telemetry.is_file():
            return run
    return None


def output_of(manifest: Manifest) -> str | None:
    """Return the path at which a merge or an export put its output, as it recorded it."""
    names = ("out", "adapter", "directory")
    return next((str(out) for name in names if (out := manifest.results.get(name))), None)


def _at_hand(near: Path) -> Iterator[tuple[RunDir, Manifest]]:
    beside = near.absolute().parent
    try:
        places = [beside, beside.parent, *sorted(beside.iterdir())]
    except OSError:  # a folder without read permission
        places = []
    seen = set()
    for run in (*map(RunDir, places), *runs(_OUTPUTS)):
        if run.path.resolve() in seen or not os.access(run.manifest, os.R_OK):
            continue
        seen.add(run.path.resolve())
        try:
            yield run, Manifest.read(run.manifest)
        except RequestError:  # skip damaged or newer records
            continue


def _of_run(run: RunDir, seen: frozenset[Path]) -> list[Ancestor]:
    """List a run's ancestors and the run; ``seen`` are the runs descended from it."""
    manifest = Manifest.read(run.manifest)
    start = manifest.inputs.get("init_from")
    line = [_base(base_of_run(manifest))] if start is None else _of_start(start, run, seen)
    hashes = {"config_digest": manifest.config_digest}
    tensors = manifest.outputs.get(f"{run.adapter.name}/{TENSORS_NAME}")
    if tensors is not None:
        hashes["adapter_sha256"] = tensors
    return [*line, _ancestor(Role.RUN, manifest.run_id, run.path, hashes)]


def _of_start(start: Mapping[str, Any], run: RunDir, seen: frozenset[Path]) -> list[Ancestor]:
    """List the adapter that a run started from, and its ancestors."""
    sha256, recorded = str(start["adapter_sha256"]), Path(str(start["path"]))
    owner = trained_by(sha256, run.path)
    missing = None
    if owner is not None and owner.path.resolve() not in seen:
        line = _of_run(owner, seen | {run.path.resolve()})
    else:
        missing = f"no run below {_OUTPUTS} or next to {run.path} has an adapter of this hash"
        line = [_base(_only_weights(start.get("base_weights_sha256")))]
    place = recorded if recorded.is_dir() else None
    if place is None and owner is not None:
        place = owner.adapter
    here = _ancestor(Role.START, recorded.name, place, {"adapter_sha256": sha256}, missing)
    return [*line, here]


def _only_weights(sha256: str | None) -> BaseRecord:
    return BaseRecord(
        name=None,
        revision=None,
        weights_sha256=sha256,
        base_quant=None,
        double_quant=None,
        quantizer=None,
    )


def _base(base: BaseRecord | None) -> Ancestor:
    name = None if base is None else base["name"]
    sha256 = None if base is None else base["weights_sha256"]
    revision = None if base is None else base["revision"]
    return _ancestor(
        Role.BASE,
        (name or "unknown") + (f" @ {revision}" if revision else ""),
        None,
        {} if sha256 is None else {"weights_sha256": sha256},
        None if name and sha256 else "no record names both it and its hash",
    )


MERGED = "trained"  # in an evaluation's inputs: the run whose merged weights were scored


def merge_at(place: Path) -> RunDir | None:
    """Return the task=merge run that a path names, directly or through its model."""
    for directory in (place, place.parent):
        run = RunDir(directory)
        if run.manifest.is_file():
            return run if Manifest.read(run.manifest).task == "merge" else None
    return None


def merged_model(merge: RunDir) -> Path:
    """Return the model that a merge wrote.

    Raises:
        RequestError: it did not succeed, wrote no complete model, or the model is gone.
    """
    manifest = Manifest.read(merge.manifest)
    out = Path(str(manifest.results.get("out"))).expanduser()  # in the run, or elsewhere
    places = (merge.path / out, out)
    model = next((one for one in places if (one / "config.json").is_file()), None)
    if manifest.status is not Status.SUCCEEDED or model is None:
        raise RequestError(
            "the merge did not leave a usable model",
            where="path",
            found=f"{merge.path} ({manifest.status})",
            expected="a merge that has succeeded, of a whole model, which is still there",
            remedy="merge it again without base_shard, or evaluate the run that was trained",
        )
    return model


def trained_for(merge: RunDir) -> RunDir:
    """Return the training run of a merged adapter.

    Raises:
        RequestError: it is not available, or its model is not a causal model.
    """
    inputs = Manifest.read(merge.manifest).inputs
    adapter = Path(str(inputs.get("adapter")))
    beside = next((one for one in map(RunDir, adapter.parents) if one.manifest.is_file()), None)
    run = beside or trained_by(inputs.get("adapter_sha256"), merge.path)
    if run is None or Manifest.read(run.manifest).task != "train":
        raise RequestError(
            "the run that trained the merged adapter was not found",
            where="path",
            found=f"{merge.path}, of {adapter}",
            expected="that run, where it was or below outputs",
            remedy="restore it, or score only the weights: path=base model=hf model.id=<model>",
        )
    backend = config_of(run).backend
    if not backend.spec.adapts_transformers:
        raise RequestError(
            "only a whole causal model answers once it is merged",
            where="path",
            found=f"{merge.path}, of backend={backend.name}",
            expected="a merge of backend=qlora or lora",
            remedy=f"evaluate the run itself: path={run.path}",
        )
    return run


def config_of_merged(trained: RunDir, model: Path) -> RunConfig:
    """Return a run's configuration with the merged weights, as stored, as its base.

    The model gets a fresh adapter, which adds nothing.
    """
    config = config_of(trained)
    config.model = HfModel(id=str(model))
    config.backend = LoraGraphConfig(_target_="mens_exp.backends.lora.LoraBackend")
    config.quant = unquantized(config.quant.compute_dtype)
    config.lora = plain_lora(config.lora.targets)
    return config


def other_weights(merge: RunDir, base: BaseModel) -> None:
    """Refuse weights that differ from those that the merge wrote.

    Raises:
        RequestError: they differ.
    """
    files: dict[str, str] = Manifest.read(merge.manifest).results.get("out_sha256") or {}
    shards = {Path(name).name: one for name, one in files.items() if name.endswith(".safetensors")}
    if digest(shards) != base.weights_sha256:
        raise RequestError(
            "differs from the merged weights",
            where="path",
            found=str(base.directory),
            expected=f"the weights that {merge.path} wrote",
            remedy="merge it again",
        )


def named_base(
    found: Inspected, own: BaseRecord | None, certificate: Certificate | None
) -> BaseRecord | None:
    """Return the base of an object, or None if no record names it.

    Args:
        found: the object.
        own: the adapter's own record, which takes precedence.
        certificate: the certificate next to it.
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
    """Return a certificate without its files, and with only its worst tensors."""
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
