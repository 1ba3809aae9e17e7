"""Parcels of task=sync, in order: what is made of something comes after it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.manifest import Manifest, Status
from mens_exp.artifacts.plain_yaml import parse_yaml
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.run_dir import RunDir, runs
from mens_exp.artifacts.sweep import SweepRecord
from mens_exp.artifacts.sweep_dir import SweepDir
from mens_exp.artifacts.sync_record import Destination
from mens_exp.config.logger import WandbLogger
from mens_exp.tasks.study_runs import job_order
from mens_exp.training.wandb_names import agent_of
from mens_exp.training.wandb_order import Order, digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mens_exp.config.task import SyncConfig
    from mens_exp.training.wandb_agent import AgentRun

__all__ = ["Found", "Parcel", "parcels", "sweep_digest"]

_OF_A_RUN, _OF_A_SWEEP = "mens_exp.training.wandb_sending", "mens_exp.tasks.sweep_sending"
# What there is to review of, and what comes before what.
_RANKS = {"train": 0, "merge": 1, "export": 1, "evaluate": 2, "attribute": 2, "compare": 3}
_MERGES = frozenset({"merge", "export"})
_ADAPTER = "adapter/adapter.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One thing to send.

    Attributes:
        what: it is, in a word.
        order: for its sender.
        digest: returns that of what there is to send now.
    """

    what: str
    order: Order
    digest: Callable[[], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The items to be sent, in order, and the runs that are not, each with the reason."""

    parcels: list[Parcel]
    left_out: dict[str, str]


def parcels(paths: Sequence[str], settings: SyncConfig, server: str) -> Found:
    """Find what the paths name, each once: runs, and every sweep as a whole after its runs.

    Args:
        paths: runs, sweeps, directories of them, or files in them.
        settings: where to, and how long each may take.
        server: the service's address.

    Raises:
        DataError: a record is damaged.
    """
    places = [Path(path) if Path(path).is_dir() else Path(path).parent for path in paths]
    found = {run.path.resolve(): run for place in places for run in runs(place)}
    read = {path: Manifest.read(run.manifest) for path, run in found.items()}
    left_out: dict[str, str] = {}
    for path, manifest in list(read.items()):
        if manifest.status is Status.STARTED:
            left_out[str(path)] = "it has not ended"
            del read[path]
        elif manifest.task not in _RANKS:
            del read[path]
    order = sorted(read, key=lambda path: (_RANKS[read[path].task], job_order(path)))
    made = [_of_run(RunDir(path), read, settings, server) for path in order]
    sweeps = dict.fromkeys(
        record.parent.resolve() for place in places for record in _sweeps_at(place)
    )
    return Found(
        parcels=[*made, *(_of_sweep(SweepDir(path), settings, server) for path in sweeps)],
        left_out=left_out,
    )


def sweep_digest(directory: SweepDir) -> str:
    """Return the digest of a sweep as it stands: of its record, and of its runs' manifests."""
    record = SweepRecord.read(directory.record)
    manifests = [RunDir(directory.path / job["directory"]).manifest for job in record.jobs]
    hashes = [sha256_file(path) if path.is_file() else None for path in manifests]
    return digest({"sweep": sha256_file(directory.record), "runs": hashes})


def _sweeps_at(place: Path) -> Iterable[Path]:
    # A sweep lies where it was asked for, or anywhere below; a run's directory holds none.
    own = SweepDir(place).record
    return [own] if own.is_file() else sorted(place.rglob(own.name))


def _of_run(
    run: RunDir, read: Mapping[Path, Manifest], settings: SyncConfig, server: str
) -> Parcel:
    manifest = read[run.path]
    logger = _logger_of(run)
    return Parcel(
        what=manifest.task,
        order=Order(
            module=_OF_A_RUN,
            path=str(run.path),
            record=str(run.sync),
            lock=str(run.sync_lock),
            to=_destination(logger, settings, server, agent_of(run, manifest)),
            timeout_s=settings.timeout_s,
            uses=list(_uses(run, manifest, read)),
        ),
        digest=lambda: digest_of(run.path),
    )


def _of_sweep(directory: SweepDir, settings: SyncConfig, server: str) -> Parcel:
    record = SweepRecord.read(directory.record)
    jobs = [RunDir(directory.path / job["directory"]) for job in record.jobs]
    first = next((job for job in jobs if job.config.is_file()), None)
    logger = {} if first is None else _logger_of(first)
    scored = [job for job in jobs if job.scorecard.is_file()]
    return Parcel(
        what="sweep",
        order=Order(
            module=_OF_A_SWEEP,
            path=str(directory.path),
            record=str(directory.sync),
            lock=str(directory.sync_lock),
            to=_destination(logger, settings, server),
            timeout_s=settings.timeout_s,
            uses=[("scorecard", str(job.path)) for job in scored],
        ),
        digest=lambda: sweep_digest(directory),
    )


def _destination(
    logger: Mapping[str, Any], settings: SyncConfig, server: str, agent: AgentRun | None = None
) -> Destination:
    """Return where a run belongs: where the command says, where its mirror or its agent was."""
    entity, project = (None, None) if agent is None else (agent.entity, agent.project)
    return Destination(
        server,
        settings.entity or logger.get("entity") or entity or os.environ.get("WANDB_ENTITY"),
        settings.project or logger.get("project") or project or WandbLogger().project,
    )


def _logger_of(run: RunDir) -> dict[str, Any]:
    """Return the settings of a run's mirror; none where it had no mirror."""
    if not run.config.is_file():
        return {}
    stored = parse_yaml(read_bytes(run.config), str(run.config)) or {}
    logger = stored.get("logger") if isinstance(stored, dict) else None
    return logger if isinstance(logger, dict) and logger.get("sink") == "wandb" else {}


def _uses(
    run: RunDir, manifest: Manifest, read: Mapping[Path, Manifest]
) -> Iterable[tuple[str, str]]:
    """Yield what a run was made from: kind of artifact, and the run that made it."""
    if run.comparison.is_file():
        for one in Comparison.read(run.comparison).runs:
            yield "scorecard", one["scored_by"] or one["path"]
        return
    inputs = manifest.inputs
    maker = _maker(inputs.get("subject") or inputs.get("adapter"), read)
    maker = maker or _by_hash(inputs.get("adapter_sha256"), read)
    if maker is not None and maker != run.path:
        task = Manifest.read(RunDir(maker).manifest).task
        yield "merged" if task in _MERGES else "adapter", str(maker)


def _maker(subject: object, read: Mapping[Path, Manifest]) -> Path | None:
    """Return the run whose directory a path is, or lies in."""
    if not isinstance(subject, str):
        return None
    path = Path(subject).resolve()
    return next(
        (one for one in (path, *path.parents) if one in read or RunDir(one).manifest.is_file()),
        None,
    )


def _by_hash(sha256: object, read: Mapping[Path, Manifest]) -> Path | None:
    if sha256 is None:
        return None
    return next((path for path, one in read.items() if one.outputs.get(_ADAPTER) == sha256), None)
