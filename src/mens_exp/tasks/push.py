"""task=push: upload a run's adapter, card and records to the Hugging Face hub."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.export import hub
from mens_exp.tasks.subject import subject_of

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["push"]


def push(config: RunConfig, run: Run) -> None:
    """Upload in one commit and record which."""
    assert config.path is not None, "validation has asked for it"
    assert config.repo is not None, "validation has asked for it"
    subject = subject_of(config.path)
    message = config.push.message or f"mens_exp run {subject.path.resolve().name}"
    run.manifest.inputs.update(subject=str(subject.path))
    pushed = hub.push(subject, config.repo, private=config.push.private, message=message)
    run.manifest.results.update(asdict(pushed))
    Console().print(f"Pushed: {pushed.url} (commit {pushed.commit})", soft_wrap=True, markup=False)
