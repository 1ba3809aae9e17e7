"""The kind of thing at the path of task=inspect."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mens_exp.artifacts.decision_ledger import is_ledger
from mens_exp.artifacts.inspection import Kind
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.errors import ConfigError, RequestError
from mens_exp.export.adapter import AdapterPlace, find
from mens_exp.export.verdict import certificate_place
from mens_exp.tasks.evaluated_merge import MERGED
from mens_exp.tasks.subject import config_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.errors import MensError

__all__ = ["Inspected", "inspected", "problems", "scored_run"]

_WRITERS = ("merge", "export")
_WITHOUT_CERTIFICATE = {Kind.CHECKPOINT, Kind.SCORECARD, Kind.COMPARISON, Kind.DECISION}


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspected:
    """Something on disk.

    Attributes:
        kind: of it.
        path: a directory, or a file of a checkpoint, of merged tensors or of decisions.
        run: the training run that it is, or lies in; of a scorecard, the run that was scored.
        adapter: that it is, or that the run has.
        what: it is, in words.
    """

    kind: Kind
    path: Path
    run: RunDir | None
    adapter: AdapterPlace | None
    what: str

    @property
    def certificate(self) -> Path | None:
        """The place for the certificate of an output; None for a run's own files."""
        if self.run is not None or self.kind in _WITHOUT_CERTIFICATE:
            return None
        return certificate_place(self.path)


def inspected(text: str) -> Inspected:
    """Tell what ``path`` names.

    Args:
        text: ``latest``, a run, an adapter directory of any form, a checkpoint, what a merge or
            an export wrote, the run that wrote it, an evaluation, a comparison, a decision, or
            a ledger of decisions.

    Raises:
        RequestError: nothing is there, or nothing that can be inspected.
        DataError: a record there is damaged.
    """
    path = resolve(text, task="train").path if text == "latest" else Path(text).expanduser()
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise _nothing(path, "no such file or directory")
    run = RunDir(path)
    if run.manifest.is_file():
        return _run(run)
    if run.comparison.is_file():
        what = "a comparison"
        return Inspected(kind=Kind.COMPARISON, path=path, run=None, adapter=None, what=what)
    adapter = _adapter(path)
    if adapter is not None:
        kept = adapter.directory
        whose = "an adapter" if adapter.run is None else f"the adapter of run {_name(adapter.run)}"
        return Inspected(
            kind=Kind.ADAPTER,
            path=kept,
            run=adapter.run,
            adapter=adapter,
            what=f"{whose}, {_form(adapter)}",
        )
    if (path / "config.json").is_file():
        what = "a merged model" if certificate_place(path).is_file() else "a model directory"
        return Inspected(kind=Kind.MODEL, path=path, run=None, adapter=None, what=what)
    raise _nothing(path, "a directory without a record, an adapter or a model")


def problems(config: RunConfig, found: Inspected) -> list[MensError]:
    """List what of the command has nothing to work on."""
    listed: list[MensError] = []
    if config.replay and found.kind is not Kind.RUN:
        listed.append(
            ConfigError(
                "there is no run whose steps could be taken again",
                where="replay",
                found=f"{found.path}: {found.what}",
                expected="path=<training run>, or latest",
                remedy="name the run, or drop replay=true",
            )
        )
    if config.replay and found.run is not None:
        config_of(found.run)  # what it names is built
    return listed


def _file(path: Path) -> Inspected:
    if path.suffix == ".ckpt":
        owner = RunDir(path.absolute().parent.parent)
        run = owner if owner.manifest.is_file() and path.parent.name == "checkpoints" else None
        what = "a training state"
        if run is not None:
            what += f" of run {_name(run)}"
        return Inspected(kind=Kind.CHECKPOINT, path=path, run=run, adapter=None, what=what)
    adapter = _adapter(path.parent)
    if adapter is not None and adapter.tensors == path:
        return inspected(str(path.parent))
    run = RunDir(path.parent)
    is_scorecard = path.name == run.scorecard.name and run.manifest.is_file()
    if is_scorecard or path.name == run.comparison.name:
        return inspected(str(path.parent))
    if path.suffix == ".safetensors" and certificate_place(path).is_file():
        return Inspected(
            kind=Kind.TENSORS, path=path, run=None, adapter=None, what="merged tensors alone"
        )
    if path.suffix == ".jsonl" and is_ledger(path):
        what = "a ledger of decisions"
        return Inspected(kind=Kind.DECISION, path=path, run=None, adapter=None, what=what)
    raise _nothing(path, "a file that is no checkpoint, adapter, record or merged tensors")


def _run(run: RunDir) -> Inspected:
    manifest = Manifest.read(run.manifest)
    if manifest.task in _WRITERS:
        return inspected(str(_written(run, manifest)))
    kind = _kind_of_record(manifest)
    if kind is not None:
        scored = scored_run(manifest) if kind is Kind.SCORECARD else None
        what = f"a {kind.value} of task={manifest.task}, {manifest.status.value}"
        return Inspected(kind=kind, path=run.path, run=scored, adapter=None, what=what)
    if manifest.task != "train":
        raise RequestError(
            "the run left nothing to inspect",
            where="path",
            found=f"{run.path} ({manifest.task})",
            expected="a run of train, evaluate, compare, promote, merge, or export to an adapter",
        )
    return Inspected(
        kind=Kind.RUN,
        path=run.path,
        run=run,
        adapter=_adapter(run.path),
        what=f"a training run, {manifest.status.value}",
    )


def _kind_of_record(manifest: Manifest) -> Kind | None:
    """Return what a run left that trained and wrote no weights, None where it left nothing."""
    if manifest.task == "evaluate":
        return Kind.SCORECARD
    if manifest.task == "compare":
        return Kind.COMPARISON
    return Kind.DECISION if "decision" in manifest.results else None


def scored_run(manifest: Manifest) -> RunDir | None:
    """Return the training run that an evaluation scored, None where that is not at hand."""
    place = manifest.inputs.get(MERGED) or manifest.inputs.get("subject")
    run = None if place in {None, "base"} else RunDir(Path(str(place)))
    return run if run is not None and run.manifest.is_file() else None


def _written(run: RunDir, manifest: Manifest) -> Path:
    """Return what a merge or an export wrote."""
    out = manifest.results.get("out") or manifest.results.get("adapter")
    places = [run.path / str(out), Path(str(out)).expanduser()] if out is not None else []
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise RequestError(
            "what the run wrote is not where it was put",
            where="path",
            found=f"{run.path} ({manifest.task}, {manifest.status.value}): {out or 'nothing'}",
            expected="a merge or an export that has ended, and its output",
            remedy="name the output itself",
        )
    return found


def _adapter(directory: Path) -> AdapterPlace | None:
    try:
        return find(directory)
    except RequestError:
        return None


def _form(adapter: AdapterPlace) -> str:
    return "a PEFT directory" if adapter.form == "peft" else f"schema {adapter.form}"


def _name(run: RunDir) -> str:
    return run.path.resolve().name


def _nothing(path: Path, what: str) -> RequestError:
    return RequestError(
        what,
        where="path",
        found=str(path),
        expected="a run, latest, an adapter directory (schema v2, v3 or PEFT), a checkpoint "
        "(step_….ckpt), what a merge or an export wrote, an evaluation, a comparison, or a ledger "
        "of decisions",
    )
