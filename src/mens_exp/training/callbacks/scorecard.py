"""Scorecards during training."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

import random
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning import Callback

from mens_exp.artifacts.scorecard import write_item_events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lightning import Trainer

    from mens_exp.evals.attempts import Measured
    from mens_exp.training.module import RunRecord, TrainingModule

_STEP = re.compile(r"step_(\d+)\.jsonl")


class Scorecard(Callback):
    """Scores a few suite items every ``every_n_steps`` optimizer steps, without side effects.

    The last step is always scored. Answers are written to a separate file per step, apart from the
    events of the final scorecard.
    """

    def __init__(
        self, run: RunRecord, score: Callable[[int], Measured], every_n_steps: int, items: int = 8
    ) -> None:
        """Attach to ``run``.

        Args:
            run: the record.
            score: answers and grades the given number of items from the start of the suite.
            every_n_steps: optimizer steps between scorecards.
            items: items per scorecard.
        """
        self.run = run
        self.score = score
        self.every_n_steps = every_n_steps
        self.items = items

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Drop scores that a stopped attempt made after the step from which this one resumes."""
        del pl_module
        for path in self.run.dir.scorecards.glob("step_*.jsonl"):
            match = _STEP.fullmatch(path.name)
            if match and int(match[1]) > trainer.global_step:
                path.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Score if the step is due or is the last one."""
        del outputs, batch, batch_idx
        step = trainer.global_step
        due = step == trainer.max_steps or step % self.every_n_steps == 0
        if not (due and pl_module.at_step_boundary):
            return
        began = time.perf_counter()
        with _random_numbers_kept():
            measured = self.score(self.items)
        seconds = time.perf_counter() - began
        pl_module.scored = (step, measured.values)
        write_item_events(self.run.dir.events_at(step), measured.events)
        self.run.telemetry.emit(
            "scorecard_step",
            {
                "step": step,
                "items": measured.items,
                "seconds": seconds,
                "unknown": measured.unknown,
                **measured.values,
            },
        )


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Preserve the state of the global generators across the block."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the global one
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002  # the global one
