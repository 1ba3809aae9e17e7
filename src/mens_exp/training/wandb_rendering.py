"""Rendering of a run for W&B: settings, curves, tables and artifacts from the JSON record alone.

An artifact's version is determined by its content, so that the same files, sent twice or read by
another run, are the same version. This is how runs are linked into one lineage. Only the functions
that build wandb objects import wandb.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import write_json
from mens_exp.artifacts.digest import sha256_file
from mens_exp.artifacts.manifest import Manifest
from mens_exp.artifacts.metrics import METRICS
from mens_exp.artifacts.scorecard import Condition
from mens_exp.artifacts.telemetry import read_events
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.validate import settings_read
from mens_exp.evals.kpis import KPIS, name_under
from mens_exp.training.wandb_names import (
    agent_of,
    display_name,
    group_of,
    id_of,
    notes_of,
    study_of,
    tags_of,
)
from mens_exp.training.wandb_tables import conditions_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import wandb

    from mens_exp.artifacts.run_dir import RunDir
    from mens_exp.artifacts.telemetry import Event
    from mens_exp.config.logger import WandbLogger

_METRICS = "metrics"  # of the user, by name
_SIDES = tuple(map(str, Condition))  # come first, and exist even without answers


def settings_of(
    logger: WandbLogger,
    run_dir: RunDir,
    manifest: Manifest,
    config: Mapping[str, Any],
    run_id: str,
    process: int | None = None,
) -> dict[str, Any]:
    """Return the arguments of ``wandb.Settings`` for a run on disk.

    Args:
        logger: the configured sink.
        run_dir: where everything is staged.
        manifest: the record at the start of the run.
        config: the resolved configuration, for the display name.
        run_id: the id of the W&B run.
        process: id of the process that works on the run; None if it has ended.
    """
    study = study_of(run_dir.path)
    shown = {
        "mode": "offline",
        "project": logger.project,
        "entity": logger.entity,
        "run_group": group_of(logger, run_dir, manifest),
        "run_name": display_name(logger, run_dir, manifest, config),
        "run_tags": tags_of(manifest.overrides, logger.tags, study),
        "run_notes": notes_of(logger.notes, study),
        "run_job_type": manifest.task,
        "run_id": run_id,
    }
    agent = agent_of(run_dir, manifest)
    if agent is not None and agent.is_of(logger.entity, logger.project):
        shown["sweep_id"] = agent.sweep_id
    place = {"root_dir": str(run_dir.path.absolute())}
    return {**quiet_settings(), **_collected(logger, process), **shown, **place}


def _collected(logger: WandbLogger, process: int | None) -> dict[str, Any]:
    """Return the settings for what W&B may collect itself; by default nothing."""
    found: dict[str, Any] = {}
    if logger.system_metrics and process is not None:
        found |= {"x_disable_stats": False, "x_disable_machine_info": False, "x_stats_pid": process}
    if logger.git:
        found |= {"disable_git": False, "x_disable_meta": False, "x_disable_machine_info": False}
    if logger.requirements:
        found["x_save_requirements"] = True
    if logger.console:
        found["console"] = "wrap"
    return found


def quiet_settings() -> dict[str, Any]:
    """Return ``wandb.Settings`` arguments for a silent, separate run without data collection."""
    quiet = {"silent": True, "quiet": True, "console": "off", "use_dot_wandb": False}
    # The record covers code and machine; wandb collects nothing itself.
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
    # Separate from any run that other code has open in this process.
    return {**quiet, **private, "resume": "allow", "reinit": "create_new"}


def config_entries(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return the additional entries of the W&B config: links, and values drawn by an agent.

    An evaluation links to the run that it scored. Drawn values are stored under the sweep's names,
    where its search looks for them.
    """
    agent = agent_of(run_dir, manifest)
    scored = manifest.inputs.get("subject_run")
    links = {} if scored is None else {"evaluated_run": scored}
    return {**links, **({} if agent is None else agent.parameters)}


