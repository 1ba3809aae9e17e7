"""Sweeps, agents and local controllers of the W&B stand-in.

The service draws nothing itself: a test sets the suggestions, or W&B's local controller draws.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import yaml


@dataclass
class Sweep:
    """The data of one sweep."""

    id: str  # of the object; a user and an agent use ``name``
    name: str
    entity: str
    project: str
    config: dict[str, Any]
    controller: dict[str, Any] = field(default_factory=dict)
    scheduled: list[dict[str, str]] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)  # runs that no agent has begun
    runs: list[str] = field(default_factory=list)
    is_exhausted: bool = False  # or stopped by a user

    @property
    def is_local(self):
        """Tell whether a local controller draws."""
        return (self.config.get("controller") or {}).get("type") == "local"


class Sweeps:
    """The sweeps and agents of a service; a test reads their requests and sets the answers."""

    def __init__(self, service):
        self._service = service
        self.by_name = {}
        self.agents = {}
        self.suggestions = []  # of the service itself, in order
        self.stopping = set()  # runs that a user has stopped
        self.commands = []  # sent to agents

    # Requests of the client.

    def on_upsert_sweep(self, told):
        if told.get("id") is None:
            number = len(self.by_name)
            entity, project = told["entityName"], told["projectName"]
            name = f"sweep{number:03}"
            sweep = Sweep(f"id-{name}", name, entity or "lab", project, {})
            self.by_name[sweep.name] = sweep
        else:
            sweep = next(one for one in self.by_name.values() if one.id == told["id"])
        if told.get("config") is not None:
            sweep.config = yaml.safe_load(told["config"])
        if told.get("state") == "FINISHED":
            sweep.is_exhausted = True
        if told.get("controller") is not None:
            self._controlled(sweep, json.loads(told["controller"]))
        shown = {"name": sweep.name, "project": self._project(sweep)}
        return {"upsertSweep": {"sweep": shown, "configValidationWarnings": []}}

    def on_create_agent(self, told):
        agent = f"agent-{len(self.agents)}"
        self.agents[agent] = self.by_name[told["sweep"]]
        return {"createAgent": {"agent": {"id": agent}}}

    def on_heartbeat(self, told):
        commands = self._commands(self.agents[told["id"]], json.loads(told["runState"]))
        self.commands += commands
        beat = {"agent": {"id": told["id"]}, "commands": json.dumps(commands)}
        return {"agentHeartbeat": beat}

    def on_sweep_with_runs(self, told):
        sweep = self.by_name.get(told["sweep"])
        if sweep is None or sweep.project != told["project"]:
            return {"project": {"sweep": None}}
        keys = json.loads(told["specs"]).get("keys", [])
        edges = [{"node": self._shown(self._service.runs[name], keys)} for name in sweep.runs]
        known = {
            "id": sweep.id,
            "name": sweep.name,
            "method": sweep.config["method"],
            "state": self._state(sweep),
            "config": yaml.safe_dump(sweep.config),
            "createdAt": "2026-11-20T05:58:01",
            "controller": json.dumps(sweep.controller),
            "scheduler": json.dumps({"scheduled": sweep.scheduled}),
            "runs": {"edges": edges},
        }
        absent = ("description", "heartbeatAt", "updatedAt", "earlyStopJobRunning", "bestLoss")
        return {"project": {"sweep": known | dict.fromkeys(absent)}}

    # The course of a sweep.

    def _project(self, sweep):
        entity = {"id": "e", "name": sweep.entity}
        return {"id": "p", "name": sweep.project, "entity": entity}

    def _controlled(self, sweep, controller):
        sweep.controller = controller
        known = {one["id"] for one in sweep.scheduled}
        for entry in controller.get("schedule", []):
            if entry["id"] in known:
                continue
            drawn = entry["data"]["args"]
            if drawn is None:
                sweep.is_exhausted = True
                continue
            name = self._create(sweep, drawn)
            sweep.scheduled.append({"id": entry["id"], "runid": name})
        self.stopping |= set(controller.get("earlystop", []))

    def _create(self, sweep, drawn):
        name = f"{sweep.name}r{len(sweep.runs)}"
        self._service.expect(name, sweep.project, sweep.name, drawn)
        sweep.runs.append(name)
        sweep.waiting.append(name)
        return name

    def _commands(self, sweep, running):
        stops = [{"type": "stop", "run_id": name} for name in running if name in self.stopping]
        if running:
            return stops
        if not sweep.waiting and not sweep.is_local:
            if not self.suggestions:
                sweep.is_exhausted = True
            else:
                drawn = {key: {"value": one} for key, one in self.suggestions.pop(0).items()}
                self._create(sweep, drawn)
        if sweep.waiting:
            name = sweep.waiting.pop(0)
            drawn = self._service.runs[name].config
            told = {"run_id": name, "program": sweep.config["program"], "args": drawn}
            return [{"id": f"command-{name}", "type": "run", **told}]
        return [{"type": "exit"}] if sweep.is_exhausted else []

    def _state(self, sweep):
        ended = all(self._service.runs[name].exit_code is not None for name in sweep.runs)
        return "FINISHED" if sweep.is_exhausted and ended else "RUNNING"

    def _shown(self, run, keys):
        if run.exit_code is not None:
            state = "finished" if run.exit_code == 0 else "failed"
        else:
            state = "running" if run.is_begun else "pending"
        rows = [{key: row[key] for key in keys} for row in run.history if set(keys) <= row.keys()]
        return {
            "name": run.name,
            "state": state,
            "config": json.dumps(run.config),
            "exitcode": run.exit_code,
            "heartbeatAt": None,
            "shouldStop": run.name in self.stopping,
            "failed": state == "failed",
            "stopped": run.name in self.stopping and run.exit_code is not None,
            "running": state == "running",
            "summaryMetrics": json.dumps(run.summary),
            "sampledHistory": [rows],
        }
