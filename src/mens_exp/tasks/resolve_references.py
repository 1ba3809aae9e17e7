"""Resolve the references of a command before its run begins.

``latest`` becomes a specific run, a hub branch a commit, and a relative path an absolute one. For
task=inspect, the module determines the kind of output that a path names.
"""

from __future__ import annotations

import copy
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.certificate import ArtifactKind
from mens_exp.artifacts.decision_ledger import is_ledger
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.run_dir import RunDir, resolve
from mens_exp.config.data import HubData, MixData
from mens_exp.config.data_sources import sources_of
from mens_exp.config.model import HfModel, teacher_of
from mens_exp.config.overrides import check
from mens_exp.config.sweep import EARLIER, SLURM
from mens_exp.config.task import ExportFormat, ExportKind, OllamaForm, export_kind
from mens_exp.config.validate import TASK_READS, problems_of
from mens_exp.errors import ConfigError, MensError, NoEffectError, Problems, RequestError
from mens_exp.export.adapter import AdapterPlace, find
from mens_exp.export.certificate import certificate_place
from mens_exp.export.subject import config_of
from mens_exp.layout import starting_adapter
from mens_exp.layout.hub import pinned
from mens_exp.planning.preflight import preflight
from mens_exp.rows.files import ROWS
from mens_exp.tasks.lineage import MERGED, Inspected, output_of, run_without_manifest
from mens_exp.tasks.round_commands import RoundCommands, is_of_bundle, other_draws, shared_tasks

if TYPE_CHECKING:
    from mens_exp.config.overrides import Cell
    from mens_exp.config.root import RunConfig

_ALWAYS_MERGED = (ExportFormat.hf, ExportFormat.gguf)


def pin_inputs(cell: Cell) -> list[MensError]:
    """Resolve a cell's references, and list problems that prevent its task."""
    return [*_pinned(cell), *_suite_problems(cell.config)]


def _suite_problems(config: RunConfig) -> list[MensError]:
    """List problems of the suite's file, if the task reads one."""
    suite = config.suite
    if "suite" not in TASK_READS[config.task.name] or not suite.spec.reads_files(suite):
        return []
    from mens_exp.evals.suite import file_problems

    return file_problems(suite, calls_functions=config.task.name == "evaluate")


def _pinned(cell: Cell) -> list[MensError]:
    """Resolve model, rows and paths."""
    config = cell.config
    if "path" not in TASK_READS[config.task.name]:
        return _pin_without_path(cell)
    if config.path is None and config.task.name != "merge":
        return []  # reported by the rules
    try:
        return _pin_path(cell)
    except Problems as several:
        return list(several.problems)
    except MensError as error:
        return [error]


def _pin_without_path(cell: Cell) -> list[MensError]:
    if cell.config.task.name == "doctor":
        return []
    if cell.config.task.name == "corpus":
        return _pin_corpus(cell)
    if cell.config.task.name == "rejection_sampling":
        return _pin_rounds(cell)
    _pin_model(cell)
    pin_rows(cell)
    launcher = cell.composed.launcher_option or ""
    by_slurm = EARLIER.get(launcher, launcher) == SLURM
    return _pin_start(cell) or preflight(cell.config, by_slurm=by_slurm)


def _pin_rounds(cell: Cell) -> list[MensError]:
    """List problems that prevent the first round from sampling, or any round from training."""
    config = cell.config
    if not config.rejection_sampling.sample:
        return []  # reported by the rules
    commands = RoundCommands(config=config, typed=cell.composed.overrides, output=Path("rounds"))
    problems: list[MensError] = [*commands.problems()]
    if problems:
        return problems
    sampling, training = check(commands.sampling(1)), check(commands.training(1))
    problems += [one for one in sampling.problems if not is_of_bundle(one)] + [*training.problems]
    for one in () if problems else sampling.cells:
        problems += other_draws(one.config) if commands.compares_answers else ()
        problems += pin_inputs(one) or [*shared_tasks(config, one.config)]
    return list({str(problem): problem for problem in problems}.values())


def _pin_path(cell: Cell) -> list[MensError]:
    from mens_exp.export.subject import leaving_problems, reads_a_model

    config = cell.config
    of_records = {
        "inspect": _pin_inspected,
        "compare": _pin_study,
        "sync": _pin_study,
        "promote": _pin_evidence,
    }.get(config.task.name)
    if of_records is not None:
        return of_records(cell)
    if reads_a_model(config):
        from mens_exp.export.handoff import model_directory, occupied

        assert config.path is not None, "the caller has asked"
        _put_path(cell, str(model_directory(config.path)))
        return [*leaving_problems(config), *occupied(config.out)]
    if config.task.name == "export" and export_kind(config) is ExportKind.base:
        return _pin_base(cell)
    if _merges(config):
        return _pin_merge(cell) or leaving_problems(config)
    if config.task.name == "export" and config.export.format is not ExportFormat.bundle:
        return _pin_adapter(cell)
    return _pin_subject(cell)


