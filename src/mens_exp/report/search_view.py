"""A search on the terminal and as one self-contained HTML page: its space, and its best trials."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mens_exp.artifacts.sweep import TrialState
from mens_exp.report import wording
from mens_exp.report.rendering import rendered

if TYPE_CHECKING:
    from mens_exp.artifacts.sweep import Dimension, SearchRecord, SweepRecord
    from mens_exp.artifacts.sweep import Trial as Row


def space_table(record: SweepRecord) -> RenderableType:
    """Show the space of a search, and its sampling."""
    search = _of(record)
    table = Table(box=box.SIMPLE_HEAD, title="Search", title_justify="left", show_edge=False)
    table.add_column("key", no_wrap=True)
    table.add_column("drawn from", overflow="fold")
    for one in search["space"]:
        table.add_row(Text(wording.visible(one["key"])), Text(drawn_from(one)))
    many = min(record.n_jobs, search["n_trials"])
    at_a_time = f"{search['n_trials']} trials, {many} at a time: {settings(search)}"
    notes = [Text(f"note: {wording.visible(note)}", style="yellow") for note in record.notes]
    return Group(table, Text(at_a_time), *notes)


def best_table(record: SweepRecord) -> RenderableType:
    """Show the best (non-dominated) trials, and the number of trials by outcome."""
    search = _of(record)
    table = Table(box=box.SIMPLE_HEAD, title="Best", title_justify="left", show_edge=False)
    table.add_column("trial", justify="right")
    table.add_column("drawn", overflow="fold")
    for name in search["objectives"]:
        table.add_column(name, justify="right")
    for number in search["best"]:
        row = search["trials"][number]
        values = [wording.as_text(value, name) for name, value in _named(search, row["values"])]
        drawn = " ".join(row["params"].values())
        table.add_row(str(number), Text(wording.visible(drawn)), *values)
    return Group(table, Text(counted(search)))


def drawn_from(dimension: Dimension) -> str:
    """Write what a key's values are drawn from."""
    if dimension["values"]:
        return wording.visible(", ".join(dimension["values"]))
    ends = f"{dimension['low']:g} to {dimension['high']:g}"
    if dimension["step"] not in {None, 1.0}:
        ends += f" in steps of {dimension['step']:g}"
    kind = ", whole numbers" if dimension["kind"] == "int" else ""
    return ends + kind + (", even in the logarithm" if dimension["log"] else "")


def settings(search: SearchRecord) -> str:
    """Write how a search draws, and what it is after."""
    goals = [
        f"{direction} {name}"
        for name, direction in zip(search["objectives"], search["directions"], strict=True)
    ]
    pruner = "" if search["pruner"] == "none" else f", pruner {search['pruner']}"
    return f"{', '.join(goals)}; sampler {search['sampler']}, seed {search['seed']}{pruner}"


def counted(search: SearchRecord) -> str:
    """Count the trials by how they ended; repeats of an earlier one are counted as well."""
    states = [row["state"] for row in search["trials"]]
    told = [f"{states.count(one)} {one.value}" for one in TrialState if states.count(one)]
    repeats = sum(row["job"] not in {None, row["number"]} for row in search["trials"])
    again = f"; {repeats} came to the same run as an earlier one" if repeats else ""
    return f"{len(states)} of {search['n_trials']} trials: {', '.join(told) or 'none'}{again}"


def _named(search: SearchRecord, values: list[float] | None) -> list[tuple[str, float]]:
    return list(zip(search["objectives"], values or [], strict=False))


def _of(record: SweepRecord) -> SearchRecord:
    assert record.search is not None, "a sweep that searches"
    return record.search


def search_page(record: SweepRecord) -> str:
    """Render a search; the same record gives the same text."""
    from mens_exp.report.study_plots import search_drawings

    assert record.search is not None, "a sweep that searches"
    search = record.search
    return rendered(
        "search.html.j2",
        record=record,
        search=search,
        counted=counted(search),
        settings=settings(search),
        best=[_cells(search, search["trials"][number]) for number in search["best"]],
        trials=[_trial(record, row) for row in search["trials"]],
        space=[(one["key"], drawn_from(one)) for one in search["space"]],
        plots=[(plot, Markup(plot.svg)) for plot in search_drawings(search)],  # noqa: S704 - drawn here
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
