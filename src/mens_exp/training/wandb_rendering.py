"""What W&B shows of a run: pure functions from the JSON record to names, settings, tables.

wandb itself is imported only by the functions that build its own objects.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.scorecard import Scorecard, read_item_events
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.training.wandb_agent import recorded_agent
from mens_exp.training.wandb_study import study_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import wandb

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Event
    from mens_exp.config.logger import WandbLogger
    from mens_exp.training.wandb_agent import AgentRun

__all__ = [
    "agent_of",
    "config_of",
    "drawn_for",
    "id_of",
    "name_of",
    "quiet_settings",
    "settings_of",
    "summary_of",
    "tables",
    "tags_of",
]

_TAG_CHARACTERS = 64  # W&B refuses a longer tag
_NAME_CHARACTERS = 128  # W&B refuses a longer run name
_ITEM_KPIS = (
    *("parses", "compile_pass_1", "compile_pass_n", "canonical_pass", "strictness"),
    *("pass_1", "task_success", "repair_depth", "latency_ms"),
)
# Overrides that say nothing about the experiment, or that the name spells in its own way.
_NO_TAG = frozenset({"hydra", "logger"})
_NO_NAME = _NO_TAG | {"backend", "experiment", "model", "path", "resume", "seed", "task"}


def settings_of(
    logger: WandbLogger,
    run_dir: RunDir,
    manifest: Manifest,
    config: Mapping[str, Any],
    run_id: str,
) -> dict[str, Any]:
    """Return the arguments of ``wandb.Settings`` for a run on disk.

    Args:
        logger: the configured sink.
        run_dir: where everything is staged.
        manifest: the record at the start of the run.
        config: the resolved configuration, for the model's name.
        run_id: the id of the W&B run.
    """
    shown = {
        "mode": "offline",
        "project": logger.project,
        "entity": logger.entity,
        "run_group": logger.group or _sweep(run_dir, manifest) or manifest.experiment,
        "run_name": logger.name or name_of(manifest, config),
        "run_tags": tags_of(manifest.overrides, logger.tags),
        "run_job_type": manifest.task,
        "run_id": run_id,
    }
    agent = agent_of(run_dir, manifest)
    if agent is not None and agent.is_of(logger.entity, logger.project):
        shown["sweep_id"] = agent.sweep_id
    place = {"root_dir": str(run_dir.path.absolute())}
    return {**quiet_settings(), **shown, **place}


def quiet_settings() -> dict[str, Any]:
    """Return the arguments of ``wandb.Settings`` that keep it silent, apart and discreet."""
    quiet = {"silent": True, "quiet": True, "console": "off", "use_dot_wandb": False}
    # The record has what may be known of code and machine; wandb collects nothing of its own.
    private = {
        "disable_git": True,
        "disable_code": True,
        "save_code": False,
        "label_disable": True,
        "host": "",
        "program": "mens_exp",
        "x_disable_machine_info": True,
        "x_disable_meta": True,
        "x_disable_stats": True,
        "x_save_requirements": False,
    }
    # Apart from any run that somebody else has open in this process.
    return {**quiet, **private, "resume": "allow", "reinit": "create_new"}


def id_of(run_dir: RunDir, manifest: Manifest) -> str:
    """Return the id of the W&B run: that of ours, behind its sweep's where it is a job of one.

    A job's own name says where it stands in its sweep and what it is composed of; the same sweep,
    launched again, has jobs of the same names. A run that an agent started has the agent's.
    """
    agent = agent_of(run_dir, manifest)
    if agent is not None:
        return agent.run_id
    sweep = _sweep_at(run_dir.path)
    whole = manifest.run_id if sweep is None else f"{sweep}_{manifest.run_id}"
    return re.sub(r"[^A-Za-z0-9_.-]", "-", whole)


def agent_of(run_dir: RunDir, manifest: Manifest) -> AgentRun | None:
    """Return the agent's run that a run is; the jobs of a sweep that an agent launched are none."""
    return None if _sweep_at(run_dir.path) is not None else recorded_agent(manifest)