def _pin_base(cell: Cell) -> list[MensError]:
    """Resolve the command's own model, which the export writes as a directory."""
    from mens_exp.export.handoff import occupied
    from mens_exp.export.subject import base_problems

    _pin_model(cell)
    return [*base_problems(cell.config), *occupied(cell.config.out)]


def _put_path(cell: Cell, path: str) -> None:
    cell.config.path = cell.composed.values.path = path


def _pin_model(cell: Cell) -> None:
    """Replace a hub branch by its current commit, and a relative path by an absolute one.

    References that cannot be resolved stay unchanged; preflight reports why.
    """
    _pin_teacher(cell)
    model = cell.config.model
    if not isinstance(model, HfModel):
        return
    try:
        pinned_config = pinned(model)
    except MensError:
        return
    cell.config.model = pinned_config
    cell.composed.values.model.id = pinned_config.id
    cell.composed.values.model.revision = pinned_config.revision


def _pin_teacher(cell: Cell) -> None:
    """Resolve the objective's teacher model like :func:`_pin_model`."""
    objective: Any = cell.config.objective
    teacher = teacher_of(objective, cell.config.model)
    if teacher is cell.config.model or not isinstance(teacher, HfModel):
        return
    try:
        pinned_config = pinned(teacher)
    except MensError:
        return
    for group in (objective, cell.composed.values.objective):
        group.teacher, group.teacher_revision = pinned_config.id, pinned_config.revision


def pin_rows(cell: Cell) -> None:
    """Replace a dataset branch by its current commit; leave it unchanged if that fails."""
    data = cell.config.data
    if not isinstance(data, HubData | MixData):
        return
    from mens_exp.corpus import hub_rows  # costs 30 ms, unneeded by other plans

    try:
        if isinstance(data, HubData):
            data.revision = hub_rows.pinned(data)
            cell.composed.values.data.revision = data.revision
        else:
            for entry, source in zip(data.sources, sources_of(data), strict=True):
                if isinstance(source.data, HubData):
                    entry["revision"] = hub_rows.pinned(source.data)
            cell.composed.values.data.sources = data.sources
    except MensError:
        return


def _pin_corpus(cell: Cell) -> list[MensError]:
    """Make paths absolute, replace a branch by its current commit, and check the paths."""
    from mens_exp.corpus.steps.pipeline import place_problems
    from mens_exp.tasks.corpus import pinned_places

    config = cell.config
    if problems_of(config):
        return []  # reported by the rules
    pinned_config = pinned_places(config.corpus)
    cell.config.corpus = pinned_config
    stored = cell.composed.values.corpus
    stored.input, stored.output = pinned_config.input, pinned_config.output
    stored.extract.commit = pinned_config.extract.commit
    return place_problems(pinned_config)


def _pin_subject(cell: Cell) -> list[MensError]:
    """Resolve ``latest`` to a run, before our own run becomes the latest."""
    from mens_exp.export.subject import base_problems, config_of, sending_problems, subject_of

    config = cell.config
    assert config.path is not None, "the caller has asked"
    if config.path == "base" and config.task.name == "chat":
        _pin_model(cell)
        return base_problems(config)
    if config.task.name == "evaluate":
        return _pin_evaluated(cell)
    subject = subject_of(config.path)
    if config.task.name == "chat":
        config_of(subject)  # refuses classes that are not trusted here
    _put_path(cell, str(subject.path))
    return sending_problems(config, subject)


def _pin_evaluated(cell: Cell) -> list[MensError]:
    """Resolve `path`, and refuse subjects that cannot be scored."""
    from mens_exp.tasks.evaluate import evaluation_problems, subject_named

    config = cell.config
    assert config.path is not None, "the caller has asked"
    subject = subject_named(config.path)
    _put_path(cell, subject.path)
    if subject.run is None:
        _pin_model(cell)
        pin_rows(cell)
    # The check adds the adapter's layers to a configuration, so it gets a copy.
    return evaluation_problems(copy.deepcopy(config), subject, cell.composed.overrides)


def _merges(config: RunConfig) -> bool:
    """Return whether the task merges an adapter, either as output or for an export."""
    if config.task.name != "export":
        return config.task.name == "merge"
    for_ollama = (
        config.export.format is ExportFormat.ollama and config.ollama.form is OllamaForm.merged
    )
    return config.export.format in _ALWAYS_MERGED or for_ollama


