"""Plots of a run as inline SVG: its telemetry, and its KPIs during training.

The same records give the same bytes: identifiers are salted with the plot's name, no date is
written, and the user's matplotlib settings are ignored. Every colour is a CSS variable with a
neutral fallback, so that a plot follows the page's light or dark theme and is also readable
without these variables.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import matplotlib as mpl
from markupsafe import escape
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mens_exp.artifacts.metrics import METRICS
from mens_exp.artifacts.telemetry import own_series
from mens_exp.report import wording
from mens_exp.report.document import Plot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes

    from mens_exp.report.summary import Records

# A unique colour for each role while drawing; in the SVG, a CSS variable replaces it.
_INK, _MUTED, _GRID, _BASE, _TUNED = "#010101", "#020202", "#030303", "#040404", "#050505"
_CSS = {
    _INK: "var(--plot-ink, #777777)",
    _MUTED: "var(--plot-muted, #808080)",
    _GRID: "var(--plot-grid, #80808040)",
    _BASE: "var(--plot-base, #8a8a84)",
    _TUNED: "var(--plot-tuned, #1a83a8)",
}
# The palette of Okabe and Ito, distinct for every kind of colour vision; the last two are ours.
_OF_ARMS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a4a10", "#707070")
ARMS = tuple(f"#0{number}0{number}0{number}" for number in range(6, 6 + len(_OF_ARMS) - 4))
ARMS += tuple(f"#1{number}1{number}1{number}" for number in range(6, 10))
"""Colours of arms while drawing, in order; reused if there are more arms."""
_CSS |= {
    drawn: f"var(--plot-arm-{number}, {css})"
    for number, (drawn, css) in enumerate(zip(ARMS, _OF_ARMS, strict=True))
}
_FONT_SIZE = 9.5
_NARROW = 6.0  # inches; a wider drawing takes the full page width
_MOST_POINTS = 1500  # a plot is about 900 pixels wide; more points only make the page heavy
_LABEL_GAP = 0.075  # fraction of the axes' height between two labels in the margin

_Series = tuple[list[int], list[float]]


def draw(records: Records) -> list[Plot]:
    """Draw the loss (wide), then learning rate, gradient norm, throughput and load.

    Args:
        records: the run; ``step`` and ``validation`` events of its telemetry are drawn.
    """
    return [
        *_lr_range(records),
        _loss(records),
        _single(records, "lr", "Learning rate", "optim/lr", "learning rate", _scientific),
        _single(records, "grad_norm", "Gradient norm", "train/grad_norm", "norm, before clipping"),
        _throughput(records),
        *_machine(records),
    ]


def css_of(color: str) -> str:
    """Return the CSS of a drawing colour, such as one of :data:`ARMS`."""
    return _CSS[color]


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average over about a tenth of the run, with bias correction.

    Args:
        values: one value per step.

    Returns:
        As many values; the first equals the first of `values`.
    """
    keep = 1 - 2 / (_span(len(values)) + 1)
    total = weight = 0.0
    means = []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight)
    return means


