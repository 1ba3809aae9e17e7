"""Training progress in a terminal or in a notebook."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

from lightning import Callback
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

if TYPE_CHECKING:
    from lightning import Trainer
    from rich.progress import TaskID

    from mens_exp.training.module import RunRecord, TrainingModule


class Progress(Callback):
    """Shows loss, learning rate, supervised tokens per second and time left."""

    def __init__(self, run: RunRecord, plain_every_n_steps: int = 10) -> None:
        """Draw a bar on a terminal or in a notebook.

        Elsewhere, print a line every ``plain_every_n_steps`` steps.
        """
        self.run = run
        self.plain_every_n_steps = plain_every_n_steps
        self.console = Console(stderr=True)
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._cell: _CellBar | None = None

    def on_train_start(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Start the bar."""
        del pl_module
        if self.console.is_jupyter:
            self._cell = _CellBar(trainer.max_steps)
            self._cell.show(trainer.global_step, "first step …")
            return
        if not self.console.is_terminal:
            return
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.description}"),
            console=self.console,
        )
        self._task = self._bar.add_task(
            "first step …", total=trainer.max_steps, completed=trainer.global_step
        )
        self._bar.start()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: TrainingModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show a finished step."""
        del outputs, batch, batch_idx
        if not pl_module.at_step_boundary:
            return
        step, text = trainer.global_step, _line(pl_module.step_metrics)
        if self._cell is not None:
            self._cell.show(step, text)
        elif self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, description=text)
        elif step % self.plain_every_n_steps == 0 or step in {1, trainer.max_steps}:
            self.console.print(f"step {step}/{trainer.max_steps}  {text}", soft_wrap=True)

    def on_train_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Stop the bar."""
        del trainer, pl_module
        self._stop()

    def on_exception(
        self, trainer: Trainer, pl_module: TrainingModule, exception: BaseException
    ) -> None:
        """Stop the bar, so that the error message is readable."""
        del trainer, pl_module, exception
        self._stop()

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class _CellBar:
    """A bar in the output of a notebook's cell, drawn again for each step.

    rich needs ipywidgets in both the kernel and its front end; an HTML element does not.
    """

    def __init__(self, total: int) -> None:
        """Start a bar of ``total`` steps; -1 if epochs bound the run."""
        self._total = total
        self._handle: Any = None

    def show(self, step: int, text: str) -> None:
        """Draw the bar at a step, in place."""
        from IPython.display import HTML, display

        known = self._total > 0
        width = f' value="{step}" max="{self._total}"' if known else ""
        of = f"/{self._total}" if known else ""
        element = f"<progress{width}></progress> step {step}{of} · {escape(text)}"
        drawn = HTML(element)  # type: ignore[no-untyped-call]
        if self._handle is None:
            self._handle = display(drawn, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(drawn)


def _line(metrics: dict[str, float]) -> str:
    parts = [f"loss {metrics['train/loss']:.3f}", f"lr {metrics['optim/lr']:.1e}"]
    if "perf/supervised_tokens_per_s" in metrics:
        parts.append(f"{metrics['perf/supervised_tokens_per_s']:.0f} supervised tok/s")
    if "perf/eta_s" in metrics:
        minutes, seconds = divmod(round(metrics["perf/eta_s"]), 60)
        parts.append(f"{minutes}:{seconds:02d} left")
    return " · ".join(parts)
