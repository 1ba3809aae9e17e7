"""A run that an agent of a W&B sweep started: it is the run that the agent waits for.

What the agent told its process is an input of the run, kept in its manifest: whoever sends the run,
and whenever, sends the agent's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mens_exp.artifacts.plain_yaml import parse_yaml
from mens_exp.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.manifest import Manifest

__all__ = ["AgentRun", "agent_inputs", "recorded_agent"]

_INPUT = "wandb_agent"
_VERSION = "wandb_version"  # of the agent's own file


class AgentRun(NamedTuple):
    """An agent's name for a run, the sweep of the run, and the values drawn for it.

    ``entity`` and ``project`` are those of the sweep; None where the agent did not say.
    """

    run_id: str
    sweep_id: str
    entity: str | None
    project: str | None
    parameters: dict[str, Any]

    def is_of(self, entity: str | None, project: str) -> bool:
        """Tell whether the sweep lies in a project; an entity of None is anybody's."""
        theirs = self.entity in (None, entity) or entity is None
        return theirs and self.project in (None, project)


def agent_inputs(environment: Mapping[str, str]) -> dict[str, Any]:
    """Return what an agent told its process, for a manifest's ``inputs``; empty without one."""
    run_id, sweep_id = environment.get("WANDB_RUN_ID"), environment.get("WANDB_SWEEP_ID")
    if not run_id or not sweep_id:
        return {}
    told = AgentRun(
        run_id,
        sweep_id,
        environment.get("WANDB_ENTITY") or None,
        environment.get("WANDB_PROJECT") or None,
        _drawn(environment.get("WANDB_SWEEP_PARAM_PATH")),
    )
    return {_INPUT: told._asdict()}


def recorded_agent(manifest: Manifest) -> AgentRun | None:
    """Return the agent's run that a run is; None where no agent started it."""
    told = manifest.inputs.get(_INPUT)
    return None if told is None else AgentRun(**told)


def _drawn(path: str | None) -> dict[str, Any]:
    """Read the agent's file of values; what cannot be read is left out: the run has them anyway."""
    if not path:
        return {}
    try:
        stored = parse_yaml(Path(path).read_bytes(), path)
    except (OSError, DataError):
        return {}
    if not isinstance(stored, dict):
        return {}
    return {
        str(name): one["value"]
        for name, one in stored.items()
        if name != _VERSION and isinstance(one, dict) and "value" in one
    }
