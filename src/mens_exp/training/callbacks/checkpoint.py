"""Checkpoints of the training state."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint as RunsLast
from lightning.pytorch.trainer.states import TrainerFn

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule


class Checkpoint(RunsLast):
    """Saves adapter, optimizer, schedule, random states and data position after steps.

    Lightning runs it after all other callbacks. The checkpoint and its event therefore follow
    everything that belongs to the step, including a validation, and a resumed run starts with the
    next micro-batch and repeats nothing. The last step is always saved.
    """

    def __init__(self, run: RunRecord) -> None:
        """Attach to ``run``; the module's `checkpoint` sets the interval and the number to keep."""
        self.run = run

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save if the optimizer step just taken is due for a checkpoint."""
        del outputs, batch, batch_idx
        if self._is_due(trainer, pl_module) and not _validation_follows(trainer):
            self._save(trainer, keep=pl_module.config.checkpoint.keep)

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Save a checkpoint that was postponed until after the step's validation."""
        trains = trainer.state.fn is TrainerFn.FITTING and not trainer.sanity_checking
        if trains and self._is_due(trainer, pl_module):
            self._save(trainer, keep=pl_module.config.checkpoint.keep)

    def _is_due(self, trainer: Trainer, pl_module: TrainingModule) -> bool:
        step = trainer.global_step
        last = step == trainer.max_steps or trainer.should_stop
        interval = pl_module.config.checkpoint.every_n_steps
        return pl_module.at_step_boundary and (last or step % interval == 0)

    def _save(self, trainer: Trainer, *, keep: int) -> None:
        step = trainer.global_step
        path = self.run.dir.checkpoint(step)
        trainer.save_checkpoint(path)  # collective: the first process writes
        if not trainer.is_global_zero:
            return
        self.run.telemetry.emit(
            "checkpoint_saved",
            {
                "step": step,
                "path": path.relative_to(self.run.dir.path).as_posix(),
                "bytes": path.stat().st_size,
            },
        )
        for old in sorted(self.run.dir.checkpoints.glob("step_*.ckpt"))[:-keep]:
            old.unlink()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the global generators."""
        kind, keys, position, has_gauss, gauss = np.random.get_state()  # noqa: NPY002  # the global one
        return {
            "torch": torch.get_rng_state(),
            "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "numpy": {
                "kind": str(kind),
                "keys": torch.from_numpy(np.asarray(keys, dtype=np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "gauss": float(gauss),
            },
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the states of the global generators."""
        torch.set_rng_state(state_dict["torch"])
        if state_dict["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(state_dict["cuda"])
        numpy = state_dict["numpy"]
        np.random.set_state(  # noqa: NPY002  # libraries draw from the global one
            (
                numpy["kind"],
                numpy["keys"].numpy().astype(np.uint32),
                numpy["position"],
                numpy["has_gauss"],
                numpy["gauss"],
            )
        )


def _validation_follows(trainer: Trainer) -> bool:
    """Return whether Lightning validates after this micro-batch (its rules for integers)."""
    if trainer.should_stop:  # only after complete steps, see StopsAfterWholeSteps
        return True
    interval = trainer.val_check_batch
    assert interval is not None, "set when training began"
    return (trainer.fit_loop.total_batch_idx + 1) % interval == 0
