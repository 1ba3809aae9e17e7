"""The choice of the adapter that a run keeps, and of the one that a merge reads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from mens_exp.config.fields import Effect, setting, when

__all__ = ["AdapterConfig", "Selection"]


class Selection(Enum):
    """The adapter of a run that is written, scored and reported."""

    last = "last"
    best = "best"


@dataclass(kw_only=True, slots=True)
class AdapterConfig:
    """The adapter that is the run's result, and the one that a merge reads."""

    file: str | None = setting(
        None,
        "A safetensors file of an adapter, with meta= beside it (merge); `adapter=<file>` on the "
        "command line says the same.",
        read_by={"merge"},
        only_if=when(
            "task.name",
            "merge",
            remedy="drop adapter=, or start from it with lora.init_from=<its directory>",
        ),
        idle=None,
    )

    select: Selection = setting(
        Selection.last,
        "last: the one of the last step; best: the one that adapter.metric holds best, by default "
        "of the lowest validation loss seen, the final validation included (needs "
        "trainer.val_check_interval).",
        changes=Effect.TRAINING,
    )
    metric: str = setting(
        "val/loss",
        "What adapter.select=best goes by: val/loss, or a KPI such as task_success or parse_rate "
        "that callbacks.scorecard measures while training runs.",
        only_if=when("adapter.select", "best"),
        idle="val/loss",
        aliases={"metric_for_best_model": "Transformers and TRL"},
    )
