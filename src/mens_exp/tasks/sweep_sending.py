"""Separate process that sends a sweep to W&B: ``python -m mens_exp.tasks.sweep_sending <order>``.

The sweep becomes one W&B run with a table of its cells, its plots, its verdicts and its
predictions.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mens_exp.artifacts.atomic import write_bytes
from mens_exp.artifacts.run_dir import RunDir
from mens_exp.artifacts.scorecard import Condition
from mens_exp.artifacts.sweep import JobState, SweepDir
from mens_exp.evals.kpis import ITEM_VALUES, KPIS, name_under
from mens_exp.report import html, sweep_view
from mens_exp.tasks.study_runs import read_sweep
from mens_exp.tasks.sync import sweep_digest
from mens_exp.training.wandb_names import notes_of, tags_of
from mens_exp.training.wandb_rendering import artifact_of, quiet_settings
from mens_exp.training.wandb_sending import Order, carry_out, opened
from mens_exp.training.wandb_tables import ALWAYS_SHOWN, study_plots, study_tables

if TYPE_CHECKING:
    import wandb

    from mens_exp.evals.observations import SweepReview

_DIGEST = "records_digest"


def main(arguments: list[str]) -> int:
    """Send one sweep; the outcome is written to the order's record.

    Returns:
        0, or 3 if it did not arrive.
    """
    order = Order.read(arguments[0])
    return carry_out(order, lambda staging: _send(order, staging))


def _send(order: Order, staging: Path) -> str:
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
        known = sink.summary.get(_DIGEST)  # type: ignore[no-untyped-call]
        if known != digest:  # the upload is a single history row, so it is complete or absent
            sink.log({**_shown(review), _DIGEST: digest}, step=sink.starting_step)
        sink.summary.update(_summary(review))
        for kind, path in order.uses:
            artifact = artifact_of(kind, RunDir(Path(path)))
            if artifact is not None:
                sink.use_artifact(artifact)
        made = sink.log_artifact(_artifact(f"comparison-{name}", directory, review, staging))
        made.wait(timeout=int(order.timeout_s) or 1)
        sink.finish(exit_code=0)
    return digest


def _shown(review: SweepReview) -> dict[str, Any]:
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


def _summary(review: SweepReview) -> dict[str, Any]:
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


def _artifact(name: str, directory: SweepDir, review: SweepReview, staging: Path) -> wandb.Artifact:
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
