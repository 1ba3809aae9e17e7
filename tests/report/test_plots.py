from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from mens_exp.report import plots
from mens_exp.report.summary import Records, load

pytestmark = pytest.mark.draws


@pytest.fixture
def records(write_run):
    return load(write_run())


def test_draw_gives_the_same_bytes_twice(records):
    """Plots have no date and no random id."""
    assert plots.draw(records) == plots.draw(records)


def test_axes_are_labelled_with_units(records):
    """Text is not converted to paths, so it can be read back."""
    loss, lr, norm, throughput = (plot.svg for plot in plots.draw(records))
    assert "loss (nats per token)" in loss
    assert "learning rate" in lr
    assert "norm, before clipping" in norm
    assert "tokens per second" in throughput
    assert all("optimizer step" in svg for svg in (loss, lr, norm, throughput))


def test_loss_plot_names_both_validation_losses(records):
    """The lines are labelled directly."""
    svg = plots.draw(records)[0].svg
    assert "base 2.0000" in svg
    assert "tuned 1.5000" in svg


def test_svg_is_an_element_that_asks_for_nothing(records):
    """The SVG is well-formed, has internal references only and inherits its colours."""
    for plot in plots.draw(records):
        root = ET.fromstring(plot.svg)
        links = [value for e in root.iter() for key, value in e.attrib.items() if "href" in key]
        assert root.tag == "svg"
        assert all(link.startswith("#") for link in links)
        assert "http" not in plot.svg
        assert "var(--plot-" in plot.svg
        assert "#0101" not in plot.svg


def test_a_run_without_steps_says_so(failed_run):
    """The reason is shown instead of a plot."""
    for plot in plots.draw(load(failed_run)):
        assert plot.svg == ""
        assert plot.absent == "no training step was recorded before the run ended"


def test_one_step_of_zero_is_drawn(records):
    """A single point has no extent, which must not cause a warning."""
    payload = {"step": 1, "train/loss": 0.0, "train/grad_norm": 0.0, "optim/lr": 0.0}
    one = Records(
        manifest=records.manifest, events=({"ts_ms": 0, "event": "step", "payload": payload},)
    )
    *drawn, throughput = plots.draw(one)
    assert all(plot.svg for plot in drawn)
    assert throughput.absent


def test_smooth_starts_at_the_first_value_and_keeps_a_constant():
    """For a short run the span is 5: the old value keeps 1 - 2/6 = 2/3 of its weight."""
    assert plots.smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert plots.smooth([5.0, 0.0]) == pytest.approx([5.0, 5.0 * (2 / 3) / (5 / 3)])
    assert plots.smooth([]) == []


def test_thin_keeps_a_spike():
    """Of each stretch of 50 the lowest and the highest stay, in order."""
    values = [0.0] * 100
    values[77] = 9.0
    assert plots.thin(list(range(100)), values, most=4) == ([0, 50, 77], [0.0, 0.0, 9.0])


def test_thin_leaves_a_short_series_alone():
    """A series that fits is not reduced."""
    assert plots.thin([1, 2], [3.0, 4.0], most=2) == ([1, 2], [3.0, 4.0])
