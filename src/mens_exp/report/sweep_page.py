"""A sweep as one self-contained HTML page: its cells, drawings, verdicts and predictions.

It asks for nothing from anywhere. The one script inside it sorts, filters and points; its hash
stands in the page's policy, so that nothing else runs, whatever a completion holds.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup

from mens_exp.artifacts.sweep import JobState
from mens_exp.report import comparison_view, wording
from mens_exp.report.comparison_plots import drawings
from mens_exp.report.parallel import Line, parallel
from mens_exp.report.plots import ARMS, css_of
from mens_exp.report.rendering import rendered

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mens_exp.evals.sweep_cells import Cell, Column, Prediction, SweepReview
    from mens_exp.report.plots import Plot

__all__ = ["fragments", "page"]

_MOST_TEXT = 2_000  # characters of a prompt or an answer
_FIRST = 4  # KPIs and costs each that are shown at first sight
_AXES = 3  # KPIs and costs each that get an axis
_BADGES = {JobState.SUCCEEDED: "good", JobState.FAILED: "bad", JobState.CANCELLED: "warn"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    column: Column
    title: str
    is_extra: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Value:
    text: str
    sort: str
    is_extra: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    number: int
    factors: list[str]
    state: str
    badge: str
    values: list[_Value]
    reason: str
    link: str


def page(review: SweepReview) -> str:
    """Render a sweep; the same records give the same text."""
    script = resources.files("mens_exp.report").joinpath("templates/sweep.js").read_text("utf-8")
    compared = review.comparison
    heads = _heads(review)
    return rendered(
        "sweep.html.j2",
        record=review.record,
        command=wording.visible(shlex.join(["-m", *review.record.command])),
        counts=_counts(review),
        headline="" if compared is None else comparison_view.headline(compared),
        factors=[wording.visible(name) for name in review.factors],
        choices=_choices(review),
        heads=heads,
        rows=[_row(cell, review.factors, heads) for cell in review.cells],
        left_out=[
            (one["number"], wording.visible(" ".join(one["differs"])), wording.visible(one["why"]))
            for one in review.record.left_out
        ],
        notes=[wording.visible(note) for note in review.record.notes],
        parallel=_parallel(review),
        arms=_arm_colors(review),
        verdicts=None if compared is None else comparison_view.verdicts_grid(compared),
        findings=[]
        if compared is None
        else [text for text, _ in comparison_view.findings(compared)],
        plots=[] if compared is None else [(plot, _svg(plot)) for plot in drawings(compared)],
        why_not_compared=wording.visible(review.why_not_compared),
        items=_items(review.predictions),
        more_predictions=review.more_predictions,
        script=Markup(script),  # noqa: S704  # our own
        script_hash=_hash(script),
    )


def fragments(review: SweepReview) -> dict[str, str]:
    """Render every drawing as a page of its own, by name; what cannot be drawn is left out."""
    style = resources.files("mens_exp.report").joinpath("templates/sweep.css").read_text("utf-8")
    parts = {"parallel_coordinates": _parallel(review)}
    if review.comparison is not None:
        parts |= {plot.name: _svg(plot) for plot in drawings(review.comparison) if plot.svg}
    head = f"<!doctype html><meta charset=utf-8><style>svg {{ max-width: 100% }}\n{style}</style>"
    return {name: f"{head}{svg}" for name, svg in parts.items() if svg}


def _parallel(review: SweepReview) -> Markup:
    """Draw every cell over the factors, what it cost, and what it came to."""
    measured = [*review.costs[:_AXES], *review.kpis[:_AXES]]
    axes = [*review.factors, *(column.name for column in measured)]
    colors = dict(_arm_colors(review))
    lines = [
        Line(
            cell=cell.number,
            arm=cell.arm,
            color=colors[wording.visible(cell.arm)],
            values={**cell.factors, **cell.values},
        )
        for cell in review.cells
    ]
    return parallel(axes, lines)


def _arm_colors(review: SweepReview) -> list[tuple[str, str]]:
    """Give arms the colours that the comparison draws them in, the others the next ones."""
    first = [] if review.comparison is None else [arm["name"] for arm in review.comparison.arms]
    names = list(dict.fromkeys(cell.arm for cell in review.cells))
    order = [*(name for name in first if name in names), *(n for n in names if n not in first)]
    return [(wording.visible(name), css_of(ARMS[i % len(ARMS)])) for i, name in enumerate(order)]


def _heads(review: SweepReview) -> list[_Head]:
    return [
        _Head(column=column, title=_title(column), is_extra=i >= _FIRST)
        for columns in (review.kpis, review.costs)
        for i, column in enumerate(columns)
    ]


def _title(column: Column) -> str:
    name, unit = wording.visible(column.name), column.unit
    is_told = unit in {"1", "bytes"} or name.endswith(f"_{unit}") or name == unit
    return name if is_told else f"{name} ({unit})"


def _row(cell: Cell, factors: list[str], heads: list[_Head]) -> _Row:
    state = JobState(cell.state)
    return _Row(
        number=cell.number,
        factors=[wording.visible(cell.factors.get(name, "")) for name in factors],
        state=cell.state,
        badge=_BADGES.get(state, "mute"),
        values=[_value(cell, head) for head in heads],
        reason=wording.visible(cell.reason or cell.why_unknown or ""),
        link=f"./{quote(cell.directory)}/report.html" if cell.has_report else "",
    )


def _value(cell: Cell, head: _Head) -> _Value:
    value = cell.values.get(head.column.name)
    if value is None:
        return _Value(text="", sort="", is_extra=head.is_extra)
    is_size = head.column.unit == "bytes"
    text = wording.size(value) if is_size else f"{value:.5g}".replace("-", wording.MINUS)
    return _Value(text=text, sort=repr(value), is_extra=head.is_extra)


def _choices(review: SweepReview) -> list[tuple[str, list[str]]]:
    """Return what may be filtered by: each factor and the state, with the values there are."""
    found = [
        (name, list(dict.fromkeys(cell.factors.get(name, "") for cell in review.cells)))
        for name in review.factors
    ]
    states = list(dict.fromkeys(cell.state for cell in review.cells))
    return [
        (wording.visible(name), [wording.visible(value) for value in values])
        for name, values in [*found, ("status", states)]
    ]


def _counts(review: SweepReview) -> str:
    states = [cell.state for cell in review.cells]
    return ", ".join(f"{states.count(one)} {one}" for one in dict.fromkeys(states)) or "no cells"


def _items(predictions: Sequence[Prediction]) -> list[dict[str, object]]:
    """Gather what all cells answered to one item; equal answers stand there once."""
    by_item: dict[str, list[Prediction]] = {}
    for one in predictions:
        by_item.setdefault(one.item, []).append(one)
    return [
        {
            "name": wording.visible(item),
            "cells": _numbers(some),
            "prompt": _cut(some[0].prompt),
            "reference": _cut(some[0].reference),
            "answers": [
                *_answers("base", [(one, one.base, 0) for one in some]),
                *_answers("tuned", [(one, one.tuned, 1) for one in some]),
            ],
        }
        for item, some in by_item.items()
    ]


def _answers(
    side: str, given: Sequence[tuple[Prediction, str | None, int]]
) -> list[dict[str, object]]:
    groups: dict[tuple[str, tuple[str, ...]], list[Prediction]] = {}
    for one, text, place in given:
        if text is not None:
            key = (text, tuple(_kpis(one, place)))
            groups.setdefault(key, []).append(one)
    return [
        {
            "side": side,
            "cells": _numbers(some),
            "who": f"{side} · cell{'s' * (len(some) > 1)} {', '.join(_numbers(some))}",
            "text": _cut(text),
            "kpis": kpis,
        }
        for (text, kpis), some in groups.items()
    ]


def _kpis(one: Prediction, place: int) -> list[str]:
    words = {True: "yes", False: "no"}
    return [
        f"{name.replace('_', ' ')}: {words[value]}"
        for name, both in one.kpis.items()
        if (value := both[place]) is not None
    ]


def _numbers(some: Sequence[Prediction]) -> list[str]:
    return [str(one.cell) for one in some]


def _cut(text: str) -> str:
    whole = wording.visible(text)
    left = len(whole) - _MOST_TEXT
    return whole if left <= 0 else f"{whole[:_MOST_TEXT]} … and {left} characters more"


def _svg(plot: Plot) -> Markup:
    return Markup(plot.svg)  # noqa: S704  # drawn here


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
