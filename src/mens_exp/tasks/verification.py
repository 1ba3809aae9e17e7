"""inspect.verify: recompute the hashes and figures of the chain of evidence from local files."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.certificate import ArtifactKind, Certificate, Link, Outcome, Verification
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.decision_ledger import read_ledger
from mens_exp.artifacts.digest import (
    CERTIFICATE,
    checkpoint_digests,
    digest,
    sha256_bytes,
    sha256_file,
)
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.telemetry import read_events
from mens_exp.errors import MensError, Problems
from mens_exp.export.bundle import verify as verify_bundle
from mens_exp.export.certificate import certificate_place, hashes_of
from mens_exp.export.subject import config_of
from mens_exp.planning.preflight import writable_cache
from mens_exp.tasks.adapter_anatomy import read_state
from mens_exp.tasks.as_written import (
    ABSENT,
    hash_of,
    identity_checks,
    manifest_checks,
    output_checks,
    output_of_check,
    telemetry_checks,
    unchecked_files,
)
from mens_exp.tasks.checks import (
    InputChecks,
    base_place,
    certificate_checks,
    compared,
    linked,
    not_here,
)
from mens_exp.tasks.lineage import (
    MERGED,
    run_without_manifest,
    source_run,
    writer_of,
    written_by,
    written_hashes,
)
from mens_exp.tasks.promote import decision_checks
from mens_exp.tasks.promotion_evidence import comparison_problems
from mens_exp.tasks.resolve_references import scored_run
from mens_exp.tasks.study_runs import read_study

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mens_exp.artifacts.certificate import Check
    from mens_exp.artifacts.decision_ledger import LedgerEntry
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.lineage import Inspected

_NO_ENTRY = "no such entry"
_RUN = RunDir(Path())
_OUTPUTS = {  # by file or folder of a run; all others belong to the run's record
    _RUN.adapter.name: Link.ADAPTER,
    **dict.fromkeys((_RUN.scorecard.name, _RUN.events.name, _RUN.samples.name), Link.SCORECARD),
    **dict.fromkeys(
        (_RUN.comparison.name, _RUN.comparison_page.name, _RUN.comparison_table.name),
        Link.COMPARISON,
    ),
}


def verification(
    config: RunConfig, found: Inspected, certificate: Certificate | None
) -> Verification:
    """Recompute everything that the records of an object state, back to its base models.

    Args:
        config: the command's configuration.
        found: the inspected object.
        certificate: the certificate of an output; None if there is none.

    Raises:
        DataError: a record cannot be read at all.
    """
    chain = _Chain()
    if found.kind is ArtifactKind.DECISION:
        checks = chain.decisions(found.path)
    elif found.kind is ArtifactKind.COMPARISON:
        checks = chain.comparison(RunDir(found.path).comparison)
    elif found.kind is ArtifactKind.SCORECARD:
        checks = chain.evaluation(RunDir(found.path))
    elif found.run is not None:
        checks = chain.run(found.run)
    elif certificate is None:
        checks = chain.uncertified(found.path)
    else:
        checks = chain.written(found.path, certificate, config, found)
    return Verification(checks=list(checks), unchecked=chain.unchecked)


class _Chain:
    """A walk from an object back to its bases; every run, file and base is checked once."""

    def __init__(self) -> None:
        self._inputs = InputChecks()
        self._seen: set[Path] = set()
        self.unchecked: list[str] = []

    def decisions(self, path: Path) -> Iterator[Check]:
        """Check a ledger and replay its decisions, or only the one that a run added.

        Args:
            path: path of a ledger or a task=promote run.
        """
        ledger, wanted = path, None
        if path.is_dir():
            run = RunDir(path)
            manifest, config = Manifest.read(run.manifest), config_of(run)
            yield from self._record(run, manifest)
            ledger = Path(str(config.ledger)).expanduser()
            wanted = manifest.results["entry_sha256"]
        yield from linked(Link.DECISION, str(ledger), self._entries(ledger, wanted))

    def _entries(self, ledger: Path, wanted: str | None) -> Iterator[Check]:
        whole = "every entry with the digest of the one before"
        try:
            entries = read_ledger(ledger)
        except MensError as error:
            yield compared("ledger", whole, str(error))
            return
        yield compared("ledger", whole, whole if entries else ABSENT)
        if wanted is not None:
            found = next((one["sha256"] for one in entries if one["sha256"] == wanted), _NO_ENTRY)
            yield compared("results.entry_sha256", wanted, found)
        for number, entry in enumerate(entries):
            made = entry["decision"]
            if made is None or wanted not in {None, entry["sha256"]}:
                continue
            files = {Path(one["path"]): one["sha256"] for one in made["evidence"]}
            for file, sha256 in files.items():
                yield compared(f"entry {entry['number']}: {file}", sha256, hash_of(file))
            if all(file.is_file() for file in files):
                yield from _decided_again(entries, number)
                for file in files:
                    yield from self.comparison(file)

    def comparison(self, file: Path) -> Iterator[Check]:
        """Check a comparison, recompute it from its runs, and check those."""
        run = RunDir(file.parent)
        if self._is_known(file):
            return
        if run.manifest.is_file():
            yield from self._record(run, Manifest.read(run.manifest))
        else:  # a copy in the directory of compare.out
            pages = (run.comparison_page, run.comparison_table)
            self.unchecked += [str(page) for page in pages if page.is_file()]
        try:
            record = Comparison.read(file)
        except MensError as error:
            check = compared(file.name, "a comparison that can be read", str(error))
            yield from linked(Link.COMPARISON, str(file), [check])
            return
        yield from linked(Link.COMPARISON, str(file), _compared_again(record))
        for one in record.runs:
            places = (one["path"], one["scored_by"])
            for place in (RunDir(Path(text)) for text in places if text is not None):
                if not place.manifest.is_file():
                    check = not_here("manifest.json", None, "the run is not on this machine")
                    yield from linked(Link.RUN, str(place.path), [check])
                elif Manifest.read(place.manifest).task == "evaluate":
                    yield from self.evaluation(place)
                else:
                    yield from self.run(place)

    def evaluation(self, run: RunDir) -> Iterator[Check]:
        """Check a scorecard, recompute it from its answers, and check the scored model."""
        if self._is_known(run.path):
            return
        manifest = Manifest.read(run.manifest)
        yield from self._record(run, manifest)
        model = Path(str(manifest.inputs.get("subject")))
        certificate = certificate_place(model)
        if MERGED in manifest.inputs and certificate.is_file():
            yield from self.written(model, Certificate.read(certificate))
        elif MERGED in manifest.inputs and model.exists():
            yield from self.uncertified(model)
        scored = scored_run(manifest)
        if scored is not None:
            yield from self.run(scored)
        elif manifest.inputs.get("subject") not in {None, "base"}:
            check = not_here("subject", str(model), "the run that was scored is not here")
            yield from linked(Link.RUN, str(run.path), [check])

    def run(self, run: RunDir) -> Iterator[Check]:
        """Check everything of a training run."""
        if self._is_known(run.path):
            return
        manifest = Manifest.read(run.manifest)
        yield from self._inputs.of(run, manifest)
        yield from self._record(run, manifest)
        yield from linked(Link.CHECKPOINT, str(run.path), _states(run, manifest))
        yield from linked(Link.ADAPTER, str(run.path), _of_adapter(run, manifest))

    def uncertified(self, path: Path) -> Iterator[Check]:
        """Check an object without a readable certificate against the run that wrote it."""
        run = run_without_manifest(path)
        if run is not None:
            checks = [compared("manifest.json", "the record of the run", ABSENT)]
            yield from linked(Link.RUN, str(run.path), checks)
            return
        writer = writer_of(path)
        if writer is None:
            yield not_here("files", None, "no record next to it states a hash")
            return
        manifest = Manifest.read(writer.manifest)
        found = {**hashes_of(path), CERTIFICATE: hash_of(certificate_place(path))}
        copy = {name: one for name, one in manifest.outputs.items() if name == CERTIFICATE}
        checks = [
            compared(f"files.{name or path.name}", sha256, found.get(name, ABSENT))
            for name, sha256 in sorted({**copy, **written_hashes(manifest)}.items())
        ]
        yield from linked(Link.MERGED, path.resolve().name, checks)

    def written(
        self,
        path: Path,
        certificate: Certificate,
        config: RunConfig | None = None,
        found: Inspected | None = None,
    ) -> Iterator[Check]:
        """Check an output against its certificate, and the certificate against its sources.

        Args:
            path: path of the output.
            certificate: its certificate.
            config: configuration of the command that measures its figures again; None measures
                none.
            found: the output as inspected object, if it is the inspected one.
        """
        if self._is_known(path):
            return
        of = path.resolve().name
        writer, whole = written_by(certificate, path), hashes_of(path)
        yield from linked(Link.MERGED, of, _files(path, certificate, writer, whole))
        yield from self._sources(path, certificate)
        if config is not None and found is not None:
            hold = whole == certificate.files
            figures = certificate_checks(config, found, certificate, writer, files_hold=hold)
            yield from linked(Link.MERGED, of, figures)

    def _sources(self, path: Path, certificate: Certificate) -> Iterator[Check]:
        """Hash the sources that a certificate records, and check the training run."""
        sources, of = certificate.sources, path.resolve().name
        name, recorded = "sources.adapter_sha256", sources.get("adapter_sha256")
        run = source_run(certificate, path)
        if run is None:
            check = not_here(name, recorded, "the run that has this adapter was not found")
            yield from linked(Link.ADAPTER, of, [check])
            return
        outputs = Manifest.read(run.manifest).outputs
        file = next(one for one, sha256 in outputs.items() if sha256 == recorded)
        yield from linked(Link.ADAPTER, of, [compared(name, recorded, hash_of(run.path / file))])
        name, weights = "sources.base_weights_sha256", sources.get("base_weights_sha256")
        place, why = base_place(config_of(run), writable_cache())
        if weights is not None:
            check = (
                not_here(name, weights, why)
                if place is None
                else compared(name, weights, self._inputs.base_weights(place))
            )
            yield from linked(Link.BASE, of, [check])
        yield from self.run(run)

    def _record(self, run: RunDir, manifest: Manifest) -> Iterator[Check]:
        """Check the files of a run, and the consistency of its records."""
        of, differs = str(run.path), False
        self.unchecked += unchecked_files(run, manifest)
        for check in output_checks(run, manifest):
            differs = differs or check["outcome"] == Outcome.DIFFERS
            yield from linked(_link_of(str(output_of_check(check))), of, [check])
        yield from linked(Link.RUN, of, _bundle(run))
        yield from linked(Link.RUN, of, identity_checks(run, manifest))
        if run.telemetry.is_file():
            events = read_events(run.telemetry)
            yield from linked(Link.RUN, of, telemetry_checks(events, manifest))
        yield from linked(Link.RUN, of, manifest_checks(run, manifest))
        if run.scorecard.is_file() and manifest.status is Status.SUCCEEDED and not differs:
            yield from linked(Link.SCORECARD, of, [_summed_again(run)])

    def _is_known(self, path: Path) -> bool:
        place = path.resolve()
        known = place in self._seen
        self._seen.add(place)
        return known


def _link_of(output: str) -> Link:
    """Return the evidence link of a run's file, by its relative path."""
    return _OUTPUTS.get(PurePosixPath(output).parts[0], Link.RUN)


