from __future__ import annotations

import dataclasses

import pytest

from mens_exp.report import plots
from mens_exp.report.summary import load

pytestmark = pytest.mark.draws


@pytest.fixture
def with_steps(write_run):
    """Return a run's records with scorecards from training in its telemetry."""
    records = load(write_run())

    def made(*payloads, **results):
        events = [
            {"ts_ms": 1, "event": "scorecard_step", "payload": {"items": 8, **payload}}
            for payload in payloads
        ]
        records.manifest.results.update(results)
        return dataclasses.replace(records, events=(*records.events, *events))

    return made


def test_a_run_without_scorecards_in_training_has_no_such_plot(
    with_steps,
):
    """Without scorecards there is not even an empty plot."""
    assert plots.draw_kpis(with_steps()) == []


def test_the_curves_are_named_and_their_ends_told(with_steps):
    """The plot gives the question, the last values, and how the adapter was chosen."""
    (plot,) = plots.draw_kpis(
        with_steps(
            {"step": 2, "eval/parse_rate": 0.5, "eval/task_success": 0.0},
            {"step": 4, "eval/parse_rate": 0.875, "eval/task_success": 0.25},
            adapter_metric="eval/task_success",
            adapter_step=4,
        )
    )
    assert "first 8 items; at the end parse_rate 0.875, task_success 0.25." in plot.caption
    assert "The adapter is the one of step 4, by task_success." in plot.caption
    assert all(text in plot.svg for text in ("parse_rate", "task_success", "share of answers"))
    assert "#0606" not in plot.svg


def test_a_kpi_that_is_no_share_has_the_axis_for_itself(
    with_steps,
):
    """Milliseconds and shares have no common scale."""
    (plot,) = plots.draw_kpis(
        with_steps(
            {"step": 2, "eval/parse_rate": 0.5, "eval/latency_ms": 400.0},
            adapter_metric="eval/latency_ms",
            adapter_step=2,
        )
    )
    assert "parse_rate" not in plot.caption
    assert ">ms<" in plot.svg


def test_what_was_not_measured_says_why(with_steps):
    """The reason replaces the plot."""
    (plot,) = plots.draw_kpis(
        with_steps({"step": 2, "unknown": {"eval/task_success": "no sandbox"}})
    )
    assert (plot.svg, plot.absent) == ("", "no sandbox")
