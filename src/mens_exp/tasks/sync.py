"""task=sync: send missing runs and sweeps to W&B, in dependency order.

A run or sweep is sent after its inputs, by a separate process: ``python -m
mens_exp.training.wandb_sending <order>`` sends a run, and ``python -m mens_exp.tasks.sync <order>``
a sweep. The sweep becomes one W&B run with a table of its cells, its plots, its verdicts and its
predictions.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import write_bytes
from mens_exp.artifacts.comparison import Comparison
from mens_exp.artifacts.digest import digest, sha256_file
from mens_exp.artifacts.host import lock_holder
from mens_exp.artifacts.manifest import Destination, Manifest, Status, delivery_at
from mens_exp.artifacts.record import read_bytes
from mens_exp.artifacts.run_dir import RunDir, runs
from mens_exp.artifacts.scorecard import Condition
from mens_exp.artifacts.sweep import JobState, SweepDir, SweepRecord
from mens_exp.artifacts.untrusted_input import parse_yaml
from mens_exp.config.logger import WandbLogger
from mens_exp.errors import MensError, RequestError, SetupError
from mens_exp.evals.kpis import ITEM_VALUES, KPIS, name_under
from mens_exp.report import html, sweep_view, terminal
from mens_exp.tasks.study_runs import job_order, read_sweep
from mens_exp.training.wandb_names import agent_of, notes_of, tags_of
from mens_exp.training.wandb_rendering import artifact_of, mirror_settings, quiet_settings
from mens_exp.training.wandb_sending import (
    Order,
    Sender,
    carry_out,
    contained,
    digest_of,
    opened,
    require_account,
    server_address,
)
from mens_exp.training.wandb_tables import ALWAYS_SHOWN, study_plots, study_tables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import wandb

    from mens_exp.config.root import RunConfig
    from mens_exp.config.task import SyncConfig
    from mens_exp.evals.observations import SweepReview
    from mens_exp.tasks.run import Run
    from mens_exp.training.wandb_names import AgentRun

_KNOWN = "known"


def sync(config: RunConfig, run: Run) -> None:
    """Send every run and sweep that the path names, and stop at the first failure.

    Raises:
        SetupError: there is no account, or the service did not accept a run; completed uploads are
            kept, and the same command continues with the rest.
        RequestError: there is nothing to send at the path.
    """
    assert config.path is not None, "validation has asked for it"
    with tempfile.TemporaryDirectory() as staging, contained(Path(staging)):
        server = server_address()
        require_account(server)
    found = parcels(config.path.split(","), config.sync, server)
    if not found.parcels and not found.left_out:
        raise RequestError(
            "no run here has anything to send",
            where="path",
            found=config.path,
            expected="runs that trained, merged, evaluated or compared, or a sweep",
        )
    run.manifest.inputs["runs"] = [one.order.path for one in found.parcels]
    run.manifest.facts["server"] = server
    counts = run.manifest.results
    counts |= {"sent": 0, "known": 0, "left_out": found.left_out, "not_sent": []}
    for path, reason in found.left_out.items():
        terminal.say(f"left out: {path}: {reason}")
    for place, parcel in enumerate(found.parcels):
        why = _send(parcel, config.sync.timeout_s)
        if why == _KNOWN:
            counts["known"] += 1
        elif why is None:
            counts["sent"] += 1
        else:
            counts["not_sent"] = [one.order.path for one in found.parcels[place:]]
            raise _not_taken(parcel, server, why, len(found.parcels) - place)
        _say(parcel, place + 1, len(found.parcels), is_known=why == _KNOWN)


def _send(parcel: Parcel, timeout_s: float) -> str | None:
    """Send one parcel, unless the service has it already.

    Returns:
        The reason for a failure; None if it arrived, and ``known`` if it had arrived before.
    """
    order = parcel.order
    at_work = lock_holder(Path(order.lock))
    if at_work is not None:
        return f"process {at_work[0]} is sending it"
    known = delivery_at(Path(order.record), order.to)
    if known is not None and known["digest"] == parcel.digest():
        return _KNOWN
    with tempfile.NamedTemporaryFile() as log:
        sender = Sender(order, Path(log.name))
        try:
            return sender.ended(timeout_s)
        except BaseException:  # Ctrl-C: finished uploads are not repeated
            sender.kill()
            raise


def _say(parcel: Parcel, number: int, total: int, *, is_known: bool) -> None:
    what = "was sent before" if is_known else "sent"
    path = os.path.relpath(parcel.order.path)
    terminal.say(f"[{number}/{total}] {parcel.what} {path} {what}")


def _not_taken(parcel: Parcel, server: str, why: str, left: int) -> MensError:
    return SetupError(
        "W&B did not accept the upload",
        where=parcel.order.path,
        found=f"{server}: {why}",
        expected=f"a service that answers; not sent: {left} of what was asked for",
        remedy="run the same command again when it does: what was sent is not sent twice",
    )


_OF_A_RUN, _OF_A_SWEEP = "mens_exp.training.wandb_sending", "mens_exp.tasks.sync"
# Tasks with results to review, ranked by dependency.
_RANKS = {"train": 0, "merge": 1, "export": 1, "evaluate": 2, "attribute": 2, "compare": 3}
_MERGES = frozenset({"merge", "export"})
_ADAPTER = "adapter/adapter.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Parcel:
    """One run or sweep to send.

    Attributes:
        what: its kind, in a word.
        order: the order for its sender.
        digest: returns the digest of its current content.
    """

    what: str
    order: Order
    digest: Callable[[], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The items to send, in order, and the skipped runs with reasons."""

    parcels: list[Parcel]
    left_out: dict[str, str]