def _summed_again(run: RunDir) -> Check:
    """Recompute a scorecard from its lines and answers, as task=compare does."""
    whole = "as its lines and answers sum to"
    try:
        read_study([str(run.path)])
    except MensError as error:
        return compared("scorecard", whole, str(error))
    return compared("scorecard", whole, whole)


def _compared_again(record: Comparison) -> Iterator[Check]:
    whole = "as computed again from its runs"
    problems, _ = comparison_problems(record)
    for problem in problems or [whole]:
        yield compared("comparison", whole, problem)


def _decided_again(entries: list[LedgerEntry], number: int) -> Iterator[Check]:
    name = f"entry {entries[number]['number']}"
    try:
        checks, why = decision_checks(entries, number)
    except MensError as error:
        yield compared(name, "evidence that can be read", str(error))
        return
    yield from checks
    if why:
        yield not_here(name, None, why)


def _files(
    path: Path, certificate: Certificate, writer: RunDir | None, whole: dict[str, str]
) -> Iterator[Check]:
    """Hash the files of an output, and the records of the run that wrote it."""
    for name in sorted(certificate.files.keys() | whole.keys()):
        recorded = certificate.files.get(name, "not in the certificate")
        yield compared(f"files.{name or path.name}", recorded, whole.get(name, ABSENT))
    if writer is not None:
        manifest = Manifest.read(writer.manifest)
        for name in (writer.config.name, writer.parity.name):  # the others depend on these
            what = f"{manifest.task} {manifest.run_id}: {name}"
            yield compared(what, manifest.outputs.get(name), hash_of(writer.path / name))