def _pin_study(cell: Cell) -> list[MensError]:
    """Resolve `path` to runs and sweeps."""
    from mens_exp.tasks.study_runs import named_paths

    assert cell.config.path is not None, "the caller has asked"
    _put_path(cell, ",".join(named_paths(cell.config.path)))
    return []


def _pin_evidence(cell: Cell) -> list[MensError]:
    """Resolve `path` to the files of the comparisons."""
    from mens_exp.tasks.promotion_evidence import comparison_files

    assert cell.config.path is not None, "the caller has asked"
    _put_path(cell, ",".join(map(str, comparison_files(cell.config.path))))
    return []


def _pin_inspected(cell: Cell) -> list[MensError]:
    """Resolve `path`, and refuse unsupported requests for the object."""
    assert cell.config.path is not None, "the caller has asked"
    found = inspected(cell.config.path)
    _put_path(cell, str(found.path))
    return inspection_problems(cell.config, found)


def _pin_merge(cell: Cell) -> list[MensError]:
    """Resolve `path` to an adapter directory."""
    from mens_exp.export.subject import adapter_place, merge_problems

    problems = merge_problems(cell.config)
    if cell.config.path is not None and not problems:
        place = adapter_place(cell.config.path)
        _put_path(cell, str(place.directory))
        if place.run is not None:
            problems += _settings_of_run(cell)
    return problems


def _settings_of_run(cell: Cell) -> list[MensError]:
    """Refuse settings that the certificate takes from the adapter's run, not from the command."""
    keys = {text.lstrip("+~").partition("=")[0] for text in cell.composed.overrides}
    return [
        NoEffectError(
            "on the adapter of a run, which is measured on its own rows",
            where=key,
            expected="no such setting, or an adapter without its run",
            remedy=f"drop {key}; parity.text=<file> names another text",
        )
        for key in sorted(keys)
        if key.partition(".")[0] in {"data", "tokenizer"}
    ]


def _pin_adapter(cell: Cell) -> list[MensError]:
    """Resolve ``path`` to the adapter's directory, and check its conversion."""
    from mens_exp.export.subject import conversion_problems, place_of

    config = cell.config
    assert config.path is not None, "the caller has asked"
    place = place_of(config.path)
    _put_path(cell, str(place.directory))
    if place.run is None:
        _pin_model(cell)
    return conversion_problems(config, cell.composed.overrides)


def _pin_start(cell: Cell) -> list[MensError]:
    """Resolve ``lora.init_from`` to an adapter directory."""
    if cell.config.lora.init_from is None:
        return []
    try:
        cell.config.lora.init_from = str(starting_adapter.find(cell.config.lora.init_from))
    except MensError:
        return []  # preflight reports it with everything else
    cell.composed.values.lora.init_from = cell.config.lora.init_from
    return []


_WRITERS = ("merge", "export")


def inspected(text: str) -> Inspected:
    """Identify the object that ``path`` names.

    Args:
        text: ``latest``, a run, an adapter directory of any form, a checkpoint, the output of a
            merge or an export, the run that wrote it, an evaluation, a comparison, a decision, or a
            ledger of decisions.

    Raises:
        RequestError: the path does not exist or cannot be inspected.
        DataError: a record is damaged.
    """
    path = resolve(text, task="train").path if text == "latest" else Path(text).expanduser()
    if path.is_file():
        return _file(path)
    if not path.is_dir():
        raise _nothing(path, "no such file or directory")
    run = RunDir(path)
    if run.manifest.is_file():
        return _run(run)
    if (lost := run_without_manifest(path)) is not None and lost.path == path:
        raise RequestError(
            "the run has lost its manifest.json",
            where="path",
            found=f"{path}, with {run.config.name} and {run.telemetry.name}",
            expected="manifest.json next to them, without which nothing can be checked",
            remedy=f"restore it; path={run.adapter} describes the adapter alone",
        )
    if run.comparison.is_file():
        what = "a comparison"
        return Inspected(kind=ArtifactKind.COMPARISON, path=path, run=None, adapter=None, what=what)
    adapter = _adapter(path)
    if adapter is not None:
        kept = adapter.directory
        whose = "an adapter" if adapter.run is None else f"the adapter of run {_name(adapter.run)}"
        return Inspected(
            kind=ArtifactKind.ADAPTER,
            path=kept,
            run=adapter.run,
            adapter=adapter,
            what=f"{whose}, {_form(adapter)}",
        )
    is_ours = certificate_place(path).is_file()
    if (path / "config.json").is_file() or is_ours:
        what = "a merged model" if is_ours else "a model directory"
        what += " in GGUF" if any(path.glob("*.gguf")) else ""
        return Inspected(kind=ArtifactKind.MODEL, path=path, run=None, adapter=None, what=what)
    raise _nothing(path, "a directory without a record, an adapter or a model")