def parcels(paths: Sequence[str], settings: SyncConfig, server: str) -> Found:
    """Find the runs and sweeps that the paths name, each once; a sweep follows its runs.

    Args:
        paths: runs, sweeps, directories of them, or files in them.
        settings: destination, and time limit per item.
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
    order = sorted(read, key=lambda path: (_RANKS[read[path].task], job_order(RunDir(path))))
    made = [_of_run(RunDir(path), read, settings, server) for path in order]
    sweeps = dict.fromkeys(
        record.parent.resolve() for place in places for record in _sweeps_at(place)
    )
    return Found(
        parcels=[*made, *(_of_sweep(SweepDir(path), settings, server) for path in sweeps)],
        left_out=left_out,
    )


def sweep_digest(directory: SweepDir) -> str:
    """Return the current digest of a sweep's record and its runs' manifests."""
    record = SweepRecord.read(directory.record)
    manifests = [RunDir(directory.path / job["directory"]).manifest for job in record.jobs]
    hashes = [sha256_file(path) if path.is_file() else None for path in manifests]
    return digest({"sweep": sha256_file(directory.record), "runs": hashes})


def _sweeps_at(place: Path) -> Iterable[Path]:
    # Sweeps are at the given path or anywhere below it; run directories contain none.
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
    """Return a run's destination: from the command, its mirror, or its agent."""
    entity, project = (None, None) if agent is None else (agent.entity, agent.project)
    return Destination(
        server,
        settings.entity or logger.get("entity") or entity or os.environ.get("WANDB_ENTITY"),
        settings.project or logger.get("project") or project or WandbLogger().project,
    )


def _logger_of(run: RunDir) -> dict[str, Any]:
    """Return the settings of a run's mirror; empty if it had no mirror."""
    if not run.config.is_file():
        return {}
    stored = parse_yaml(read_bytes(run.config), str(run.config)) or {}
    return dict(mirror_settings(stored)) if isinstance(stored, dict) else {}


def _uses(
    run: RunDir, manifest: Manifest, read: Mapping[Path, Manifest]
) -> Iterable[tuple[str, str]]:
    """Yield the inputs of a run: artifact kind, and the run that made it."""
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
    """Return the run whose directory contains or equals a path."""
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


_RECORDS_DIGEST = "records_digest"


def main(arguments: list[str]) -> int:
    """Send one sweep; the outcome is written to the order's record.

    Returns:
        0, or 3 if it did not arrive.
    """
    order = Order.read(arguments[0])
    return carry_out(order, lambda staging: _send_sweep(order, staging))


