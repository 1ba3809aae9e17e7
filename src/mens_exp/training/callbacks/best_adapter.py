"""Selection of the best adapter by validation loss or by a KPI."""

# Lightning types the module of a hook as LightningModule; build.py always passes our module.
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from lightning import Callback
from lightning.pytorch.trainer.states import TrainerFn

from mens_exp.artifacts.metrics import METRICS
from mens_exp.errors import TrainingError

if TYPE_CHECKING:
    from lightning import Trainer

    from mens_exp.training.module import RunRecord, TrainingModule

_LOSS = "val/loss"


class BestAdapter(Callback):
    """Keeps the best adapter by a metric, and restores it at the end of training.

    A KPI is considered only at validations that follow a scorecard, so that every candidate also
    has a validation loss. The best adapter is part of every checkpoint, so a killed run loses
    nothing. A separate file could be ahead of the checkpoint that the run resumes from.
    """

    def __init__(self, run: RunRecord, metric: str = _LOSS) -> None:
        """Attach to ``run``; the declaration of ``metric`` states which direction is better."""
        self.run = run
        self.metric = metric
        self.step: int | None = None
        self.loss: float | None = None
        self.value: float | None = None
        self.validated: torch.Tensor | None = None
        self._adapter: dict[str, torch.Tensor] = {}

    def on_validation_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Keep the adapter if it is the best so far; on a tie, the earliest is kept."""
        if trainer.state.fn is not TrainerFn.FITTING or trainer.sanity_checking:
            return
        value = self._value(trainer.global_step, pl_module)
        if value is None or not self._is_better(value):
            return
        self.step, self.value = trainer.global_step, value
        self.loss = pl_module.validation[_LOSS]
        self.validated = pl_module.validated
        self._adapter = {
            name: parameter.detach().to("cpu", copy=True)
            for name, parameter in pl_module.backend.trainable().items()
        }

    def _value(self, step: int, pl_module: TrainingModule) -> float | None:
        """Return the metric after this step, or None if nothing was scored at it."""
        if self.metric == _LOSS:
            return pl_module.validation[_LOSS]
        scored_step, values = pl_module.scored
        if scored_step != step:
            return None
        if self.metric not in values:
            raise TrainingError(
                "the suite did not measure the metric that selects the best adapter",
                where="adapter.metric",
                found=self.metric.removeprefix("eval/"),
                expected=f"one of {', '.join(name.removeprefix('eval/') for name in values)}",
                remedy="choose one of these; telemetry.jsonl says why it is unknown "
                "(scorecard_step, unknown)",
            )
        return values[self.metric]

    def _is_better(self, value: float) -> bool:
        if self.value is None:
            return True
        if METRICS[self.metric].direction == "max":
            return value > self.value
        return value < self.value

    def on_fit_end(self, trainer: Trainer, pl_module: TrainingModule) -> None:
        """Load the best adapter into the model; callbacks that write the adapter run later."""
        del trainer
        if self.step is None or self.loss is None:
            return
        with torch.no_grad():
            for name, parameter in pl_module.backend.trainable().items():
                parameter.copy_(self._adapter[name])
        pl_module.selected = (self.step, self.loss)
        pl_module.selected_validated = self.validated
        if self.metric != _LOSS:
            self.run.manifest.results["adapter_metric"] = self.metric
            self.run.manifest.results["adapter_metric_value"] = self.value

    def state_dict(self) -> dict[str, Any]:
        """Return the best adapter and its metrics."""
        return {
            "step": self.step,
            "loss": self.loss,
            "value": self.value,
            "validated": self.validated,
            "adapter": self._adapter,
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state; older checkpoints have only the loss."""
        self.step, self.loss = state_dict["step"], state_dict["loss"]
        self.value = state_dict.get("value", self.loss)
        self.validated = state_dict.get("validated")
        self._adapter = state_dict["adapter"]
