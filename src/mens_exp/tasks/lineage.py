"""Ancestors of an output, oldest first, as far as the records at hand reach."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.decision_ledger import read_ledger
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.inspection import Ancestor, BaseRecord, Kind, Role
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir, runs
from mens_exp.errors import RequestError
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from mens_exp.artifacts.certificate import Certificate
    from mens_exp.tasks.inspected import Inspected

__all__ = ["base_of_run", "lineage", "trained_by", "written_by"]

_OUTPUTS = Path("outputs")
_RECORDS = {Kind.SCORECARD, Kind.COMPARISON, Kind.DECISION}


def lineage(
    found: Inspected, base: BaseRecord | None, certificate: Certificate | None
) -> list[Ancestor]:
    """List the ancestors of what was found, itself last.

    Args:
        found: it.
        base: its base model, as its own records name that.
        certificate: of something written.
    """
    if found.kind in _RECORDS:
        return _of_record(found)
    if found.run is not None:
        return _of_run(found.run, frozenset())
    if certificate is None:
        return [_base(base), _unnamed(found)]
    sources = certificate.sources
    run = trained_by(sources.get("adapter_sha256"), found.path)
    line = _of_run(run, frozenset()) if run is not None else [_base(base), _absent(sources, found)]
    files = {name or found.path.name: one for name, one in certificate.files.items()}
    return [*line, _ancestor(Role.WRITTEN, found.path.resolve().name, found.path, files)]


def _of_record(found: Inspected) -> list[Ancestor]:
    """List what a scorecard, a comparison or a ledger was made of, itself last."""
    if found.kind is Kind.SCORECARD:
        line = [] if found.run is None else _of_run(found.run, frozenset())
        file = RunDir(found.path).scorecard
    elif found.kind is Kind.COMPARISON:
        file = RunDir(found.path).comparison
        line = [
            _recorded(Role.RUN, Path(one["path"]), one["manifest_sha256"])
            for one in Comparison.read(file).runs
        ]
    else:
        file = found.path
        if file.is_dir():  # of a run that added a decision
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
    """Describe something that names nothing but its base."""
    if found.adapter is None:
        missing = "there is no certificate beside it that names what it was made of"
        return _ancestor(Role.WRITTEN, found.path.resolve().name, found.path, {}, missing)
    hashes = {"adapter_sha256": sha256_file(found.adapter.tensors)}
    run = trained_by(hashes["adapter_sha256"], found.path)
    if run is not None:
        return _ancestor(Role.ADAPTER, f"of run {run.path.resolve().name}", found.path, hashes)
    why = "no run at hand says that it wrote this adapter"
    return _ancestor(Role.ADAPTER, found.path.resolve().name, found.path, hashes, why)


def _absent(sources: Mapping[str, Any], found: Inspected) -> Ancestor:
    return _ancestor(
        Role.RUN if "run" in sources else Role.ADAPTER,
        str(sources.get("run", "unknown")),
        None,
        {name: str(sources[name]) for name in ("adapter_sha256",) if name in sources},
        f"no run below {_OUTPUTS} or beside {found.path} has an adapter of this hash",
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
    """Return a run's base model, as its manifest has it."""
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
        adapter_sha256: of the file; None finds nothing.
        near: what was inspected; runs beside it are looked at, and all below ``outputs``.
    """
    for run, manifest in _at_hand(near):
        if manifest.task == "train" and adapter_sha256 in manifest.outputs.values():
            return run
    return None


def written_by(certificate: Certificate, near: Path) -> RunDir | None:
    """Return the run of task=merge or task=export that wrote what a certificate is of.

    Args:
        certificate: of it; its files are matched with what the run recorded.
        near: where it lies.
    """
    hashes = set(certificate.files.values())
    found = []
    for run, manifest in _at_hand(near):
        results = manifest.results
        whole = {*(results.get("out_sha256") or {}).values()} | {results.get("tensors_sha256")}
        is_merge = manifest.task == "merge" and hashes <= whole
        if is_merge or (manifest.task == "export" and hashes & whole):
            out = str(results.get("out") or results.get("adapter"))
            places = {(run.path / out).resolve(), Path(out).expanduser().resolve()}
            found.append((near.resolve() not in places, run))
    # The same may have been written twice, and certified on other texts.
    return min(found, key=lambda one: one[0])[1] if found else None


def _at_hand(near: Path) -> Iterator[tuple[RunDir, Manifest]]:
    beside = near.absolute().parent
    try:
        places = [beside, beside.parent, *sorted(beside.iterdir())]
    except OSError:  # somebody else's folder, which may not be listed
        places = []
    seen = set()
    for run in (*map(RunDir, places), *runs(_OUTPUTS)):
        if run.path.resolve() in seen or not os.access(run.manifest, os.R_OK):
            continue
        seen.add(run.path.resolve())
        try:
            yield run, Manifest.read(run.manifest)
        except RequestError:  # damaged, or of a newer version: it hides no other run
            continue


def _of_run(run: RunDir, seen: frozenset[Path]) -> list[Ancestor]:
    """List a run's ancestors and the run; ``seen`` are the runs that came from it."""
    manifest = Manifest.read(run.manifest)
    start = manifest.inputs.get("init_from")
    line = [_base(base_of_run(manifest))] if start is None else _of_start(start, run, seen)
    hashes = {"config_digest": manifest.config_digest}
    tensors = manifest.outputs.get(f"{run.adapter.name}/{TENSORS_NAME}")
    if tensors is not None:
        hashes["adapter_sha256"] = tensors
    return [*line, _ancestor(Role.RUN, manifest.run_id, run.path, hashes)]


def _of_start(start: Mapping[str, Any], run: RunDir, seen: frozenset[Path]) -> list[Ancestor]:
    """List the adapter that a run began with, and what that came from."""
    sha256, recorded = str(start["adapter_sha256"]), Path(str(start["path"]))
    owner = trained_by(sha256, run.path)
    missing = None
    if owner is not None and owner.path.resolve() not in seen:
        line = _of_run(owner, seen | {run.path.resolve()})
    else:
        missing = f"no run below {_OUTPUTS} or beside {run.path} has an adapter of this hash"
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