def config_of(run_dir: RunDir, manifest: Manifest, events: Sequence[Event]) -> dict[str, Any]:
    """Return the resolved configuration that the task reads, with `plan` and `facts` if known."""
    payloads = {record["event"]: record["payload"] for record in events}
    config = payloads.get("run_started", {}).get("config") or _composed(run_dir)
    names: tuple[str, ...] = ("plan", "facts")
    known = {name: payloads[name] for name in names if name in payloads}
    return {**settings_read(config, manifest.task), **known}


def mirror_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of a run's W&B mirror; empty if it has none."""
    chosen = config.get("logger")
    if not isinstance(chosen, dict):
        return {}
    nodes = [chosen] if "sink" in chosen else chosen.values()
    mirrors = (one for one in nodes if isinstance(one, dict) and one.get("sink") == "wandb")
    return next(mirrors, {})


def summary_of(run_dir: RunDir, manifest: Manifest) -> dict[str, Any]:
    """Return the status, the results, and the KPIs as ``<condition>/<kpi>``.

    KPIs are named as in the table of KPIs, even if scorecard or manifest name them differently.
    ``best/<kpi>`` is the best point of a KPI's curve, in the direction that its metric declares;
    the adapter of that step may not be the one that was kept.
    """
    return {
        "status": str(manifest.status),
        **_best(run_dir, manifest),
        **{
            name_under(condition, key): value
            for condition, kpis in conditions_of(run_dir).items()
            for key, value in kpis.items()
        },
        **{
            _name_of_result(key): value
            for key, value in manifest.results.items()
            if key != _METRICS
        },
        **(manifest.results.get(_METRICS) or {}),
    }


_BEST = {"min": min, "max": max}


def _best(run_dir: RunDir, manifest: Manifest) -> dict[str, float]:
    """Return the best value of each metric of the tuned model during training."""
    events = read_events(run_dir.telemetry) if run_dir.telemetry.is_file() else []
    own = {name: one["direction"] for name, one in manifest.facts.get(_METRICS, {}).items()}
    directions = {name: one.direction for name, one in METRICS.items()} | own
    points: dict[str, list[float]] = {}
    for event in events:
        payload = event["payload"]
        if payload.get("condition", "tuned") != "tuned":
            continue
        if event["event"] in {"validation", "scorecard_step"}:
            found = payload
        else:  # the users' metrics may be in any row
            rows = {**payload, **payload.get("values", {})}
            found = {name: rows[name] for name in own.keys() & rows.keys()}
        for name, value in found.items():
            if directions.get(name) in _BEST and value is not None:
                points.setdefault(name, []).append(value)
    return {_best_name(name): _BEST[directions[name]](of) for name, of in sorted(points.items())}


def _best_name(metric: str) -> str:
    """Return ``best/<kpi>``, or ``best/<metric>`` for a metric of the user's."""
    shown = shown_as(metric)
    return f"best/{shown.removeprefix(f'{Condition.TUNED}/')}"


def _name_of_result(key: str) -> str:
    condition, _, kpi = key.partition("_")
    return name_under(condition, kpi) if condition in _SIDES and kpi in KPIS else key


def _composed(run_dir: RunDir) -> dict[str, Any]:
    if not run_dir.config.is_file():
        return {}
    return dict(parse_yaml(run_dir.config.read_bytes(), str(run_dir.config)) or {})


_TOKENS = "data/supervised_tokens"
_OF_SCORECARD = "eval/"


