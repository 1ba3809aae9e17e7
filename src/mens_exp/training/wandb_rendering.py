"""What W&B shows of a run: pure functions from the JSON record to names, settings, tables.

wandb itself is imported only by the functions that build its own objects.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.scorecard import Scorecard, read_item_events
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.training.wandb_study import study_tables

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import wandb

    from mens_exp.artifacts.manifest import Manifest
    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Event
    from mens_exp.config.logger import WandbLogger

__all__ = ["artifacts", "config_of", "name_of", "settings_of", "summary_of", "tables", "tags_of"]

_TAG_CHARACTERS = 64  # W&B refuses a longer tag
_NAME_CHARACTERS = 128  # W&B refuses a longer run name
_FINISH_S = 600.0  # unverified guess; what is not uploaded by then is left for `wandb sync`
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
    """Return the arguments of ``wandb.Settings``.

    Args:
        logger: the configured sink.
        run_dir: where everything is staged.
        manifest: the record at the start of the run.
        config: the resolved configuration, for the model's name.
        run_id: the id of the W&B run.
    """
    shown = {
        "mode": logger.mode.value,
        "project": logger.project,
        "entity": logger.entity,
        "run_group": logger.group or manifest.experiment or _sweep(run_dir),
        "run_name": logger.name or name_of(manifest, config),
        "run_tags": tags_of(manifest.overrides, logger.tags),
        "run_job_type": manifest.task,
        "run_id": run_id,
        "resume": "allow",
    }
    quiet = {"silent": True, "quiet": True, "console": "off"}
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
    place = {"root_dir": str(run_dir.path.absolute()), "use_dot_wandb": False}
    end = {"finish_timeout": _FINISH_S, "finish_timeout_raises": True}
    # Apart from any run that somebody else has open in this process.
    return {**shown, **quiet, **private, **place, **end, "reinit": "create_new"}


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


def artifacts(run_dir: RunDir, manifest: Manifest, run_id: str) -> Iterator[wandb.Artifact]:
    """Yield the adapter, where there is one, and manifest.json, each with its files' hashes.

    The files are copied into wandb's staging directory: a resumed run will replace them.
    """
    if run_dir.adapter.is_dir():
        # A dot begins the name of what a dead writer left half-written.
        files = [path for path in run_dir.adapter.rglob("[!.]*") if path.is_file()]
        yield _artifact("adapter", run_id, manifest, run_dir.adapter, sorted(files))
    yield _artifact("manifest", run_id, manifest, run_dir.path, [run_dir.manifest])


def _sweep(run_dir: RunDir) -> str | None:
    # Hydra leaves the first in the directory of a sweep, wherever hydra.sweep.dir puts that.
    parent = run_dir.path.absolute().parent
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
    import wandb

    items: dict[str, dict[str, Any]] = {}
    for event in read_item_events(path):
        if event["sample"] > 0:
            continue  # a row an item
        row = items.setdefault(event["item_id"], {"item_id": event["item_id"]})
        row |= {"prompt": event["prompt"], "reference": event["reference"]}
        row |= {event["condition"]: event["completion"]}
        row |= {f"{event['condition']}_parses": event["parses"]}
    shown = ("item_id", "prompt", "reference", "base", "tuned", "base_parses", "tuned_parses")
    data = [[row.get(name) for name in shown] for row in items.values()]
    return wandb.Table(columns=list(shown), data=data)


def _artifact(
    kind: str, run_id: str, manifest: Manifest, root: Path, files: Sequence[Path]
) -> wandb.Artifact:
    import wandb

    hashes = {path.relative_to(root).as_posix(): sha256_file(path) for path in files}
    metadata = {"config_digest": manifest.config_digest, "sha256": hashes}
    artifact = wandb.Artifact(f"{kind}-{run_id}", type=kind, metadata=metadata)
    for name in hashes:
        artifact.add_file(str(root / name), name=name)
    return artifact
