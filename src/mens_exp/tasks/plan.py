"""task=plan: say what a run would do and cost, without running it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from mens_exp.artifacts import atomic
from mens_exp.plan.estimate import make_plan
from mens_exp.plan.preflight import writable_cache
from mens_exp.report import terminal

if TYPE_CHECKING:
    from mens_exp.config.root import RunConfig
    from mens_exp.tasks.run import Run

__all__ = ["plan"]


def plan(config: RunConfig, run: Run) -> None:
    """Write plan.json and show it."""
    made = make_plan(config, writable_cache())
    atomic.write_json(run.dir.plan, made)
    run.telemetry.emit("plan", made)
    Console().print(terminal.plan_table(made))
