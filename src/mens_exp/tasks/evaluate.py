"""task=evaluate: score a finished run again, in a run of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.run_dir import resolve as resolve_run
from mens_exp.config.compose import from_yaml, typed
from mens_exp.corpus.source import load_rows
from mens_exp.errors import RequestError
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.inputs import describe, refuse_changed, tokenizer_of
from mens_exp.tasks.scoring import score

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["evaluate", "subject_of"]


def subject_of(path: str) -> RunDir:
    """Return the run to evaluate.

    Raises:
        RequestError: there is no such run, or it has no adapter.
    """
    subject = resolve_run(path, task="train")
    manifest = Manifest.read(subject.manifest)
    if manifest.task != "train":
        raise RequestError(
            "the run trained nothing",
            where="path",
            found=f"{subject.path} ({manifest.task})",
            expected="a training run",
            remedy="name one, or path=latest",
        )
    if not (subject.adapter / "adapter_manifest.json").is_file():
        raise RequestError(
            "the run has no adapter",
            where="path",
            found=f"{subject.path} ({manifest.status})",
            expected="a training run that has ended",
            remedy=f"finish it with resume={subject.path}",
        )
    return subject


def evaluate(config: RunConfig, run: Run) -> None:
    """Load the run's own model and adapter and score both conditions."""
    from mens_exp.model.resolve import resolve
    from mens_exp.training.build import build_backend, lightning_quiet

    assert config.path is not None, "validation has asked for it"
    subject = subject_of(config.path)
    theirs = typed(from_yaml(subject.config))
    theirs.trainer.accelerator = config.trainer.accelerator
    cache = writable_cache()
    base = resolve(theirs.model, cache)
    tokenizer = tokenizer_of(theirs.tokenizer, base, subject)
    rows = load_rows(theirs.data, cache)
    inputs = describe(base, tokenizer, rows)
    refuse_changed(Manifest.read(subject.manifest).inputs, inputs)
    run.manifest.inputs.update(inputs, subject=str(subject.path))
    _, tensors = read_adapter(subject.adapter)
    with lightning_quiet():
        backend = build_backend(theirs, base)
    backend.load_adapter(tensors)
    score(config.suite, run, backend, rows.heldout, tokenizer)
