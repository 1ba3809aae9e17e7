"""Write a run's report, model card and the mens trainer's views beside its records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.atomic import write_json, write_text
from mens_exp.report import card, html, mens_views
from mens_exp.report.records import load

if TYPE_CHECKING:
    from mens_exp.artifacts.run_dir import RunDir

__all__ = ["write_report"]


def write_report(run: RunDir) -> None:
    """Render ``report.html`` and ``MODEL_CARD.md`` from the JSON of a run.

    A training run gets ``run_summary.json`` and ``training_skip_stats.json`` as well. All are made
    before any is written, and each is either whole or absent.

    Args:
        run: a directory that holds at least a manifest.

    Raises:
        MensError: a record is missing or damaged.
    """
    records = load(run)
    page, model_card = html.render(records), card.render(records)
    views = {}
    if records.manifest.task == "train":
        views[run.run_summary] = mens_views.run_summary(records.manifest)
        views[run.skip_stats] = mens_views.training_skip_stats(records.manifest)
    write_text(run.report, page)
    write_text(run.model_card, model_card)
    for path, view in views.items():
        write_json(path, view)
