"""task=evaluate: score a finished run again, in a run of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.adapter_v3 import read_adapter
from mens_exp.artifacts.manifest import Manifest
from mens_exp.corpus.source import load_rows
from mens_exp.plan.preflight import writable_cache
from mens_exp.tasks.inputs import describe, refuse_changed, tokenizer_of
from mens_exp.tasks.scoring import score
from mens_exp.tasks.subject import config_of, subject_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["evaluate"]


def evaluate(config: RunConfig, run: Run) -> None:
    """Load the run's own model and adapter and score both conditions."""
    from mens_exp.model.resolve import resolve
    from mens_exp.training.build import build_backend, lightning_quiet

    assert config.path is not None, "validation has asked for it"
    subject = subject_of(config.path)
    theirs = config_of(subject)
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
    score(config, run, backend, rows.heldout, tokenizer)