def _states(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Compare every checkpoint with the digest recorded when it was written."""
    last = manifest.results.get("checkpoint")
    if last is not None and not (run.path / last).exists():
        recorded = next(reversed(checkpoint_digests(run.path / last)), None)
        yield not_here(last, recorded, "the file is no longer there")
    for path in run.states():
        name, expected, found = (
            f"checkpoints/{path.name}",
            checkpoint_digests(path),
            sha256_file(path),
        )
        if not expected:
            yield not_here(name, None, "no digest of it is recorded in checkpoints/sha256.json")
        else:
            yield compared(name, found if found in expected else expected[-1], found)


def _bundle(run: RunDir) -> Iterator[Check]:
    """Compare an unpacked bundle, including its manifest, with its list."""
    try:
        verify_bundle(run)
    except Problems as several:
        for problem in several.problems:
            yield compared(f"bundle: {problem.where}", problem.expected, str(problem.found))
    except MensError as problem:
        yield compared(f"bundle: {problem.where}", problem.expected, str(problem.found))


def _of_adapter(run: RunDir, manifest: Manifest) -> Iterator[Check]:
    """Compare the adapter with the manifest and with the checkpoint that it was written from."""
    if not run.adapter.is_dir():
        return
    try:
        header, tensors = read_adapter(run.adapter)
    except MensError as error:  # its hash check reports the same
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
