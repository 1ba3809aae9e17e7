"""A search as one self-contained HTML page, which runs no script and asks for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from mens_exp.report import search_view, wording
from mens_exp.report.rendering import rendered

if TYPE_CHECKING:
    from mens_exp.artifacts.search import SearchRecord
    from mens_exp.artifacts.search import Trial as Row
    from mens_exp.artifacts.sweep import SweepRecord

__all__ = ["page"]


def page(record: SweepRecord) -> str:
    """Render a search; the same record gives the same text."""
    from mens_exp.report.search_plots import drawings

    assert record.search is not None, "a sweep that searches"
    search = record.search
    return rendered(
        "search.html.j2",
        record=record,
        search=search,
        counted=search_view.counted(search),
        settings=search_view.settings(search),
        best=[_cells(search, search["trials"][number]) for number in search["best"]],
        trials=[_trial(record, row) for row in search["trials"]],
        space=[(one["key"], search_view.drawn_from(one)) for one in search["space"]],
        plots=[(plot, Markup(plot.svg)) for plot in drawings(search)],  # noqa: S704 - drawn here
    )


def _cells(search: SearchRecord, row: Row) -> list[str]:
    """Return a trial's number, draws and values."""
    names, values = search["objectives"], row["values"]
    if values is None:
        shown = ["–"] * len(names)
    else:
        pairs = zip(names, values, strict=True)
        shown = [wording.as_text(value, name) for name, value in pairs]
    return [str(row["number"]), wording.visible(" ".join(row["params"].values())), *shown]


def _trial(record: SweepRecord, row: Row) -> dict[str, object]:
    """Return a line of the table of trials, with the way to its run's report."""
    assert record.search is not None, "a sweep that searches"
    job = next((job for job in record.jobs if job["number"] == row["job"]), None)
    why = row["reason"] or ""
    if row["job"] not in {None, row["number"]}:
        why = f"the same run as trial {row['job']}. {why}".strip()
    return {
        "cells": _cells(record.search, row),
        "state": str(row["state"]),
        "why": wording.visible(why),
        "report": None if job is None else f"{job['directory']}/report.html",
    }