class EventFeed:
    """Passes events to an open W&B run, in order, each with the time at which it happened."""

    def __init__(self, sink: wandb.Run, drawn: Mapping[str, Any] | None = None) -> None:
        """Define the axes of the run's metrics.

        Args:
            sink: the run.
            drawn: values drawn by an agent; configuration values never replace them, or the search
                would miss them.
        """
        self._sink = sink
        self._drawn = drawn or {}
        self._tokens = 0  # supervised tokens at the latest step, the second axis
        self.last_step = 0
        self._last_s: float | None = None
        self._is_open = False  # whether the last row can still change
        sink.define_metric("step")
        for metric in METRICS.values():
            if metric.name == _TOKENS:  # selectable as axis in any chart
                sink.define_metric(metric.name)
            else:
                self._define(shown_as(metric.name), metric.reduction)

    def _define(self, name: str, reduction: str) -> None:
        """Define the axis of a metric, and what its summary keeps."""
        kept = reduction if reduction in {"max", "mean", "min"} else None
        self._sink.define_metric(name, step_metric="step", summary=kept)

    def take(self, record: Event) -> None:
        """Log one event; skip events without a W&B equivalent."""
        payload, at_s = record["payload"], record["ts_ms"] / 1000
        match record["event"]:
            case "step":
                self._tokens = payload.get(_TOKENS, self._tokens)
                numbers = {k: v for k, v in _known(payload).items() if not isinstance(v, str)}
                self._log(numbers, payload["step"], at_s)  # a digest is not a point of a curve
            case "scorecard_step":
                names = [name for name in payload if name.startswith(_OF_SCORECARD)]
                numbers = {shown_as(name): payload[name] for name in names}
                self._log(numbers, payload["step"], at_s)
            case "validation":
                self._validation(payload, at_s)
            case "metric_declared":
                self._define(payload["name"], payload["reduction"])
            case "logged" if is_point(payload):
                values = _known(payload["values"])
                self._log({**values, "step": payload["step"]}, payload["step"], at_s)
            case "hyperparameters":
                set_config(self._sink, payload)
            case "run_started" if "config" in payload:
                config = settings_read(payload["config"], payload["task"])
                set_config(self._sink, {**config, **self._drawn})
            case "plan" | "facts" as name:
                set_config(self._sink, {name: payload})

    def log_last(self, values: Mapping[str, Any], summary: Mapping[str, Any]) -> None:
        """Add tables to the last row and close it, then write the summary.

        A curve and a result may share a name, and an open row would be written after the result. A
        table and a result may share one too, such as `arms` of a comparison; the summary then keeps
        the table, or W&B would not find it. The service does not accept additions to a row that it
        already has: the tables are in that row already, or they are sent in a separate one.
        """
        if values or self._is_open:
            at = {} if self._last_s is None else {"_timestamp": self._last_s}
            shown = set(self._sink.summary.keys())  # type: ignore[no-untyped-call]
            are_there = set(values) <= shown
            step = self.last_step if are_there else max(self.last_step, self._sink.starting_step)
            self._sink.log({**values, **at}, step=step, commit=True)
        rest = {name: value for name, value in summary.items() if name not in values}
        self._sink.summary.update(rest)

    def _validation(self, payload: Mapping[str, Any], at_s: float) -> None:
        if payload["condition"] == "base":
            self._sink.summary[f"{Condition.BASE}/val_loss"] = payload["val/loss"]
        if is_point(payload):
            row = {shown_as(name): value for name, value in _known(payload).items()}
            del row["condition"]
            row[_TOKENS] = self._tokens
            self._log(row, payload["step"], at_s)

    def _log(self, values: Mapping[str, Any], step: int, at_s: float) -> None:
        self.last_step, self._last_s, self._is_open = step, at_s, False
        self._sink.log({**values, "_timestamp": at_s}, step=step)
        self._is_open = True


def is_point(payload: Mapping[str, Any]) -> bool:
    """Return whether a validation is a point of the tuned model's curve.

    The base model is only its starting point; the PEFT view is in the results.
    """
    condition = str(payload.get("condition", "tuned"))
    return condition == "tuned" or (condition == "base" and payload["step"] == 0)


def shown_as(metric: str) -> str:
    """Return the W&B name of a metric: ``tuned/<kpi>`` for a KPI of the tuned model.

    The curve of a KPI has the same name as its final value in the summary, so that W&B's search,
    early stopping and tables refer to the same metric.
    """
    area, _, name = metric.partition("/")
    kpi = {"eval": name, "val": f"val_{name}"}.get(area)
    return f"{Condition.TUNED}/{kpi}" if kpi in KPIS else metric


