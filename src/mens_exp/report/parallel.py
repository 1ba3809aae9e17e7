"""Parallel coordinates as inline SVG: an axis for each factor, cost and KPI, a line for each cell.

Every line carries the number of its cell, so that a page can dim what its reader filters away.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from mens_exp.report import wording

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Line", "parallel"]

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
