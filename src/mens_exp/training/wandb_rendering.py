"""Rendering of a run for W&B: pure functions from the JSON record to settings and tables.

wandb itself is imported only by the functions that build its own objects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.plain_yaml import parse_yaml
from mens_exp.artifacts.scorecard import Condition, Scorecard, read_item_events
from mens_exp.evals.kpi_table import ITEM_VALUES, KPIS, item_values, name_of_key, name_under
from mens_exp.training.wandb_names import agent_of, display_name, group_of, tags_of
from mens_exp.training.wandb_study import study_tables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import wandb

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Event
    from mens_exp.config.logger import WandbLogger

__all__ = [
    "ALWAYS_SHOWN",
    "beside_config",
    "config_of",
    "quiet_settings",
    "settings_of",
    "summary_of",
    "tables",
]

_SIDES = tuple(map(str, Condition))  # stand first, and are there where nothing was answered
ALWAYS_SHOWN = frozenset({"parse_rate", "error"})
"""Of an answer; every other column is there where some answer has it."""


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
        config: the resolved configuration, for the display name.
        run_id: the id of the W&B run.
    """
    shown = {
        "mode": "offline",
        "project": logger.project,
        "entity": logger.entity,
        "run_group": group_of(logger, run_dir, manifest),
        "run_name": display_name(logger, run_dir, manifest, config),
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


def beside_config(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return what the configuration of the W&B run has besides: links, and what an agent drew.

    An evaluation links to the run that it scored. Drawn values stand under the names of the sweep,
    where its search looks for them.
    """
    agent = agent_of(run_dir, manifest)
    scored = manifest.inputs.get("subject_run")
    links = {} if scored is None else {"evaluated_run": scored}
    return {**links, **({} if agent is None else agent.parameters)}


def config_of(run_dir: RunDir, events: Sequence[Event]) -> dict[str, Any]:
    """Return the resolved configuration, with `plan` and `facts` as far as they are known."""
    payloads = {record["event"]: record["payload"] for record in events}
    config = payloads.get("run_started", {}).get("config") or _composed(run_dir)
    return {**config, **{name: payloads[name] for name in ("plan", "facts") if name in payloads}}


def summary_of(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return the status, the results, and the KPIs as ``<condition>/<kpi>``.

    A KPI has the name of the table of KPIs, whether scorecard or manifest spells it otherwise.
    """
    return {
        "status": str(manifest.status),
        **{
            name_under(condition, key): value
            for condition, kpis in _conditions(run_dir).items()
            for key, value in kpis.items()
        },
        **{_name_of_result(key): value for key, value in manifest.results.items()},
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


def _name_of_result(key: str) -> str:
    condition, _, kpi = key.partition("_")
    return name_under(condition, kpi) if condition in _SIDES and kpi in KPIS else key


def _composed(run_dir: RunDir) -> dict[str, Any]:
    if not run_dir.config.is_file():
        return {}
    return dict(parse_yaml(run_dir.config.read_bytes(), str(run_dir.config)) or {})


def _conditions(run_dir: RunDir) -> dict[str, dict[str, float | int | None]]:
    return Scorecard.read(run_dir.scorecard).conditions if run_dir.scorecard.is_file() else {}


def _scorecard_table(conditions: Mapping[str, Mapping[str, float | None]]) -> wandb.Table:
    import wandb

    keys = {name_of_key(key): key for values in conditions.values() for key in sorted(values)}
    rows = [
        [condition, *(values.get(keys[name]) for name in sorted(keys))]
        for condition, values in conditions.items()
    ]
    return wandb.Table(columns=["condition", *sorted(keys)], data=rows)


def _predictions_table(path: Path) -> wandb.Table:
    """One row an item: what was asked, the answers side by side, and what is known of each."""
    import wandb

    items: dict[str, dict[str, Any]] = {}
    sides: dict[str, None] = dict.fromkeys(_SIDES)
    found = set(ALWAYS_SHOWN)
    for event in read_item_events(path):
        if event["sample"] > 0:
            continue  # a row an item
        side = event["condition"]
        sides[side] = None
        row = items.setdefault(event["item_id"], {"item_id": event["item_id"]})
        row |= {"prompt": event["prompt"], "reference": event["reference"]}
        row[side] = event["completion"]
        values = item_values(event)
        found |= {name for name, value in values.items() if value is not None}
        row |= {f"{side}/{name}": value for name, value in values.items()}
    measured = [name for name in ITEM_VALUES if name in found]
    shown: list[str | int] = ["item_id", "prompt", "reference", *sides]
    shown += [f"{side}/{name}" for name in measured for side in sides]
    data = [[row.get(str(name)) for name in shown] for row in items.values()]
    return wandb.Table(columns=list(shown), data=data)
