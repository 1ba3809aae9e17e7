"""verify=true: every hash and figure that the records state, computed again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.checkpoint_digests import digests_of
from mens_exp.artifacts.digest import digest, sha256_bytes, sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.telemetry import read_events
from mens_exp.config.compose import config_digest, from_yaml
from mens_exp.errors import MensError, Problems
from mens_exp.export.bundle import verify as verify_bundle
from mens_exp.export.verdict import hashes_of
from mens_exp.layout.cached import hash_weights
from mens_exp.plan.contract import recorded_digest
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.checking import compared, not_here
from mens_exp.tasks.checkpoint_anatomy import read_state
from mens_exp.tasks.input_checks import base_place, input_checks
from mens_exp.tasks.lineage import trained_by, written_by
from mens_exp.tasks.recertifying import certificate_checks
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mens_exp.artifacts.certificate import Certificate
    from mens_exp.artifacts.inspection import Check
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.inspected import Inspected

__all__ = ["verification"]

_ABSENT = "no such file"


def verification(
    config: RunConfig, found: Inspected, certificate: Certificate | None
) -> list[Check]:
    """Compute again whatever the records of something state.

    Args:
        config: of the command.
        found: what is inspected.
        certificate: of something written; None where there is none.

    Raises:
        DataError: a record cannot be read at all.
    """
    if found.run is not None:
        return list(_of_run(found.run))
    if certificate is None:
        why = "no record beside it states a hash"
        return [not_here("files", None, why)]
    return list(_of_written(config, found, certificate))


def _of_run(run: RunDir) -> Iterator[Check]:
    manifest = Manifest.read(run.manifest)
    yield from _outputs(run, manifest)
    yield from _bundle(run)
    yield from _identity(run, manifest)
    if run.telemetry.is_file():
        yield from _told(run, manifest)
    yield from _states(run)
    yield from _of_adapter(run, manifest)
    yield from input_checks(run, manifest)


def _outputs(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    for name, recorded in manifest.outputs.items():
        yield compared(f"outputs.{name}", recorded, _hash(run.path / name))


def _states(run: RunDir) -> Iterator[Check]:
    """Compare every training state with the digest that it was written with."""
    for path in run.states():
        name, expected, found = f"checkpoints/{path.name}", digests_of(path), sha256_file(path)
        if not expected:
            yield not_here(name, None, "an earlier version, which recorded no digest, wrote it")
        else:
            yield compared(name, found if found in expected else expected[-1], found)


def _hash(path: Path) -> str:
    return sha256_file(path) if path.is_file() else _ABSENT


def _bundle(run: RunDir) -> Iterator[Check]:
    """Hold an unpacked bundle, manifest included, against its list."""
    try:
        verify_bundle(run)
    except Problems as several:
        for problem in several.problems:
            yield compared(f"bundle: {problem.where}", problem.expected, str(problem.found))
    except MensError as problem:
        yield compared(f"bundle: {problem.where}", problem.expected, str(problem.found))


def _identity(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Hold the manifest against the configuration that it is of, and against itself."""
    config = config_of(run)
    yield compared("config_digest", manifest.config_digest, config_digest(from_yaml(run.config)))
    yield compared("seed", manifest.seed, config.seed)
    if manifest.contract is not None:
        recorded = manifest.contract["digest"]
        yield compared("contract.digest", recorded, recorded_digest(manifest.contract))
    layers = manifest.facts.get("lora_init_layers_sha256")
    if layers is not None:
        recorded = manifest.facts.get("lora_init_sha256")
        yield compared("facts.lora_init_sha256", recorded, digest(layers))


