"""Memory and load of the machine during training."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning import Callback

from mens_exp.artifacts import host

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule

_PEAKS = {"mem/peak_rss_bytes": "peak_rss_bytes", "mem/peak_cuda_bytes": "peak_cuda_bytes"}


class MemoryWatch(Callback):
    """Records memory and load at each step, and returns freed pages periodically.

    The load is that of the whole machine: processors, memory, and the GPU of the process. The run's
    peak is the maximum over all processes that worked on it, up to their last checkpoint.
    """

    def __init__(self, run: RunRecord, trim_every_n_steps: int = 2) -> None:
        """Attach to ``run``; trim the host's heap every ``trim_every_n_steps`` optimizer steps."""
        self.run = run
        self.trim_every_n_steps = trim_every_n_steps
        self._peaks: dict[str, int | None] = dict.fromkeys(_PEAKS)

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Begin the interval over which the load of the first step is taken."""
        del trainer, pl_module
        host.load()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the memory of a finished step."""
        del outputs, batch, batch_idx
        if not pl_module.at_step_boundary:
            return
        if trainer.global_step % self.trim_every_n_steps == 0:
            host.release_free()
        pl_module.record("mem/rss_bytes", host.rss_bytes())
        for name, value in host.load().items():
            pl_module.record(name, value)
        for name, probe in _PEAKS.items():
            value = getattr(host, probe)()
            if value is not None:
                self._peaks[name] = max(value, self._peaks[name] or 0)
                pl_module.record(name, value)

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Record the peaks in the manifest."""
        del trainer, pl_module
        for name, value in self._peaks.items():
            self.run.manifest.results[name.removeprefix("mem/")] = value

    def state_dict(self) -> dict[str, Any]:
        """Return the peaks so far."""
        return dict(self._peaks)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the peaks of an earlier process."""
        self._peaks = dict(state_dict)
