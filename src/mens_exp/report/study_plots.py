"""Plots of a study: forests of intervals, learning curves, cost against quality, all cells.

Every line in the parallel coordinates of a sweep carries its cell number, so that a page's script
can dim the lines of filtered-out cells.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape
from matplotlib.ticker import MaxNLocator

from mens_exp.report import wording
from mens_exp.report.plots import ARMS, absent, drawn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes

    from mens_exp.artifacts.comparison import Comparison, Curve, KpiRecord
    from mens_exp.report.document import Plot

_WIDE = 10.4  # inches
_LINE, _EDGE = 0.34, 1.1  # inches of a forest plot: per row, and around the rows
_BELOW = 0.22  # of a row: offset of the seeds' dots below the interval
_MOST_ROWS = 40
_FAR = 10  # times the median row; a larger value would flatten the others
_FEW = 3  # minimum number of rows for a median
_METRICS = {"train/loss": "training loss", "val/loss": "validation loss"}
_COSTS = {"train_s": "training time (s)", "peak_bytes": "peak memory (bytes)", "tokens": "tokens"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    label: str
    low: float | None
    estimate: float
    high: float | None
    color: str
    seeds: Sequence[float] = ()  # the difference for each seed

    @property
    def reach(self) -> float:
        """The value farthest from zero."""
        return max(abs(one) for one in (self.low, self.estimate, self.high) if one is not None)


def comparison_drawings(record: Comparison) -> list[Plot]:
    """Draw the plots of a comparison; a plot without values states the reason."""
    colors = {arm["name"]: ARMS[i % len(ARMS)] for i, arm in enumerate(record.arms)}
    curves = [_curves(record, metric, colors) for metric in _METRICS]
    costs = [_scatter(record, cost, colors) for cost in _COSTS]
    return [_primary(record, colors), _all_in_noise(record, colors), *curves, *costs]


def _primary(record: Comparison, colors: dict[str, str]) -> Plot:
    kpis = [(one["arm"], one["kpis"][record.primary]) for one in record.contrasts]
    rows = [
        _Row(
            label=f"{arm}{_alone(k)}",
            low=k["low"],
            estimate=k["estimate"],
            high=k["high"],
            color=colors[arm],
            seeds=k["differences"],
        )
        for arm, k in kpis
        if k["estimate"] is not None
    ]
    title = f"{wording.visible(record.primary)}, each arm minus {wording.visible(record.reference)}"
    unit = kpis[0][1]["unit"]
    caption = (
        "Each dot is the difference of one seed, the diamond their mean with its "
        f"{wording.level(1 - record.alpha)} interval"
        f"{', which holds for all arms at once' if len(record.contrasts) > 1 else ''}; "
        f"unit {'share' if unit == '1' else unit}.{_which_way(kpis[0][1]['direction'])}"
    )
    why = f"no arm shares a seed with {record.reference} and has {record.primary}"
    return _forest("forest", title, caption, rows, why, "difference")


def _all_in_noise(record: Comparison, colors: dict[str, str]) -> Plot:
    rows = []
    for contrast in record.contrasts:
        for name, kpi in contrast["kpis"].items():
            noise = (record.noise.get(name) or {"seed": None})["seed"]
            if kpi["estimate"] is None or not noise:
                continue
            low, high = (None if x is None else x / noise for x in (kpi["low"], kpi["high"]))
            several = len(record.contrasts) > 1
            rows.append(
                _Row(
                    label=(f"{name} · {contrast['arm']}" if several else name) + _alone(kpi),
                    low=low,
                    estimate=kpi["estimate"] / noise,
                    high=high,
                    color=colors[contrast["arm"]],
                )
            )
    caption = "The same for every KPI, in multiples of its standard deviation between seeds."
    if len(rows) > _MOST_ROWS:
        caption += f" The first {_MOST_ROWS} of {len(rows)}; the tables have all."
    why = "no KPI varies between seeds, or no arm has two of them"
    title = "All KPIs, in multiples of seed noise"
    unit = "difference, in multiples of seed noise"
    return _forest("forest_noise", title, caption, rows[:_MOST_ROWS], why, unit)


def _alone(kpi: KpiRecord) -> str:
    return " (1 seed)" if len(kpi["seeds"]) == 1 else ""


def _which_way(direction: str) -> str:
    return {"max": " Higher is better.", "min": " Lower is better."}.get(direction, "")


def _forest(name: str, title: str, caption: str, rows: Sequence[_Row], why: str, unit: str) -> Plot:
    if not rows:
        return absent(name, title, why)

    limit = _limit(rows)
    is_cut = any(row.reach > limit for row in rows)
    if is_cut:
        caption += " Differences beyond the axis are shown as arrows with figures."
    if any(row.low is None for row in rows):
        caption += " A hollow mark has no interval: there are too few seeds."

    def paint(axes: Axes) -> None:
        if is_cut:
            axes.set_xlim(-limit, limit)
        axes.axvline(0, color="#020202", linewidth=1, linestyle=(0, (4, 3)))
        for place, row in enumerate(rows):
            dots = [one for one in row.seeds if abs(one) <= limit]
            beside = [place + _BELOW] * len(dots)
            axes.plot(dots, beside, "o", color=row.color, markersize=4, alpha=0.7)
            if row.low is not None and row.high is not None:
                axes.plot([row.low, row.high], [place, place], color=row.color, linewidth=2.2)
            if abs(row.estimate) > limit:
                _arrow(axes, place, row, limit)
                continue
            face = row.color if row.low is not None else "none"
            axes.plot(
                [row.estimate],
                [place],
                color=row.color,
                marker="D",
                markersize=6,
                markerfacecolor=face,
            )
        axes.set_yticks(range(len(rows)), [wording.visible(row.label) for row in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=7))
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color="#030303", linewidth=0.8)
        if not is_cut:
            axes.margins(x=0.08)
        axes.set_xlabel(unit)

    height = _EDGE + _LINE * len(rows)
    return drawn(name, title, caption, (_WIDE, height), paint)


def _limit(rows: Sequence[_Row]) -> float:
    """Return the end of the axis, chosen so that no row flattens the others."""
    reaches = [row.reach for row in rows if row.reach > 0]
    far = _FAR * statistics.median(reaches) if len(reaches) >= _FEW else math.inf
    return 1.1 * max((reach for reach in reaches if reach <= far), default=math.inf)


def _arrow(axes: Axes, place: int, row: _Row, limit: float) -> None:
    """Draw an arrow for a difference beyond the axis."""
    side = math.copysign(1, row.estimate)
    style = "none" if row.low is None else row.color
    axes.plot(
        [side * 0.98 * limit],
        [place],
        color=row.color,
        marker=">" if side > 0 else "<",
        markersize=7,
        markerfacecolor=style,
    )
    axes.text(
        side * 0.95 * limit,
        place,
        f"{row.estimate:+.3g}".replace("-", wording.MINUS),
        ha="right" if side > 0 else "left",
        va="center",
        color="#020202",
    )


def _curves(record: Comparison, metric: str, colors: dict[str, str]) -> Plot:
    name, title = metric.replace("/", "_"), f"{_METRICS[metric].capitalize()} by arm"
    found: dict[str, Curve] = {
        arm: curves[metric] for arm, curves in record.curves.items() if metric in curves
    }
    if not found:
        more = "; trainer.val_check_interval validates more often" if metric == "val/loss" else ""
        return absent(name, title, f"no two steps that all runs share{more}")

    def paint(axes: Axes) -> None:
        for arm, curve in found.items():
            color, label = colors.get(arm, ARMS[0]), wording.visible(arm)
            axes.fill_between(
                curve["steps"], curve["low"], curve["high"], color=color, alpha=0.16, linewidth=0
            )
            axes.plot(curve["steps"], curve["mean"], color=color, linewidth=1.7, label=label)
        axes.set_ylabel("loss")
        _legend(axes, columns=2)

    caption = "Mean of the runs; the band runs from the lowest to the highest of them."
    return drawn(name, title, caption, (_WIDE, 3.6), paint)


def _legend(axes: Axes, *, columns: int) -> None:
    """Draw the legend above the axes, where it cannot be confused with data or be crossed."""
    axes.legend(
        frameon=False,
        labelcolor="#020202",
        handlelength=1.4,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
    )


def _scatter(record: Comparison, cost: str, colors: dict[str, str]) -> Plot:
    name = f"cost_{cost}"
    title = f"{wording.visible(record.primary)} against {_COSTS[cost]}"
    points = []
    for run in record.runs:
        values = record.scatter.get(run["run_id"], {})
        x, y = values.get(cost), values.get(record.primary)
        if x is not None and y is not None:
            points.append((run["arm"], x, y))
    if not points:
        return absent(name, title, f"no run has both {record.primary} and {_COSTS[cost]}")

    def paint(axes: Axes) -> None:
        for arm in dict.fromkeys(arm for arm, *_ in points):
            mine = [(x, y) for one, x, y in points if one == arm]
            xs, ys = [x for x, _ in mine], [y for _, y in mine]
            axes.scatter(xs, ys, color=colors[arm], s=26, alpha=0.8, label=wording.visible(arm))
        axes.set_xlabel(_COSTS[cost])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.set_ylabel(wording.visible(record.primary))
        axes.margins(x=0.1, y=0.1)
        _legend(axes, columns=1)

    caption = "One point a run."
    return drawn(name, title, caption, (5.2, 3.4), paint)


_WIDTH, _HEIGHT = 1040, 320  # SVG units, about pixels
_LEFT, _TOP, _BOTTOM = 70.0, 34.0, 24.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """The line of one cell.

    Attributes:
        cell: number of the cell.
        arm: name of its arm, shown on hover.
        color: CSS colour.
        values: value by axis; None or a missing entry leaves a gap.
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