def thin(steps: list[int], values: list[float], most: int = _MOST_POINTS) -> _Series:
    """Keep the lowest and the highest point of each interval, so that no spike is lost.

    Args:
        steps: ascending step numbers.
        values: as many values.
        most: maximum number of points, at least 2.
    """
    if len(steps) <= most:
        return steps, values
    stretch = -(-len(steps) // (most // 2))
    kept: list[int] = []
    for start in range(0, len(steps), stretch):
        within = range(start, min(start + stretch, len(steps)))
        ends = {min(within, key=values.__getitem__), max(within, key=values.__getitem__)}
        kept.extend(sorted(ends))
    return [steps[i] for i in kept], [values[i] for i in kept]


def _span(length: int) -> int:
    return max(5, length // 10)


def _series(records: Records, metric: str) -> _Series:
    seen = [p for p in records.payloads("step") if p.get(metric) is not None]
    return [p["step"] for p in seen], [p[metric] for p in seen]


def _validation(records: Records, condition: str) -> _Series:
    seen = [
        p
        for p in records.payloads("validation")
        if p.get("condition") == condition and p.get("val/loss") is not None
    ]
    return [p["step"] for p in seen], [p["val/loss"] for p in seen]


def _legend_above(axes: Axes) -> None:
    """Place the legend above the axes, where it covers no line."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=2,
        frameon=False,
        labelcolor=_MUTED,
        borderaxespad=0.2,
        handlelength=1.6,
    )


def _loss(records: Records) -> Plot:
    title = "Loss"
    steps, values = _series(records, "train/loss")
    if not steps:
        return absent("loss", title, _no_steps(records))
    caption = (
        "Training loss of each optimizer step, thin, and its moving average over about "
        f"{_span(len(values))} steps; validation loss of base and tuned model, dashed."
    )

    def paint(axes: Axes) -> None:
        axes.plot(*thin(steps, values), color=_INK, alpha=0.35, linewidth=0.9, label="each step")
        axes.plot(*thin(steps, smooth(values)), color=_INK, linewidth=1.9, label="moving average")
        _paint_validation(axes, records)
        _paint_resumes(axes, records)
        axes.set_ylabel(f"loss ({wording.loss_unit(records.manifest)})")
        _legend_above(axes)

    return drawn("loss", title, caption, (10.4, 3.9), paint)


def _lr_range(records: Records) -> list[Plot]:
    """Draw the loss over the learning rate, if the run was a range test."""
    found = records.manifest.results.get("lr_range")
    seen = [p for p in records.payloads("step") if p.get("optim/lr") and p.get("train/loss")]
    if found is None or not found["smoothed"] or len(seen) != len(found["smoothed"]):
        return []
    rates = [p["optim/lr"] for p in seen]
    changes = [p["train/loss"] - p["train/base_loss"] for p in seen]
    caption = (
        "Training loss of each step, less that of the base model on the same tokens, over its "
        "learning rate, thin, and smoothed."
    )

    def paint(axes: Axes) -> None:
        axes.set_xscale("log")
        axes.plot(rates, changes, color=_INK, alpha=0.35, linewidth=0.9)
        axes.plot(rates, found["smoothed"], color=_INK, linewidth=1.9)
        for rate, label in ((found["proposed"], "proposed"), (found["lowest_at"], "lowest")):
            if rate is not None:
                axes.axvline(rate, color=_TUNED, linewidth=1.3, linestyle=(0, (5, 3)))
                axes.text(rate, 1.01, label, color=_TUNED, transform=axes.get_xaxis_transform())
        axes.set_xlabel("learning rate")
        axes.xaxis.set_major_formatter(lambda rate, _: _scientific(rate, None))
        floor = min(found["smoothed"])
        axes.set_ylim(1.6 * floor, max(-floor, 1e-3))  # divergence would flatten the rest
        axes.set_ylabel(f"change of the loss ({wording.loss_unit(records.manifest)})")

    return [drawn("lr_range", "Loss over learning rate", caption, (10.4, 3.4), paint)]


def _paint_validation(axes: Axes, records: Records) -> None:
    ends = []
    for condition, color in (("base", _BASE), ("tuned", _TUNED)):
        steps, values = _validation(records, condition)
        if not values:
            continue
        axes.axhline(values[-1], color=color, linewidth=1.3, linestyle=(0, (5, 3)))
        if condition == "tuned":
            axes.plot(steps, values, color=color, linestyle="", marker="D", markersize=5.5)
        ends.append((values[-1], f"{condition} {wording.loss(values[-1])}", color))
    _label_margin(axes, ends)


def _label_margin(axes: Axes, ends: list[tuple[float, str, str]]) -> None:
    """Write each label next to its line, and separate overlapping labels."""
    low, high = axes.get_ylim()
    lowest = -1.0
    for value, text, color in sorted(ends):
        height = max((value - low) / (high - low), lowest + _LABEL_GAP)
        lowest = height
        axes.text(
            1.008, height, text, color=color, transform=axes.transAxes, va="center", weight="bold"
        )


def _paint_resumes(axes: Axes, records: Records) -> None:
    for payload in records.payloads("resumed"):
        if payload.get("step") is not None:
            axes.axvline(payload["step"], color=_MUTED, linewidth=0.8, linestyle=":")


def _single(
    records: Records,
    name: str,
    title: str,
    metric: str,
    ylabel: str,
    spell: Callable[[float, int | None], str] | None = None,
) -> Plot:
    steps, values = _series(records, metric)
    if not steps:
        return absent(name, title, _no_steps(records))

    def paint(axes: Axes) -> None:
        axes.plot(*thin(steps, values), color=_INK, linewidth=1.4)
        axes.set_ylabel(ylabel)
        axes.set_ylim(bottom=0)
        if spell is not None:
            axes.yaxis.set_major_formatter(FuncFormatter(spell))

    high, last = (f"{value:.3g}" for value in (max(values), values[-1]))
    caption = f"Highest {high}, at the end {last}."
    return drawn(name, title, caption, (3.5, 2.2), paint)


def _throughput(records: Records) -> Plot:
    name, title = "throughput", "Throughput"
    every = _series(records, "perf/tokens_per_s")
    supervised = _series(records, "perf/supervised_tokens_per_s")
    if not every[0] and not supervised[0]:
        return absent(name, title, _no_steps(records))

    def paint(axes: Axes) -> None:
        axes.plot(*thin(*every), color=_INK, linewidth=1.1, alpha=0.55, label="all")
        axes.plot(*thin(*supervised), color=_TUNED, linewidth=1.6, label="supervised")
        axes.set_ylabel("tokens per second")
        axes.set_ylim(bottom=0)
        _legend_above(axes)

    caption = "Padding is not counted."
    return drawn(name, title, caption, (3.5, 2.2), paint)


_ENGAGED = {"system/cpu_percent": ("CPU", _INK), "system/gpu_percent": ("GPU", _TUNED)}


def _machine(records: Records) -> list[Plot]:
    """Draw CPU and GPU load; nothing if it was not sampled."""
    name, title = "machine", "Machine"
    series = {key: _series(records, key) for key in _ENGAGED}
    series = {key: one for key, one in series.items() if one[0]}
    if not series:
        return []

    def paint(axes: Axes) -> None:
        for key, one in series.items():
            label, color = _ENGAGED[key]
            axes.plot(*thin(*one), color=color, linewidth=1.4, label=label)
        axes.set_ylabel("load (%)")
        axes.set_ylim(bottom=0, top=102)
        _legend_above(axes)

    means = [
        f"{words} {sum(values) / len(values):.0f} {unit}"
        for key, words, unit in (
            ("system/cpu_percent", "CPU", "%"),
            ("system/memory_percent", "memory", "%"),
            ("system/gpu_percent", "GPU", "%"),
            ("system/gpu_power_w", "GPU power", "W"),
        )
        if (values := _series(records, key)[1])
    ]
    caption = f"Means: {', '.join(means)}. Of the whole machine, sampled at each step."
    return [drawn(name, title, caption, (3.5, 2.2), paint)]


_MOST_OWN = 12  # plots of user metrics; a table lists all


def draw_own(records: Records) -> list[Plot]:
    """Draw user metrics with values in several steps, up to `_MOST_OWN`.

    Args:
        records: the run; ``step`` and ``logged`` events of its telemetry are drawn.
    """
    curves = {}
    for name, one in own_series(records.events).items():
        points = {step: value for step, value in one.points if value is not None}
        if len(points) > 1:
            curves[name] = (one.declaration["unit"], list(points), list(points.values()))
    return [
        _own(f"own{number}", wording.visible(name), *curve)
        for number, (name, curve) in enumerate(list(curves.items())[:_MOST_OWN])
    ]


def _own(name: str, title: str, unit: str, steps: list[int], values: list[float]) -> Plot:
    def paint(axes: Axes) -> None:
        axes.plot(*thin(steps, values), color=_INK, linewidth=1.4)
        axes.set_ylabel("" if unit == "1" else wording.visible(unit))

    caption = f"From {values[0]:.3g} to {values[-1]:.3g}."
    return drawn(name, title, caption, (3.5, 2.2), paint)


def _no_steps(records: Records) -> str:
    if records.status == "succeeded":
        return "the telemetry contains no training steps"
    return "no training step was recorded before the run ended"


def _scientific(value: float, _position: int | None) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}"


def drawn(
    name: str, title: str, caption: str, inches: tuple[float, float], paint: Callable[[Axes], None]
) -> Plot:
    """Draw a plot as a reproducible inline SVG in the page's colours.

    Args:
        name: its identifier.
        title: its text alternative.
        caption: an explanation of the plot.
        inches: width and height.
        paint: draws on axes that are prepared for optimizer steps, which it may change.
    """
    svg = _inline(_drawn(name, inches, paint), title)
    return Plot(name=name, title=title, caption=caption, svg=svg, wide=inches[0] > _NARROW)


def absent(name: str, title: str, why: str) -> Plot:
    """Return a plot without data."""
    return Plot(name=name, title=title, caption="", absent=why)


def _drawn(name: str, inches: tuple[float, float], paint: Callable[[Axes], None]) -> str:
    """Draw a plot as an SVG file."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams["svg.hashsalt"] = f"mens_exp/{name}"
        mpl.rcParams["svg.fonttype"] = "none"  # keep text selectable and in the page's font
        mpl.rcParams["text.parse_math"] = False
        mpl.rcParams["font.size"] = _FONT_SIZE
        figure = Figure(figsize=inches, layout="constrained")
        axes = figure.add_subplot()
        _furnish(axes)
        paint(axes)
        buffer = io.StringIO()
        bare = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=bare)
    return buffer.getvalue()


def _furnish(axes: Axes) -> None:
    """Reduce the frame to one line, and add faint horizontal grid lines."""
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=7, integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.margins(x=0.012)
    axes.tick_params(colors=_MUTED, length=0, pad=5)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set_color(_MUTED)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)


