"""A heat map, layer by kind of module, as an inline SVG in the colours of the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import escape

from mens_exp.report.plots import Plot

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Grid", "heat_map"]

_CELL, _HEIGHT, _LEFT, _TOP, _GAP = 26, 22, 62, 6, 2  # pixels
_FOOT, _LEGEND, _LEAST_WIDTH = 54, 120, 330
_EVERY = 5  # a column label
_FAINTEST = 0.06  # opacity of the lowest value, so that a cell is never taken for a missing one
_INK, _MUTED = "var(--plot-ink, #777777)", "var(--plot-muted, #808080)"
_HEAT = "var(--plot-heat, #b4471b)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Values by kind (row) and layer (column).

    Attributes:
        kinds: the rows, from above.
        layers: how many columns.
        values: (kind, layer) -> value; what is absent or None is drawn empty.
    """

    kinds: Sequence[str]
    layers: int
    values: Mapping[tuple[str, int], float | None]


def heat_map(
    name: str,
    title: str,
    caption: str,
    grid: Grid,
    *,
    spell: Callable[[float], str],
    scale: Callable[[float], float] = float,
    high_is_dark: bool = True,
) -> Plot:
    """Draw a grid; the darker a cell, the worse.

    Args:
        name: the drawing's identifier.
        title: what it shows.
        caption: how to read it.
        grid: the values.
        spell: a value as text, with its unit.
        scale: what the shade is linear in, such as a logarithm.
        high_is_dark: whether high values are the bad ones.
    """
    known = [value for value in grid.values.values() if value is not None]
    if not known:
        return Plot(name=name, title=title, caption=caption, absent="no value is known")
    low, high = min(known), max(known)
    shades = scale(low), scale(high)

    def opacity(value: float) -> float:
        spread = shades[1] - shades[0]
        part = (scale(value) - shades[0]) / spread if spread else 1.0
        return _FAINTEST + (1 - _FAINTEST) * (part if high_is_dark else 1 - part)

    width = _LEFT + grid.layers * _CELL
    bottom = _TOP + len(grid.kinds) * _HEIGHT
    wide, high_px = max(width, _LEAST_WIDTH), bottom + _FOOT
    head = f'<svg role="img" aria-label="{escape(title)}" viewBox="0 0 {wide} {high_px}" '
    head += f'width="{wide}" height="{high_px}"'
    parts = [f'{head} fill="currentColor" font-size="12">']
    for row, kind in enumerate(grid.kinds):
        y = _TOP + row * _HEIGHT
        parts.append(_text(_LEFT - 8, y + 15, kind, _INK, "end"))
        for layer in range(grid.layers):
            value = grid.values.get((kind, layer))
            if value is not None:
                said = f"{kind}, layer {layer}: {spell(value)}"
                parts.append(_cell(_LEFT + layer * _CELL, y, opacity(value), said))
    parts += [
        _text(_LEFT + (layer + 0.5) * _CELL, bottom + 15, str(layer), _MUTED)
        for layer in range(0, grid.layers, _EVERY)
    ]
    parts += _legend(bottom + 28, spell(low), spell(high), opacity(low), opacity(high))
    return Plot(name=name, title=title, caption=caption, svg="".join([*parts, "</svg>"]))


def _cell(x: float, y: float, opacity: float, said: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{_CELL - _GAP}" height="{_HEIGHT - _GAP}" rx="2" '
        f'fill="{_HEAT}" fill-opacity="{opacity:.3f}"><title>{escape(said)}</title></rect>'
    )


def _text(x: float, y: float, text: str, color: str, anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'


def _legend(y: float, low: str, high: str, first: float, last: float) -> list[str]:
    """Draw the lowest and the highest value at the ends of six shades, and name the columns."""
    steps = 6
    drawn = [
        _text(_LEFT - 8, y - 13, "layer", _MUTED, "end"),
        _text(_LEFT, y + 13, low, _MUTED, "start"),
    ]
    start = _LEFT + 8 * len(low) + 6
    for step in range(steps):
        opacity = first + (last - first) * step / (steps - 1)
        x = start + step * _LEGEND / steps
        drawn.append(
            f'<rect x="{x:g}" y="{y + 2:g}" width="{_LEGEND / steps - _GAP:g}" height="13" '
            f'fill="{_HEAT}" fill-opacity="{opacity:.3f}"></rect>'
        )
    return [*drawn, _text(start + _LEGEND + 6, y + 13, high, _MUTED, "start")]