def parallel(axes: Sequence[str], lines: Sequence[Line], colors: Mapping[str, str]) -> str:
    """Draw parallel coordinates; axes without values are omitted.

    Args:
        axes: axis names, left to right. Numeric axes are to scale; others are evenly spaced.
        lines: the cells.
        colors: arm -> colour, for the legend.

    Returns:
        An ``<svg>`` element; empty if fewer than two axes are left.
    """
    used = [name for name in axes if any(line.values.get(name) is not None for line in lines)]
    if len(used) < 2:  # noqa: PLR2004  # a line needs two ends
        return ""
    step = (_WIDTH - 2 * _LEFT) / (len(used) - 1)
    drawn = [_axis(name, _LEFT + i * step, lines) for i, name in enumerate(used)]
    parts = [
        Markup('<svg class="parallel" role="img" viewBox="0 0 {} {}" aria-label="{}">').format(
            _WIDTH, _HEIGHT, "Parallel coordinates of all cells"
        )
    ]
    parts += [_line(line, drawn) for line in lines]
    parts += [_scale(axis) for axis in drawn]
    arms = (
        Markup('<span><i style="background:{}"></i>{}</span> ').format(color, _visible(name))
        for name, color in colors.items()
    )
    legend = Markup('<span class="arms">{}</span>').format(Markup().join(arms))
    return str(Markup("\n").join([*parts, Markup("</svg>"), legend]))


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
