"""A run that an agent of a W&B sweep started: it is the run that the agent waits for."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AgentRun", "agent_run"]


class AgentRun(NamedTuple):
    """What an agent calls a run, and the sweep that it is of."""

    run_id: str
    sweep_id: str


def agent_run(environment: Mapping[str, str]) -> AgentRun | None:
    """Return what an agent told its process; None where no agent started it."""
    run_id, sweep_id = environment.get("WANDB_RUN_ID"), environment.get("WANDB_SWEEP_ID")
    return AgentRun(run_id, sweep_id) if run_id and sweep_id else None
