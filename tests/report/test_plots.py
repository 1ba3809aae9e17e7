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
    """No date, no random identifier."""
    assert plots.draw(records) == plots.draw(records)


def test_axes_are_labelled_with_units(records):
    """Text stays text, so that it can be read back."""
    loss, lr, norm, throughput = (plot.svg for plot in plots.draw(records))
    assert "loss (nats per token)" in loss
    assert "learning rate" in lr
    assert "norm, before clipping" in norm
    assert "tokens per second" in throughput
    assert all("optimizer step" in svg for svg in (loss, lr, norm, throughput))


def test_loss_plot_names_both_validation_losses(records):
    """The lines are labelled in place."""
    svg = plots.draw(records)[0].svg
    assert "base 2.0000" in svg
    assert "tuned 1.5000" in svg


def test_svg_is_an_element_that_asks_for_nothing(records):
    """Well-formed, with references into itself only and colours the page decides."""
    for plot in plots.draw(records):
        root = ET.fromstring(plot.svg)
        links = [value for e in root.iter() for key, value in e.attrib.items() if "href" in key]
        assert root.tag == "svg"
        assert all(link.startswith("#") for link in links)
        assert "http" not in plot.svg
        assert "var(--plot-" in plot.svg
        assert "#0101" not in plot.svg


def test_a_run_without_steps_says_so(failed_run):
    """Nothing is drawn, and the reason stands in its place."""
    for plot in plots.draw(load(failed_run)):
        assert plot.svg == ""
        assert plot.absent == "no training step was recorded before the run ended"


def test_one_step_of_zero_is_drawn(records):
    """A plot of one point has no extent of its own, and no warning comes of it."""
    payload = {"step": 1, "train/loss": 0.0, "train/grad_norm": 0.0, "optim/lr": 0.0}
    one = Records(
        manifest=records.manifest, events=({"ts_ms": 0, "event": "step", "payload": payload},)
    )
    *drawn, throughput = plots.draw(one)
    assert all(plot.svg for plot in drawn)
    assert throughput.absent


def test_smooth_starts_at_the_first_value_and_keeps_a_constant():
    """The span of a short run is 5: the older value keeps 1 - 2/6 = 2/3 of its weight."""
    assert plots.smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert plots.smooth([5.0, 0.0]) == pytest.approx([5.0, 5.0 * (2 / 3) / (5 / 3)])
    assert plots.smooth([]) == []


def test_thin_keeps_a_spike():
    """Of each stretch of 50 the lowest and the highest stay, in the order of their steps."""
    values = [0.0] * 100
    values[77] = 9.0
    assert plots.thin(list(range(100)), values, most=4) == ([0, 50, 77], [0.0, 0.0, 9.0])


def test_thin_leaves_a_short_series_alone():
    """Nothing is dropped where there is room."""
    assert plots.thin([1, 2], [3.0, 4.0], most=2) == ([1, 2], [3.0, 4.0])