def _inline(document: str, title: str) -> str:
    """Convert an SVG file to an inline element, without prologue, fixed size and unused names."""
    svg = document[document.index("<svg") :].rstrip()
    svg = re.sub(r"\s*<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"(<svg[^>]*?) width=\"[^\"]*\" height=\"[^\"]*\"", r"\1", svg, count=1)
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' xmlns(:\w+)?="[^"]*"', "", svg).replace("xlink:href", "href")
    used = set(re.findall(r"#([\w.-]+)[\")]", svg))
    svg = re.sub(r' id="([^"]*)"', lambda m: m[0] if m[1] in used else "", svg)
    for color, css in _CSS.items():
        svg = svg.replace(color, css)
    head = (
        f'<svg role="img" aria-label="{escape(title)}" stroke-linejoin="round" fill="currentColor"'
    )
    return svg.replace("<svg", head, 1)


_SHOWN = ("eval/parse_rate", "eval/task_success")  # shown first


def draw_kpis(records: Records) -> list[Plot]:
    """Draw the scorecards of training; nothing if there are none.

    Args:
        records: the run; ``scorecard_step`` events of its telemetry are drawn.
    """
    payloads = records.payloads("scorecard_step")
    if not payloads:
        return []
    chosen_by = records.manifest.results.get("adapter_metric")
    named = dict.fromkeys([*_SHOWN, *([chosen_by] if chosen_by else [])])
    shown = [name for name in named if _is_drawn(name, chosen_by)]
    series = {
        name: [(p["step"], p[name]) for p in payloads if p.get(name) is not None] for name in shown
    }
    series = {name: points for name, points in series.items() if points}
    title = "KPIs while training"
    if not series:
        why = "; ".join(dict.fromkeys(payloads[-1].get("unknown", {}).values()))
        return [absent("kpis", title, why or "nothing was measured")]

    def paint(axes: Axes) -> None:
        for color, (name, points) in zip(ARMS, series.items(), strict=False):
            steps, values = zip(*points, strict=True)
            label = name.removeprefix("eval/")
            axes.plot(
                steps, values, color=color, marker="o", markersize=4, linewidth=1.6, label=label
            )
        unit = METRICS[next(iter(series))].unit
        axes.set_ylabel("share of answers" if unit == "1" else unit)
        axes.set_ylim(bottom=0, top=1.02 if unit == "1" else None)
        axes.legend(frameon=False, loc="lower right", handlelength=1.4)

    caption = _caption(records, payloads[-1]["items"], series)
    return [drawn("kpis", title, caption, (3.5, 2.2), paint)]


def _is_drawn(name: str, chosen_by: str | None) -> bool:
    """Select the KPIs of one axis: shares, or only the selection KPI if it is not a share."""
    if chosen_by is None or METRICS[chosen_by].unit == "1":
        return True
    return name == chosen_by


def _caption(records: Records, items: int, series: dict[str, list[tuple[int, float]]]) -> str:
    ends = ", ".join(
        f"{name.removeprefix('eval/')} {points[-1][1]:.3g}" for name, points in series.items()
    )
    results = records.manifest.results
    chosen = ""
    if "adapter_metric" in results:
        name = results["adapter_metric"].removeprefix("eval/")
        chosen = f" The adapter is the one of step {results['adapter_step']}, by {name}."
    plural = "item" if items == 1 else "items"
    return f"The tuned model on the suite's first {items} {plural}; at the end {ends}.{chosen}"
