"""A study as one self-contained HTML page, which runs no script and asks for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from markupsafe import Markup

from mens_exp.report import comparison_view, wording
from mens_exp.report.comparison_plots import drawings
from mens_exp.report.rendering import rendered

if TYPE_CHECKING:
    from mens_exp.artifacts.comparison import Comparison

__all__ = ["page"]


def page(record: Comparison) -> str:
    """Render a comparison; the same record gives the same text."""
    return rendered(
        "comparison.html.j2",
        record=record,
        title=wording.visible(f"{record.primary} by {', '.join(record.factors) or 'arm'}"),
        headline=comparison_view.headline(record),
        verdicts=comparison_view.verdicts_grid(record),
        findings=[text for text, _ in comparison_view.findings(record)],
        arms=comparison_view.arms_grid(record),
        noise=comparison_view.noise_grid(record),
        kpis=[
            (wording.visible(one["arm"]), comparison_view.kpis_grid(one))
            for one in record.contrasts
        ],
        plots=[(plot, Markup(plot.svg)) for plot in drawings(record)],  # noqa: S704 - drawn here
    )