def set_config(sink: wandb.Run, values: Mapping[str, Any]) -> None:
    """Add values to the W&B config."""
    sink.config.update(values, allow_val_change=True)  # type: ignore[no-untyped-call]


def _known(payload: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in payload.items() if value is not None}


_SHOWN = 12  # characters of a hash in a name


def made_by(run_dir: RunDir, manifest: Manifest) -> Iterator[wandb.Artifact]:
    """Yield artifacts of the existing outputs of a run, its manifest last.

    The files are copied into wandb's staging directory, because a resumed run will replace them.
    For a merged model, only the certificate is included; weights stay where they are.
    """
    for kind, root, files in _made(run_dir):
        if files:
            yield _artifact(kind, id_of(run_dir, manifest), manifest, root, files)
    files = [run_dir.manifest]
    yield _artifact("manifest", id_of(run_dir, manifest), manifest, run_dir.path, files)


def artifact_of(kind: str, run_dir: RunDir) -> wandb.Artifact | None:
    """Return another run's output as an input of this run; None if it is not available.

    Args:
        kind: ``adapter``, ``merged``, ``scorecard`` or ``comparison``.
        run_dir: the directory of the other run.
    """
    found = {name: (root, files) for name, root, files in _made(run_dir)}
    root, files = found[kind]
    if not files or not run_dir.manifest.is_file():
        return None
    manifest = Manifest.read(run_dir.manifest)
    return _artifact(kind, id_of(run_dir, manifest), manifest, root, files)


def base_of(manifest: Manifest, staging: Path) -> wandb.Artifact | None:
    """Return the base model of a run as an artifact: name and hashes, no weights.

    Args:
        manifest: the run's manifest.
        staging: a directory of this process, for the file that describes the model.
    """
    import wandb

    inputs = manifest.inputs
    sha256 = inputs.get("base_weights_sha256")
    if not isinstance(sha256, str):
        return None
    names = ("base_model", "base_source", "base_revision", "base_weights_sha256")
    described = {name: inputs[name] for name in names if inputs.get(name) is not None}
    file = staging / f"base_{sha256[:_SHOWN]}.json"
    write_json(file, described)
    artifact = wandb.Artifact(f"base-{sha256[:_SHOWN]}", type="base", metadata=described)
    artifact.add_file(str(file), name="base.json")
    return artifact


def _made(run_dir: RunDir) -> list[tuple[str, Path, list[Path]]]:
    """List possible outputs of a run: kind, root of the file names, and the existing files."""
    # A leading dot marks an incomplete file of a writer that died.
    adapter = [path for path in run_dir.adapter.rglob("[!.]*") if path.is_file()]
    scorecard = [run_dir.scorecard, run_dir.events] if run_dir.scorecard.is_file() else []
    return [
        ("adapter", run_dir.adapter, sorted(adapter)),
        ("merged", run_dir.path, _there([run_dir.parity])),
        ("scorecard", run_dir.path, _there(scorecard)),
        ("comparison", run_dir.path, _there([run_dir.comparison])),
        ("attribution", run_dir.path, _there([run_dir.attribution])),
    ]


def _there(paths: Sequence[Path]) -> list[Path]:
    return [path for path in paths if path.is_file()]


def _artifact(
    kind: str, run_id: str, manifest: Manifest, root: Path, files: Sequence[Path]
) -> wandb.Artifact:
    import wandb

    hashes = {path.relative_to(root).as_posix(): sha256_file(path) for path in files}
    metadata: dict[str, Any] = {"config_digest": manifest.config_digest, "sha256": hashes}
    artifact = wandb.Artifact(f"{kind}-{run_id}", type=kind, metadata=metadata)
    for file in hashes:
        artifact.add_file(str(root / file), name=file)
    return artifact
