"""Scores of the model on its tasks while it is still being trained."""

# Lightning hands a hook whatever module it trains; the one that build.py gives it is ours.
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
    """Scores a few items of the suite after so many optimizer steps, and leaves no other trace.

    The last step is always scored. What was answered lies in a file of its own for each step,
    apart from the events of the final scorecard.
    """

    def __init__(
        self, run: RunRecord, score: Callable[[int], Measured], every_n_steps: int, items: int = 8
    ) -> None:
        """Listen for ``run``.

        Args:
            run: the record.
            score: asks the suite's first so many items and judges the answers.
            every_n_steps: optimizer steps from one scorecard to the next.
            items: of each.
        """
        self.run = run
        self.score = score
        self.every_n_steps = every_n_steps
        self.items = items

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Forget what a stopped attempt scored after the step that this one goes on from."""
        del pl_module
        for path in self.run.dir.scorecards.glob("step_*.jsonl"):
            match = _STEP.fullmatch(path.name)
            if match and int(match[1]) > trainer.global_step:
                path.unlink()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Score a step of the right number, and the last."""
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
    """Leave the global generators as they were, whatever is drawn inside the block."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # the global one
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002  # the global one
