"""A sweep as one self-contained HTML page: cells, parallel coordinates, verdicts, predictions.

The page loads no external resources. Its only script sorts, filters and highlights; the page's
content security policy contains the script's hash, so that nothing else runs, whatever a completion
contains. Every line of the parallel coordinates carries the number of its cell, so that the page
can dim filtered cells.
"""

from __future__ import annotations

import base64
import hashlib
import math
import shlex
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup, escape

from mens_exp.artifacts.sweep import JobState
from mens_exp.report import comparison_view, wording
from mens_exp.report.plots import ARMS, css_of
from mens_exp.report.rendering import rendered
from mens_exp.report.study_plots import comparison_drawings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mens_exp.evals.observations import Cell, Column, Prediction, SweepReview
    from mens_exp.report.plots import Plot

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
        study=_study(review),
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
        plots=[]
        if compared is None
        else [(plot, _svg(plot)) for plot in comparison_drawings(compared)],
        why_not_compared=wording.visible(review.why_not_compared),
        items=_items(review.predictions),
        more_predictions=review.more_predictions,
        script=Markup(script),  # noqa: S704  # our own
        script_hash=_hash(script),
    )


def _study(review: SweepReview) -> dict[str, object] | None:
    """Return what the page says of a study: its claim, its registration and its answer."""
    study = review.record.study
    if study is None:
        return None
    compared = review.comparison
    lines = (
        [] if compared is None else comparison_view.hypothesis_lines(compared, study["settings"])
    )
    entry = study["entry"]
    where = f"entry {entry} of {study['ledger']}, {study['entry_sha256']}"
    return {
        "name": wording.visible(study["name"]),
        "hypothesis": wording.visible(study["settings"]["hypothesis"]),
        "registered_utc": study["registered_utc"],
        "where": wording.visible(where) if entry is not None else "not registered yet",
        "sha256": study["sha256"],
        "answers": list(lines),
        "left": len(study["later"]),
        "stopped": wording.visible(study["stopped"] or ""),
    }


def fragments(review: SweepReview) -> dict[str, str]:
    """Render every plot as a separate page, by name; plots without data are omitted."""
    style = resources.files("mens_exp.report").joinpath("templates/sweep.css").read_text("utf-8")
    parts = {"parallel_coordinates": _parallel(review)}
    if review.comparison is not None:
        parts |= {
            plot.name: _svg(plot) for plot in comparison_drawings(review.comparison) if plot.svg
        }
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


_WIDTH, _HEIGHT = 1040, 320  # of the drawing's own units, about pixels
_LEFT, _TOP, _BOTTOM = 70.0, 34.0, 24.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One cell.

    Attributes:
        cell: its number.
        arm: its name, for who points at it.
        color: in CSS.
        values: by axis; None, or no entry, leaves a gap.
    """

    cell: int
    arm: str
    color: str
    values: Mapping[str, str | float | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    name: str
    x: float
    places: dict[str | float, float]  # value -> y
    ends: list[tuple[float, str]]


def parallel(axes: Sequence[str], lines: Sequence[Line]) -> Markup:
    """Draw the lines; an axis on which no cell has a value is left out.

    Args:
        axes: names, from left to right. Values that are all numbers lie to scale, others apart.
        lines: the cells.

    Returns:
        An ``<svg>`` element, empty where fewer than two axes are left.
    """
    used = [name for name in axes if any(line.values.get(name) is not None for line in lines)]
    if len(used) < 2:  # noqa: PLR2004  # a line needs two ends
        return Markup("")
    step = (_WIDTH - 2 * _LEFT) / (len(used) - 1)
    drawn = [_axis(name, _LEFT + i * step, lines) for i, name in enumerate(used)]
    parts = [
        Markup('<svg class="parallel" role="img" viewBox="0 0 {} {}" aria-label="{}">').format(
            _WIDTH, _HEIGHT, "Parallel coordinates of all cells"
        )
    ]
    parts += [_line(line, drawn) for line in lines]
    parts += [_scale(axis) for axis in drawn]
    return Markup("\n").join([*parts, Markup("</svg>")])


def _axis(name: str, x: float, lines: Sequence[Line]) -> _Axis:
    found = [line.values.get(name) for line in lines]
    values = list(dict.fromkeys(value for value in found if value is not None))
    numbers = [number for value in values if (number := _number(value)) is not None]
    bottom = _HEIGHT - _BOTTOM
    if len(numbers) == len(values):
        low, high = min(numbers), max(numbers)
        span = high - low
        places = {
            value: (bottom + _TOP) / 2 if not span else bottom - (n - low) / span * (bottom - _TOP)
            for value, n in zip(values, numbers, strict=True)
        }
        shown = {low, high} if span else {low}
        ends = [(bottom if n == low and span else _TOP, _figure(n, name)) for n in sorted(shown)]
        ends = ends if span else [((bottom + _TOP) / 2, _figure(low, name))]
        return _Axis(name=name, x=x, places=places, ends=ends)
    texts = sorted(values, key=str)
    gap = (bottom - _TOP) / max(1, len(texts) - 1)
    places = {value: bottom - i * gap for i, value in enumerate(texts)}
    return _Axis(
        name=name, x=x, places=places, ends=[(places[value], str(value)) for value in texts]
    )


def _line(line: Line, axes: Sequence[_Axis]) -> Markup:
    path, pen = [], "M"
    for axis in axes:
        value = line.values.get(axis.name)
        if value is None:
            pen = "M"
            continue
        path.append(f"{pen}{axis.x:.1f} {axis.places[value]:.1f}")
        pen = "L"
    return Markup(
        '<path class="cell" data-cell="{}" d="{}" fill="none" stroke="{}" stroke-width="2">'
        "<title>{}</title></path>"
    ).format(line.cell, " ".join(path), line.color, f"cell {line.cell}: {_visible(line.arm)}")


def _scale(axis: _Axis) -> Markup:
    rule = Markup(
        '<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="axis"/>'
        '<text x="{x:.1f}" y="14" class="name">{name}</text>'
    ).format(x=axis.x, top=_TOP, bottom=_HEIGHT - _BOTTOM, name=_visible(axis.name))
    ends = [
        Markup('<text x="{:.1f}" y="{:.1f}" class="end">{}</text>').format(
            axis.x + 5, y + 4, _visible(text)
        )
        for y, text in axis.ends
    ]
    return rule + Markup("").join(ends)


def _number(value: str | float) -> float | None:
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _figure(value: float, name: str) -> str:
    if name.endswith("_bytes"):
        return wording.size(value)
    return f"{value:.5g}".replace("-", wording.MINUS)


def _visible(text: str) -> Markup:
    return escape(wording.visible(text))
