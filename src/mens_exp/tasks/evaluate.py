"""task=evaluate: score a run, a merged model, an adapter or the base, in a run of its own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.adapter_v3 import TENSORS_NAME, read_adapter
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.outputs import refuse_changed_adapter
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Condition
from mens_exp.config.evaluation import EngineKind
from mens_exp.config.logger import WandbLogger
from mens_exp.config.suite import ScorecardSpecSuite
from mens_exp.corpus.source import load_rows
from mens_exp.evals.catalogue import needs_rows
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.contracting import suite_part
from mens_exp.tasks.evaluated import base_of_another, subject_named, with_adapter
from mens_exp.tasks.evaluated_merge import MERGED, config_of_merged, other_weights
from mens_exp.tasks.inputs import describe, refuse_changed, tokenizer_of
from mens_exp.tasks.sampling import refuse_evaluations
from mens_exp.tasks.scoring import score, score_served
from mens_exp.tasks.specified import score_spec
from mens_exp.tasks.subject import config_of
from mens_exp.tasks.vllm_scoring import score_by_vllm
from mens_exp.training.wandb_names import id_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.corpus.source import Rows
    from mens_exp.tasks.evaluated import Subject
    from mens_exp.tasks.run import Run

__all__ = ["evaluate"]


def evaluate(config: RunConfig, run: Run) -> None:
    """Load what `path` names and score it: both conditions, or the one that it has."""
    if config.suite.name == "scorecard_spec":
        assert isinstance(config.suite, ScorecardSpecSuite), "its name says so"
        run.manifest.inputs["specification"] = str(config.suite.path)
        _mirror(config, run)
        score_spec(config, run)
        return
    assert config.path is not None, "validation has asked for it"
    if config.eval.keep_passing is not None:
        refuse_evaluations(config)
    subject = subject_named(config.path)
    run.manifest.inputs["subject"] = subject.path
    if subject.merged is not None and subject.run is not None:
        run.manifest.inputs[MERGED] = str(subject.run.path.absolute())
    run.manifest.inputs.update(_evaluated_run(subject))
    _mirror(config, run, subject)
    if config.eval.engine is EngineKind.openai:
        condition = Condition.BASE if subject.is_base else Condition.TUNED
        score_served(config, run, condition)
    else:
        _evaluate_here(config, run, subject)


def _evaluated_run(subject: Subject) -> dict[str, Any]:
    """Return the ids of the run that made the subject, ours and W&B's; empty where none did."""
    maker = _maker(subject)
    if maker is None or not maker.manifest.is_file():
        return {}
    made = Manifest.read(maker.manifest)
    return {"subject_run": {"run_id": made.run_id, "wandb_run_id": id_of(maker, made)}}


def _maker(subject: Subject) -> RunDir | None:
    """Return the run that made the subject, also where the path names the adapter inside it."""
    if subject.is_base or subject.run is not None:
        return subject.run if subject.merged is None else RunDir(Path(subject.path))
    path = Path(subject.path).absolute()
    above = (RunDir(place) for place in (path, *path.parents)[:3])
    return next((run for run in above if run.manifest.is_file()), None)


def _mirror(config: RunConfig, run: Run, subject: Subject | None = None) -> None:
    """Start the W&B mirror, where one is asked for; it ends with the run."""
    if not isinstance(config.logger, WandbLogger):
        return
    from mens_exp.training.callbacks.wandb_mirror import WandbMirror

    maker = None if subject is None else _maker(subject)
    kind = "merged" if subject is not None and subject.merged is not None else "adapter"
    uses = [] if maker is None else [(kind, str(maker.path.absolute()))]
    run.save()  # an upload reads group, name and link from the manifest
    WandbMirror(logger=config.logger, run=run, uses=uses).start()


def _evaluate_here(config: RunConfig, run: Run, subject: Subject) -> None:
    from mens_exp.model.resolve import resolve
    from mens_exp.training.build import build_backend, lightning_quiet

    theirs, tensors, adapter = _told(config, subject)
    theirs.trainer.accelerator = config.trainer.accelerator
    cache = writable_cache()
    base = resolve(theirs.model, cache)
    if adapter is not None:
        base_of_another(adapter, base)
        run.manifest.inputs["adapter_sha256"] = adapter.sha256
    if subject.merged is not None:
        other_weights(RunDir(Path(subject.path)), base)
    tokenizer = tokenizer_of(theirs.tokenizer, base, subject.run or run.dir)
    with_rows = subject.run is not None or needs_rows(config.suite)
    rows = load_rows(theirs.data, cache) if with_rows else None
    inputs = describe(base, tokenizer, rows)
    if subject.run is not None:
        recorded = Manifest.read(subject.run.manifest).inputs
        if subject.merged is not None:  # its weights are held against the merge's own record
            recorded = recorded | {"base_weights_sha256": None}
        refuse_changed(recorded, inputs)
        run.manifest.inputs["adapter_sha256"] = _adapter_of(subject, subject.run)
    run.manifest.inputs.update(inputs)
    if subject.run is not None and rows is not None:
        _label_known_items(config, run, rows)
    run.save()
    heldout = rows.heldout if rows is not None else ()
    if config.eval.engine is EngineKind.vllm:
        score_by_vllm(config, theirs, run, base, subject, tokenizer, heldout)
        return
    with lightning_quiet():
        backend = build_backend(theirs, base)
    if tensors is not None:
        backend.load_adapter(tensors)
    conditions = _conditions(subject)
    if config.eval.keep_passing is not None:
        conditions = conditions[-1:]
    score(config, run, backend, heldout, tokenizer, conditions=conditions)


def _label_known_items(config: RunConfig, run: Run, rows: Rows) -> None:
    """Record which of the suite's items the run was trained on, and say so where it was."""
    part = suite_part(config.suite, rows, calls_functions=True)
    if part is None:
        return
    run.manifest.inputs["overlap"] = part
    if part["sharing"]:
        run.manifest.notes.append(
            f"{part['sharing']} of {part['items']} items of {part['against']} have text in common "
            f"with rows that the run was trained on, {part['contained']} of them half or more: "
            "its scores on these show memory too"
        )


def _adapter_of(subject: Subject, trained: RunDir) -> str:
    """Return the digest of the adapter that answers, be it by weights that it was merged into."""
    if subject.merged is not None:
        return str(Manifest.read(RunDir(Path(subject.path)).manifest).inputs["adapter_sha256"])
    return sha256_file(trained.adapter / TENSORS_NAME)


def _conditions(subject: Subject) -> tuple[Condition, ...]:
    """Return what can answer: merged weights have their base no more."""
    if subject.is_base:
        return (Condition.BASE,)
    return (Condition.BASE, Condition.TUNED) if subject.merged is None else (Condition.TUNED,)


def _told(config: RunConfig, subject: Subject) -> tuple[RunConfig, Any, Any]:
    """Return what to build, the tensors to load into it, and a bare adapter's description."""
    if subject.is_base:
        return config, None, None
    if subject.merged is not None and subject.run is not None:
        return config_of_merged(subject.run, subject.merged), None, None
    if subject.run is not None:
        refuse_changed_adapter(subject.run.adapter)
        return config_of(subject.run), read_adapter(subject.run.adapter)[1], None
    theirs, adapter = with_adapter(config, Path(subject.path))
    return theirs, adapter.tensors, adapter
