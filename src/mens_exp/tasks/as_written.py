"""Decide whether a run is as it was written: its files, its manifest, and what both repeat.

A manifest has the hashes of the run's outputs, and the last event of the telemetry has a digest of
the manifest. task=inspect checks everything; task=compare and task=promote check the parts that a
comparison reads.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.certificate import Outcome
from mens_exp.artifacts.digest import digest, manifest_digest, sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.record import parse_json, read_bytes
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import last_end
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.compose import stored_digest
from mens_exp.errors import DataError, MensError
from mens_exp.planning.contract import recorded_digest
from mens_exp.tasks.checks import compared, not_here

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from mens_exp.artifacts.certificate import Check
    from mens_exp.artifacts.telemetry import Event

ABSENT = "no such file"
_OUTPUT = "outputs."
_MANIFEST = "manifest.json, all but its notes"
_STATED_BY = {"seed": "config.yaml", "contract.exec.seed": "its contract"}


def hash_of(path: Path) -> str:
    """Return the SHA-256 of a file, or that it does not exist."""
    return sha256_file(path) if path.is_file() else ABSENT


def output_checks(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Hash every output of a run again."""
    for name, recorded in manifest.outputs.items():
        yield compared(f"{_OUTPUT}{name}", recorded, hash_of(run.path / name))


def output_of_check(check: Check) -> str | None:
    """Return the relative path of the output that a check hashes; None for other checks."""
    name = check["name"]
    return name.removeprefix(_OUTPUT) if name.startswith(_OUTPUT) else None


def unchecked_files(run: RunDir, manifest: Manifest) -> list[str]:
    """Return the files and directories of a run of which no record states a hash."""
    if run.bundle.is_file() or not run.path.is_dir():  # its list has every file
        return []
    outputs = [PurePosixPath(name) for name in manifest.outputs]
    hashed = {run.manifest.name, run.checkpoints.name, run.lock.name}
    hashed |= {name.parts[0] for name in outputs}
    parts = {name.parts[0] for name in outputs if len(name.parts) > 1}
    found = [path for path in run.path.iterdir() if path.name not in hashed]
    inside = (path for part in sorted(parts) for path in (run.path / part).rglob("*"))
    found += [
        path
        for path in inside
        if path.is_file() and path.relative_to(run.path).as_posix() not in manifest.outputs
    ]
    return [f"{path}/" if path.is_dir() else str(path) for path in sorted(found)]


def identity_checks(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Compare the manifest with its configuration, and check its internal consistency."""
    yield compared("config_digest", manifest.config_digest, stored_digest(run.config))
    yield from _seed_checks(run, manifest)
    if manifest.contract is not None:
        yield _contract_check(manifest.contract)
    layers = manifest.facts.get("lora_init_layers_sha256")
    if layers is not None:
        recorded = manifest.facts.get("lora_init_sha256")
        yield compared("facts.lora_init_sha256", recorded, digest(layers))


def _seed_checks(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Compare the manifest's seed with the configuration and the contract."""
    if run.config.is_file():
        stored = parse_yaml(read_bytes(run.config), str(run.config))
        if isinstance(stored, dict) and "seed" in stored:
            yield compared("seed", manifest.seed, stored["seed"])
    execution = (manifest.contract or {}).get("exec") or {}
    if "seed" in execution:
        yield compared("contract.exec.seed", manifest.seed, execution["seed"])


def _contract_check(contract: Mapping[str, Any]) -> Check:
    return compared("contract.digest", contract.get("digest"), recorded_digest(contract))


def manifest_checks(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Compare the values of a closed manifest with the digest in the event that closed it.

    Releases before that digest wrote none; their manifests cannot be checked in this way.
    """
    if manifest.status is Status.STARTED:
        return
    try:
        recorded = last_end(run.telemetry).get("manifest_sha256")
    except MensError as error:
        yield compared(run.telemetry.name, "events that can be read", str(error))
        return
    found = manifest_digest(parse_json(read_bytes(run.manifest), str(run.manifest)))
    if recorded is None:
        yield not_here(_MANIFEST, None, f"{run.telemetry.name} has no digest of it")
    else:
        yield compared(_MANIFEST, recorded, found)


def telemetry_checks(events: Sequence[Event], manifest: Manifest) -> Iterator[Check]:
    """Compare single values of the manifest with the telemetry."""
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


def not_as_written(run: RunDir, scorer: RunDir | None) -> Iterator[Check]:
    """Yield the checks of what a comparison reads that are not equal.

    Args:
        run: the training run.
        scorer: the evaluation that provides the scorecard; None means the run itself.

    Yields:
        A check that differs if a file, the seed, the contract or the manifest does; one without a
        recorded hash for a file that the run did not record; and one that is not here for a
        manifest without a digest. `of` is the run's directory.
    """
    files = [run.config, run.telemetry, run.validation, run.scorecard]
    if scorer is None:
        yield from differences(run, [*files, run.events])
        return
    yield from differences(run, files)  # its own scorecard tells whether it was scored again
    yield from differences(
        scorer, [scorer.config, scorer.telemetry, scorer.scorecard, scorer.events]
    )


def differences(run: RunDir, files: Iterable[Path]) -> Iterator[Check]:
    """Yield the checks of a run's manifest and of some of its files that are not equal.

    The values are those of `not_as_written`.

    Args:
        run: the run.
        files: files in its directory; one that is neither recorded nor there is skipped.
    """
    manifest = Manifest.read(run.manifest)
    checks = [*_file_checks(files, manifest), *_seed_checks(run, manifest)]
    if manifest.task == "train":
        checks.append(_contract_check(manifest.contract or {}))
    checks += manifest_checks(run, manifest)
    unlike = (check for check in checks if check["outcome"] != Outcome.EQUAL)
    for check in unlike:
        yield {**check, "of": str(run.path)}


def _file_checks(files: Iterable[Path], manifest: Manifest) -> Iterator[Check]:
    for file in files:
        recorded = manifest.outputs.get(file.name)
        if recorded is not None or file.is_file():
            yield compared(f"{_OUTPUT}{file.name}", recorded, hash_of(file))


def place_of(check: Check) -> str:
    """Return the file, or the value of a manifest, that a check of `not_as_written` is about."""
    run, output = RunDir(Path(str(check["of"]))), output_of_check(check)
    if output is not None:
        return str(run.path / output)
    return f"{run.manifest}: seed" if check["name"] in _STATED_BY else str(run.manifest)


def refusal_of(check: Check) -> DataError:
    """Return the error for a check of `not_as_written` that differs."""
    where, remedy = place_of(check), "restore the file, or run it again; records are never edited"
    if check["name"] in _STATED_BY:
        return DataError(
            "contradicts the run's other records",
            where=where,
            found=check["recorded"],
            expected=f"{check['found']}, as {_STATED_BY[check['name']]} has it",
            remedy=remedy,
        )
    is_digested = check["name"] == _MANIFEST
    by = "the last event of its telemetry" if is_digested else "the run's manifest"
    is_gone = check["found"] == ABSENT
    return DataError(
        "is missing" if is_gone else "has changed since its run wrote it",
        where=where,
        found=check["found"],
        expected=f"{check['recorded']}, as {by} has it",
        remedy=remedy,
    )
