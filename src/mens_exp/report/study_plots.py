"""Plots of a study: forests of intervals, learning curves and cost against quality, and a search.

Of a search: its progress, the importance of each setting, and the Pareto front.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, MaxNLocator

from mens_exp.artifacts.sweep import TrialState
from mens_exp.report import wording
from mens_exp.report.plots import ARMS, Plot, svg_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from mens_exp.artifacts.comparison import Comparison, Curve, KpiRecord
    from mens_exp.artifacts.sweep import SearchRecord, Trial

_WIDE = 10.4  # inches
_LINE, _EDGE = 0.34, 1.1  # inches of a forest: a row, and what stands around the rows
_MOST_ROWS = 40
_FAR = 10  # times the median row: what is beyond would flatten the others
_FEW = 3  # rows that a median is taken of
_METRICS = {"train/loss": "training loss", "val/loss": "validation loss"}
_COSTS = {
    "train_s": "training time (s)",
    "peak_bytes": "peak memory (bytes)",
    "tokens": "tokens",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    label: str
    low: float | None
    estimate: float
    high: float | None
    color: str

    @property
    def reach(self) -> float:
        """The number of it that is farthest from zero."""
        return max(abs(one) for one in (self.low, self.estimate, self.high) if one is not None)


def comparison_drawings(record: Comparison) -> list[Plot]:
    """Draw whatever the record has values for; the rest says why it is absent."""
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
        )
        for arm, k in kpis
        if k["estimate"] is not None
    ]
    title = f"{wording.visible(record.primary)}, each arm minus {wording.visible(record.reference)}"
    unit = kpis[0][1]["unit"]
    caption = (
        f"Mean of the seeds' differences with its {wording.level(1 - record.alpha)} interval"
        f"{', which holds for all arms at once' if len(record.contrasts) > 1 else ''}; "
        f"unit {'share' if unit == '1' else unit}.{_which_way(kpis[0][1]['direction'])}"
    )
    absent = f"no arm shares a seed with {record.reference} and has {record.primary}"
    return _forest("forest", title, caption, rows, absent, "difference")


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
    absent = "no KPI varies between seeds, or no arm has two of them"
    title = "All KPIs, in multiples of seed noise"
    unit = "difference, in multiples of seed noise"
    return _forest("forest_noise", title, caption, rows[:_MOST_ROWS], absent, unit)


def _alone(kpi: KpiRecord) -> str:
    return " (1 seed)" if len(kpi["seeds"]) == 1 else ""


def _which_way(direction: str) -> str:
    return {"max": " Higher is better.", "min": " Lower is better."}.get(direction, "")


def _forest(
    name: str, title: str, caption: str, rows: Sequence[_Row], absent: str, unit: str
) -> Plot:
    if not rows:
        return Plot(name=name, title=title, caption="", absent=wording.visible(absent))

    limit = _limit(rows)
    is_cut = any(row.reach > limit for row in rows)
    if is_cut:
        caption += " Beyond the axis, arrows and their figures stand for the differences."
    if any(row.low is None for row in rows):
        caption += " A hollow mark has no interval: so few seeds are no result."

    def paint(axes: Axes) -> None:
        if is_cut:
            axes.set_xlim(-limit, limit)
        axes.axvline(0, color="#020202", linewidth=1, linestyle=(0, (4, 3)))
        for place, row in enumerate(rows):
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
    svg = svg_of(name, title, (_WIDE, height), paint)
    return Plot(name=name, title=title, caption=caption, svg=svg)


def _limit(rows: Sequence[_Row]) -> float:
    """Return where the axis ends, so that no row flattens the others."""
    reaches = [row.reach for row in rows if row.reach > 0]
    far = _FAR * statistics.median(reaches) if len(reaches) >= _FEW else math.inf
    return 1.1 * max((reach for reach in reaches if reach <= far), default=math.inf)


def _arrow(axes: Axes, place: int, row: _Row, limit: float) -> None:
    """Stand for a difference beyond the axis."""
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
        return Plot(name=name, title=title, caption="", absent="no two steps that all runs share")

    def paint(axes: Axes) -> None:
        for arm, curve in found.items():
            color, label = colors.get(arm, ARMS[0]), wording.visible(arm)
            axes.fill_between(
                curve["steps"], curve["low"], curve["high"], color=color, alpha=0.16, linewidth=0
            )
            axes.plot(curve["steps"], curve["mean"], color=color, linewidth=1.7, label=label)
        axes.set_ylabel("loss (nats per token)")
        _legend(axes, columns=2)

    caption = "Mean of the runs; the band runs from the lowest to the highest of them."
    return Plot(
        name=name, title=title, caption=caption, svg=svg_of(name, title, (_WIDE, 3.6), paint)
    )


def _legend(axes: Axes, *, columns: int) -> None:
    """Name the arms above the drawing: inside, marks are taken for points and names are crossed."""
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
        absent = f"no run has both {record.primary} and {_COSTS[cost]}"
        return Plot(name=name, title=title, caption="", absent=wording.visible(absent))

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
    return Plot(name=name, title=title, caption=caption, svg=svg_of(name, title, (5.2, 3.4), paint))


_LINE, _EDGE = 0.34, 1.1  # inches of a bar, and of what stands around the bars
_MOST_CURVES = 60
_ALL, _BEST, _CUT = ARMS[0], ARMS[1], ARMS[3]
_MUTED, _RULE = "#020202", "#030303"


def search_drawings(search: SearchRecord) -> list[Plot]:
    """Draw progress, importance and Pareto front; what has no values says why it is absent."""
    objectives = list(enumerate(search["objectives"]))
    pairs = [(a, b) for a, _ in objectives for b, _ in objectives if a < b]
    drawn = [_progress(search, place) for place, _ in objectives]
    drawn += [_importance(search, name) for _, name in objectives]
    drawn += [_front(search, *pair) for pair in pairs]
    return drawn + ([] if search["pruner"] == "none" else [_trial_curves(search)])


def _complete(search: SearchRecord) -> list[tuple[Trial, list[float]]]:
    return [(row, row["values"]) for row in search["trials"] if row["values"] is not None]


def _progress(search: SearchRecord, place: int) -> Plot:
    objective = search["objectives"][place]
    name, title = f"progress_{place}", f"{objective} by trial"
    found = [(row["number"], values[place]) for row, values in _complete(search)]
    if not found:
        return Plot(name=name, title=title, caption="", absent="no trial is complete")
    better = max if search["directions"][place] == "maximize" else min
    numbers, values = [one for one, _ in found], [value for _, value in found]

    def paint(axes: Axes) -> None:
        axes.scatter(numbers, values, color=_ALL, s=22, alpha=0.8, label="trial")
        best = list(accumulate(values, better))
        axes.step(numbers, best, where="post", color=_BEST, linewidth=1.7, label="best so far")
        axes.set_xlabel("trial")
        axes.set_ylabel(objective)
        _spell_sizes(axes.yaxis, objective)
        axes.legend(frameon=False, labelcolor=_MUTED)

    svg = svg_of(name, title, (_WIDE, 3.4), paint)
    return Plot(name=name, title=title, caption="Complete trials, in the order of draws.", svg=svg)


def _importance(search: SearchRecord, objective: str) -> Plot:
    name, title = f"importance_{objective}", f"What decides {objective}"
    shares = search["importance"].get(objective)
    if not shares:
        absent = search["importance_unknown"] or "no key was drawn"
        return Plot(name=name, title=title, caption="", absent=wording.visible(absent))
    rows = sorted(shares.items(), key=lambda one: (-one[1], one[0]))

    def paint(axes: Axes) -> None:
        axes.barh(range(len(rows)), [share for _, share in rows], color=_ALL, height=0.62)
        axes.set_yticks(range(len(rows)), [wording.visible(key) for key, _ in rows])
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.grid(visible=False, axis="y")
        axes.grid(axis="x", color=_RULE, linewidth=0.8)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
        axes.set_xlabel("share")

    caption = (
        f"PED-ANOVA over {len(_complete(search))} complete trials: how much a key's values in the "
        "best tenth differ from those of all; shares of their sum. Little is known from few trials."
    )
    svg = svg_of(name, title, (_WIDE, _EDGE + _LINE * len(rows)), paint)
    return Plot(name=name, title=title, caption=caption, svg=svg)


def _front(search: SearchRecord, x: int, y: int) -> Plot:
    names = search["objectives"]
    name, title = f"front_{x}_{y}", f"{names[y]} against {names[x]}"
    found = _complete(search)
    if not found:
        return Plot(name=name, title=title, caption="", absent="no trial is complete")
    best = sorted((v[x], v[y]) for row, v in found if row["number"] in search["best"])

    def paint(axes: Axes) -> None:
        others = [(v[x], v[y]) for row, v in found if row["number"] not in search["best"]]
        _trial_points(axes, others, _ALL, "trial")
        _trial_points(axes, best, _BEST, "on the front")
        if len(names) == 2:  # noqa: PLR2004  # of more, a front is no line
            axes.step(
                [one for one, _ in best],
                [one for _, one in best],
                # Between two trials the other objective is that of the one that x allows.
                where="post" if search["directions"][x] == "minimize" else "pre",
                color=_BEST,
                linewidth=1,
            )
        axes.set_xlabel(names[x])
        axes.xaxis.set_major_locator(MaxNLocator(nbins=5))
        axes.set_ylabel(names[y])
        _spell_sizes(axes.xaxis, names[x])
        _spell_sizes(axes.yaxis, names[y])
        axes.margins(x=0.08, y=0.1)
        axes.legend(frameon=False, labelcolor=_MUTED)

    caption = "The front: trials that no other is at least as good as in all objectives."
    svg = svg_of(name, title, (_WIDE, 3.8), paint)
    return Plot(name=name, title=title, caption=caption, svg=svg)


def _spell_sizes(axis: Axis, objective: str) -> None:
    """Write bytes in binary units."""
    if objective.endswith("_bytes"):
        axis.set_major_formatter(FuncFormatter(lambda value, _: wording.size(value)))


def _trial_points(
    axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str
) -> None:
    if points:
        xs, ys = zip(*points, strict=True)
        axes.scatter(xs, ys, color=color, s=26, alpha=0.85, label=label)


def _trial_curves(search: SearchRecord) -> Plot:
    name, title = "curves", "Validation loss while trials ran"
    rows = [row for row in search["trials"] if row["intermediate"]][-_MOST_CURVES:]
    if not rows:
        return Plot(name=name, title=title, caption="", absent="no trial validated in training")

    def paint(axes: Axes) -> None:
        labels = {TrialState.PRUNED.value: "pruned"}
        for row in rows:
            is_cut = row["state"] == TrialState.PRUNED
            steps, losses = zip(*row["intermediate"], strict=True)
            label = labels.pop(str(row["state"]), None)
            color = _CUT if is_cut else _ALL
            axes.plot(steps, losses, color=color, marker="o", markersize=3, alpha=0.7, label=label)
        axes.set_ylabel("loss (nats per token)")
        if TrialState.PRUNED in {row["state"] for row in rows}:
            axes.legend(frameon=False, labelcolor=_MUTED)

    svg = svg_of(name, title, (_WIDE, 3.4), paint)
    return Plot(name=name, title=title, caption=f"The last {len(rows)} trials.", svg=svg)
