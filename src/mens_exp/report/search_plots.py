"""A search as drawings: its progress, what decides, and what cannot be bettered."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

from matplotlib.ticker import FuncFormatter, MaxNLocator

from mens_exp.artifacts.search import TrialState
from mens_exp.report import wording
from mens_exp.report.plots import ARMS, Plot, svg_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

    from mens_exp.artifacts.search import SearchRecord, Trial

__all__ = ["drawings"]

_WIDE = 10.4  # inches
_LINE, _EDGE = 0.34, 1.1  # inches of a bar, and of what stands around the bars
_MOST_CURVES = 60
_ALL, _BEST, _CUT = ARMS[0], ARMS[1], ARMS[3]
_MUTED, _RULE = "#020202", "#030303"


def drawings(search: SearchRecord) -> list[Plot]:
    """Draw progress, importance and Pareto front; what has no values says why it is absent."""
    objectives = list(enumerate(search["objectives"]))
    pairs = [(a, b) for a, _ in objectives for b, _ in objectives if a < b]
    drawn = [_progress(search, place) for place, _ in objectives]
    drawn += [_importance(search, name) for _, name in objectives]
    drawn += [_front(search, *pair) for pair in pairs]
    return drawn + ([] if search["pruner"] == "none" else [_curves(search)])


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
        _scatter(axes, others, _ALL, "trial")
        _scatter(axes, best, _BEST, "on the front")
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


def _scatter(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    if points:
        xs, ys = zip(*points, strict=True)
        axes.scatter(xs, ys, color=color, s=26, alpha=0.85, label=label)


def _curves(search: SearchRecord) -> Plot:
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
