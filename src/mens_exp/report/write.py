"""Write a run's report and model card beside its records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.atomic import write_text
from mens_exp.report import card, html
from mens_exp.report.records import load

if TYPE_CHECKING:
    from mens_exp.artifacts.run_dir import RunDir

__all__ = ["write_report"]


def write_report(run: RunDir) -> None:
    """Render ``report.html`` and ``MODEL_CARD.md`` from the JSON of a run.

    Both are rendered before either is written, and each is either whole or absent.

    Args:
        run: a directory that holds at least a manifest.

    Raises:
        MensError: a record is missing or damaged.
    """
    records = load(run)
    page, model_card = html.render(records), card.render(records)
    write_text(run.report, page)
    write_text(run.model_card, model_card)
