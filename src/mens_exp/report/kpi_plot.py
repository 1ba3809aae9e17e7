"""The KPIs of a run while it trained, as a line plot."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mens_exp.artifacts.metrics import METRICS
from mens_exp.report.plots import ARMS, Plot, svg_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from mens_exp.report.records import Records

__all__ = ["draw"]

_SHOWN = ("eval/parse_rate", "eval/task_success")  # what a reader looks for first


def draw(records: Records) -> list[Plot]:
    """Draw the scorecards of training; nothing where none was made.

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
        return [Plot(name="kpis", title=title, caption="", absent=why or "nothing was measured")]

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

    return [
        Plot(
            name="kpis",
            title=title,
            caption=_caption(records, payloads[-1]["items"], series),
            svg=svg_of("kpis", title, (3.5, 2.2), paint),
        )
    ]


def _is_drawn(name: str, chosen_by: str | None) -> bool:
    """Keep to one axis: shares, or alone what the adapter was chosen by where it is no share."""
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