def _told(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Hold the manifest against what telemetry said as it happened."""
    events = read_events(run.telemetry)
    latest: dict[str, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    for event in events:
        latest[event["event"]] = event["payload"]
        if event["event"] == "facts":
            facts |= event["payload"]
    started, ended = latest.get("run_started", {}), latest.get("run_finished", {})
    for name in ("run_id", "task"):
        if name in started:
            yield compared(name, getattr(manifest, name), started[name])
    if "status" in ended:
        yield compared("status", manifest.status.value, ended["status"])
    for name, value in ended.get("results", {}).items():
        yield compared(f"results.{name}", manifest.results.get(name), value)
    for name, value in facts.items():
        if name in manifest.facts:
            yield compared(f"facts.{name}", manifest.facts[name], value)
    chain = latest.get("step", {}).get("batches_sha256")
    if chain is not None and "batches_sha256" in manifest.results:
        name = "results.batches_sha256, by the last step"
        yield compared(name, manifest.results["batches_sha256"], chain)


def _of_adapter(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Hold the adapter against the manifest, and against the state that it was written from."""
    if not run.adapter.is_dir():
        return
    try:
        header, tensors = read_adapter(run.adapter)
    except MensError as error:  # its hash differs too, and says so
        yield compared("adapter", "a whole adapter of schema v3", str(error))
        return
    ours = header.mens_exp or {}
    weights = manifest.inputs.get("base_weights_sha256")
    if "base_weights_sha256" in ours:
        yield compared("adapter: base_weights_sha256", ours["base_weights_sha256"], weights)
    step = manifest.results.get("adapter_step")
    path = None if step is None else run.checkpoint(int(step))
    if path is None or not path.is_file() or (ours.get("init") or {}).get("doubled_rank"):
        return
    try:
        state = read_state(path).adapter
    except MensError as error:
        yield compared(path.name, "a whole training state", str(error))
        return
    saved = {name: _bytes_hash(state[name].float().numpy()) for name in tensors if name in state}
    now = {name: _bytes_hash(tensors[name]) for name in saved}
    check = compared(f"{path.name}: adapter", digest(saved), digest(now))
    check["note"] = next((f"first in {name}" for name in saved if saved[name] != now[name]), None)
    yield check


def _bytes_hash(values: Any) -> str:
    array = np.ascontiguousarray(values, dtype=np.float32)
    return sha256_bytes(repr(array.shape).encode() + array.tobytes())


def _of_written(config: RunConfig, found: Inspected, certificate: Certificate) -> Iterator[Check]:
    """Hold something written against its certificate, and that against what it was made of."""
    whole = hashes_of(found.path)
    for name in sorted(certificate.files.keys() | whole.keys()):
        recorded = certificate.files.get(name, "not in the certificate")
        yield compared(f"files.{name or found.path.name}", recorded, whole.get(name, _ABSENT))
    writer = written_by(certificate, found.path)
    if writer is not None:
        manifest = Manifest.read(writer.manifest)
        for name in (writer.config.name, writer.parity.name):  # what the rest leans on
            what = f"{manifest.task} {manifest.run_id}: {name}"
            yield compared(what, manifest.outputs.get(name), _hash(writer.path / name))
    yield from _sources(found, certificate)
    files_hold = whole == certificate.files
    yield from certificate_checks(config, found, certificate, writer, files_hold=files_hold)


def _sources(found: Inspected, certificate: Certificate) -> Iterator[Check]:
    """Hash what a certificate says it was made of, where the run that trained it is at hand."""
    sources = certificate.sources
    name, recorded = "sources.adapter_sha256", sources.get("adapter_sha256")
    run = trained_by(recorded, found.path)
    if run is None:
        yield not_here(name, recorded, "the run that has this adapter is not at hand")
        return
    outputs = Manifest.read(run.manifest).outputs
    file = next(path for path, sha256 in outputs.items() if sha256 == recorded)
    yield compared(name, recorded, _hash(run.path / file))
    weights = sources.get("base_weights_sha256")
    place, why = base_place(config_of(run), writable_cache())
    if weights is not None and place is not None:
        yield compared("sources.base_weights_sha256", weights, hash_weights(place))
    elif weights is not None:
        yield not_here("sources.base_weights_sha256", weights, why)