def drawn_for(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return what an agent drew, under the names of its sweep: there its search looks for them."""
    agent = agent_of(run_dir, manifest)
    return {} if agent is None else agent.parameters


def name_of(manifest: Manifest, config: Mapping[str, Any]) -> str:
    """Return a readable name: model, backend, what was changed, seed; at most 128 characters."""
    model = (config.get("model") or {}).get("name") or manifest.choices.get("model")
    start = [part for part in (model, manifest.choices.get("backend")) if part]
    changed = [_short(text) for text in manifest.overrides if _group(text) not in _NO_NAME]
    seed = f"seed{manifest.seed}"
    room = _NAME_CHARACTERS - len(seed) - 1
    return f"{' '.join([*start, *changed])[:room].rstrip()} {seed}".lstrip()


def tags_of(overrides: Sequence[str], added: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides, cut to W&B's 64 characters, then the tags the user added."""
    made = [text[:_TAG_CHARACTERS] for text in overrides if _group(text) not in _NO_TAG]
    return tuple(dict.fromkeys([*made, *added]))


def config_of(run_dir: RunDir, events: Sequence[Event]) -> dict[str, Any]:
    """Return the resolved configuration, with `plan` and `facts` as far as they are known."""
    payloads = {record["event"]: record["payload"] for record in events}
    config = payloads.get("run_started", {}).get("config") or _composed(run_dir)
    return {**config, **{name: payloads[name] for name in ("plan", "facts") if name in payloads}}


def summary_of(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return the status, the results, and the scorecard's KPIs as ``<condition>_<kpi>``."""
    return {
        "status": str(manifest.status),
        **{
            f"{condition}_{kpi}": value
            for condition, kpis in _conditions(run_dir).items()
            for kpi, value in kpis.items()
        },
        **manifest.results,
    }


def tables(run_dir: RunDir) -> dict[str, wandb.Table]:
    """Return `scorecard` (condition × KPI), `predictions` (one row an item) and a study's tables.

    Each where it is recorded.

    Raises:
        DataError: one of these files cannot be read.
    """
    found = {}
    if conditions := _conditions(run_dir):
        found["scorecard"] = _scorecard_table(conditions)
    if run_dir.events.is_file():
        found["predictions"] = _predictions_table(run_dir.events)
    if run_dir.comparison.is_file():
        found |= study_tables(Comparison.read(run_dir.comparison))
    return found


def _sweep(run_dir: RunDir, manifest: Manifest) -> str | None:
    """Return the sweep that a run is of, or the run that it reads."""
    subject = manifest.inputs.get("subject")
    own = _sweep_at(run_dir.path)
    return own if own is not None or not isinstance(subject, str) else _sweep_at(Path(subject))


def _sweep_at(run: Path) -> str | None:
    # Hydra leaves the first in the directory of a sweep, wherever hydra.sweep.dir puts that.
    parent = run.absolute().parent
    marks = (parent / "multirun.yaml", SweepDir(parent).record)
    return parent.name if any(mark.is_file() for mark in marks) else None


def _group(override: str) -> str:
    return re.split(r"[.=/@]", override.lstrip("+~"), maxsplit=1)[0]


def _short(override: str) -> str:
    key, equals, value = override.partition("=")
    return f"{key.rsplit('.', 1)[-1].lstrip('+')}={value}" if equals else override


def _composed(run_dir: RunDir) -> dict[str, Any]:
    import yaml

    if not run_dir.config.is_file():
        return {}
    return dict(yaml.safe_load(run_dir.config.read_text(encoding="utf-8")) or {})


def _conditions(run_dir: RunDir) -> dict[str, dict[str, float | int | None]]:
    return Scorecard.read(run_dir.scorecard).conditions if run_dir.scorecard.is_file() else {}


def _scorecard_table(conditions: Mapping[str, Mapping[str, float | None]]) -> wandb.Table:
    import wandb

    kpis = sorted({kpi for values in conditions.values() for kpi in values})
    rows = [[name, *map(values.get, kpis)] for name, values in conditions.items()]
    return wandb.Table(columns=["condition", *kpis], data=rows)


def _predictions_table(path: Path) -> wandb.Table:
    """One row an item: what was asked, the answers, and each KPI that an answer has."""
    import wandb

    items: dict[str, dict[str, Any]] = {}
    found: set[str] = {"parses"}
    for event in read_item_events(path):
        if event["sample"] > 0:
            continue  # a row an item
        row = items.setdefault(event["item_id"], {"item_id": event["item_id"]})
        row |= {"prompt": event["prompt"], "reference": event["reference"]}
        row |= {event["condition"]: event["completion"]}
        kpis = {name: event[name] for name in _ITEM_KPIS}  # type: ignore[literal-required]
        found |= {name for name, value in kpis.items() if value is not None}
        row |= {f"{event['condition']}_{name}": value for name, value in kpis.items()}
    measured = [name for name in _ITEM_KPIS if name in found]
    shown: list[str | int] = ["item_id", "prompt", "reference", "base", "tuned"]
    shown += [f"{side}_{name}" for name in measured for side in ("base", "tuned")]
    data = [[row.get(str(name)) for name in shown] for row in items.values()]
    return wandb.Table(columns=list(shown), data=data)