def _send_sweep(order: Order, staging: Path) -> str:
    directory = SweepDir(Path(order.path))
    digest, review = sweep_digest(directory), read_sweep(directory)
    record = review.record
    name = re.sub(r"[^A-Za-z0-9_.-]", "-", record.sweep_id)
    settings = {
        **quiet_settings(),
        "run_group": record.sweep_id,
        "run_name": f"sweep {record.sweep_id}",
        "run_tags": tags_of(record.command, [], record.study),
        "run_notes": notes_of(None, record.study),
        "run_job_type": "sweep",
        "run_id": f"{name}_sweep",
    }
    config = {
        "command": record.command,
        "factors": review.factors,
        "cells": len(review.cells),
        "code_sha256": record.code_sha256,
    }
    with opened(order, settings, config, staging) as sink:
        known = sink.summary.get(_RECORDS_DIGEST)  # type: ignore[no-untyped-call]
        if known != digest:  # the upload is a single history row, so it is complete or absent
            sink.log(
                {**_tables_and_plots(review), _RECORDS_DIGEST: digest}, step=sink.starting_step
            )
        sink.summary.update(_sweep_summary(review))
        for kind, path in order.uses:
            artifact = artifact_of(kind, RunDir(Path(path)))
            if artifact is not None:
                sink.use_artifact(artifact)
        made = sink.log_artifact(_sweep_artifact(f"comparison-{name}", directory, review, staging))
        made.wait(timeout=int(order.timeout_s) or 1)
        sink.finish(exit_code=0)
    return digest


def _tables_and_plots(review: SweepReview) -> dict[str, Any]:
    """Return tables and plots by name."""
    import wandb

    drawn = {
        name: wandb.Html(text, inject=False) for name, text in sweep_view.fragments(review).items()
    }
    compared = review.comparison
    tables = {} if compared is None else study_tables(compared) | study_plots(compared)
    return {
        "cells": _cells(review),
        "predictions": _predictions(review),
        **tables,
        **drawn,
        "sweep": wandb.Html(html.page(sweep_view.document(review)), inject=False),
    }


def _cells(review: SweepReview) -> wandb.Table:
    import wandb

    measured = [column.name for column in (*review.kpis, *review.costs)]
    tuned = Condition.TUNED.value
    shown = [name_under(tuned, name) if name in KPIS else name for name in measured]
    columns = ["cell", *review.factors, "status", *shown, "reason", "directory"]
    rows = [
        [
            cell.number,
            *(cell.factors.get(name) for name in review.factors),
            cell.state,
            *(cell.values.get(name) for name in measured),
            cell.reason,
            cell.directory,
        ]
        for cell in review.cells
    ]
    return wandb.Table(columns=list(columns), data=rows)


def _predictions(review: SweepReview) -> wandb.Table:
    import wandb

    known = {
        name
        for one in review.predictions
        for name, sides in one.values.items()
        if any(side is not None for side in sides)
    }
    names = [name for name in ITEM_VALUES if name in known | ALWAYS_SHOWN]
    columns = ["cell", "arm", "item", "prompt", "base", "tuned", "reference"]
    columns += [f"{side}/{name}" for name in names for side in ("base", "tuned")]
    rows = []
    for one in review.predictions:
        sides = [one.values.get(name, (None, None)) for name in names]
        texts = [one.cell, one.arm, one.item, one.prompt, one.base, one.tuned, one.reference]
        rows.append([*texts, *(value for pair in sides for value in pair)])
    return wandb.Table(columns=list(columns), data=rows)


def _sweep_summary(review: SweepReview) -> dict[str, Any]:
    states = [cell.state for cell in review.cells]
    counted = {state.value: states.count(state.value) for state in JobState}
    if review.comparison is None:
        return {**counted, "not_compared": review.why_not_compared}
    primary = review.comparison.primary
    verdicts = {
        f"{one['arm']}/{name}": one["kpis"][primary][name]
        for one in review.comparison.contrasts
        for name in ("estimate", "verdict")
    }
    return {**counted, "primary": primary, **verdicts}


def _sweep_artifact(
    name: str, directory: SweepDir, review: SweepReview, staging: Path
) -> wandb.Artifact:
    """Return an artifact of the sweep's record and, if its arms were compared, the results."""
    import wandb

    artifact = wandb.Artifact(name, type="comparison")
    file = staging / directory.record.name
    write_bytes(file, directory.record.read_bytes())
    artifact.add_file(str(file), name=file.name)
    if review.comparison is not None:
        comparison = RunDir(staging).comparison
        review.comparison.write(comparison)
        artifact.add_file(str(comparison), name=comparison.name)
    return artifact


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