def inspection_problems(config: RunConfig, found: Inspected) -> list[MensError]:
    """List requested actions that do not apply to the object."""
    listed: list[MensError] = []
    if config.inspect.replay and found.kind is not ArtifactKind.RUN:
        listed.append(
            ConfigError(
                "there is no run whose steps could be taken again",
                where="inspect.replay",
                found=f"{found.path}: {found.what}",
                expected="path=<training run>, or latest",
                remedy="name the run, or drop inspect.replay=true",
            )
        )
    if config.inspect.replay and found.run is not None:
        config_of(found.run)  # refuses classes that are not trusted here
    return listed


def _file(path: Path) -> Inspected:
    if path.suffix == ".ckpt":
        owner = RunDir(path.absolute().parent.parent)
        run = owner if owner.manifest.is_file() and path.parent.name == "checkpoints" else None
        what = "a training state"
        if run is not None:
            what += f" of run {_name(run)}"
        return Inspected(kind=ArtifactKind.CHECKPOINT, path=path, run=run, adapter=None, what=what)
    adapter = _adapter(path.parent)
    if adapter is not None and adapter.tensors == path:
        return inspected(str(path.parent))
    run = RunDir(path.parent)
    is_scorecard = path.name == run.scorecard.name and run.manifest.is_file()
    if is_scorecard or path.name == run.comparison.name:
        return inspected(str(path.parent))
    if path.suffix == ".safetensors" and certificate_place(path).is_file():
        return Inspected(
            kind=ArtifactKind.TENSORS,
            path=path,
            run=None,
            adapter=None,
            what="merged tensors alone",
        )
    if path.suffix == ".jsonl" and is_ledger(path):
        what = "a ledger of decisions"
        return Inspected(kind=ArtifactKind.DECISION, path=path, run=None, adapter=None, what=what)
    raise _nothing(path, "a file that is not a checkpoint, an adapter, a record or merged tensors")


def _run(run: RunDir) -> Inspected:
    manifest = Manifest.read(run.manifest)
    if manifest.task in _WRITERS:
        return inspected(str(_written(run, manifest)))
    kind = _kind_of_record(manifest)
    if kind is not None:
        scored = scored_run(manifest) if kind is ArtifactKind.SCORECARD else None
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
        kind=ArtifactKind.RUN,
        path=run.path,
        run=run,
        adapter=_adapter(run.path),
        what=f"a training run, {_state(run, manifest)}",
    )


def _kind_of_record(manifest: Manifest) -> ArtifactKind | None:
    """Return the artifact kind of a run that did not write weights; None if it left nothing."""
    if manifest.task == "evaluate":
        return ArtifactKind.SCORECARD
    if manifest.task == "compare":
        return ArtifactKind.COMPARISON
    return ArtifactKind.DECISION if "decision" in manifest.results else None


def scored_run(manifest: Manifest) -> RunDir | None:
    """Return the training run that an evaluation scored; None if not available."""
    place = manifest.inputs.get(MERGED) or manifest.inputs.get("subject")
    run = None if place in {None, "base"} else RunDir(Path(str(place)))
    return run if run is not None and run.manifest.is_file() else None


def _written(run: RunDir, manifest: Manifest) -> Path:
    """Return the output of a merge or an export."""
    out = output_of(manifest)
    places = [run.path / out, Path(out).expanduser()] if out is not None else []
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


def _state(run: RunDir, manifest: Manifest) -> str:
    if manifest.status is Status.STARTED and run.is_interrupted:
        return f"interrupted: its process was killed; continue it with resume={run.path}"
    return manifest.status.value


def _name(run: RunDir) -> str:
    return run.path.resolve().name


def _nothing(path: Path, what: str) -> RequestError:
    seen = f"python -m mens_exp task=plan data=jsonl data.path={shlex.quote(str(path))} data.show=3"
    is_rows = path.is_file() and path.name.lower().endswith(ROWS)
    if path.is_file() and path.name.endswith(".tar.gz"):
        return RequestError(
            "a bundle is inspected once it is unpacked",
            where="path",
            found=str(path),
            expected="the run that it holds",
            remedy=f"run: tar xzf {shlex.quote(str(path))}, then path=<the directory it makes>",
        )
    return RequestError(
        what,
        where="path",
        found=str(path),
        expected="a run, latest, an adapter directory (schema v2, v3 or PEFT), a checkpoint "
        "(step_….ckpt), what a merge or an export wrote, an evaluation, a comparison, or a ledger "
        "of decisions",
        remedy=f"see rows with {seen}"
        if is_rows
        else "write path=latest for the newest training run, or name one of outputs/*/*/*",
    )
