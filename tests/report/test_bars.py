from __future__ import annotations

import re
import xml.etree.ElementTree as ET

from mens_exp.artifacts.corpus_record import Histogram
from mens_exp.report.corpus_view import histogram

FOUND = Histogram(
    count=10,
    mean=3.0,
    smallest=1,
    largest=7,
    p50=3.0,
    p90=6.0,
    p99=7.0,
    edges=[1, 2, 4, 8],
    counts=[2, 8, 4],
)


def test_bars_are_as_high_as_their_counts():
    """The highest bar is four times the first, and each has a title."""
    bars = histogram("Length", "tokens", FOUND)
    root = ET.fromstring(bars.svg)
    rects = list(root.iter("rect"))
    heights = [float(one.attrib["height"]) for one in rects]
    assert heights[1] == 4 * heights[0] == 2 * heights[2]
    assert [one.findtext("title") for one in rects] == ["1 to 2: 2", "2 to 4: 8", "4 to 8: 4"]
    assert bars.caption == "tokens; median 3, p90 6, longest 7"


def test_a_mark_stands_where_its_length_is():
    """A mark at 3 is in the middle of the second bar; one outside is not drawn."""
    bars = histogram("Length", "tokens", FOUND, {"limit": 3, "far": 99})
    (line,) = re.findall(r'<line x1="([\d.]+)"', bars.svg)
    root = ET.fromstring(bars.svg)
    second = list(root.iter("rect"))[1].attrib
    middle = float(second["x"]) + (float(second["width"]) + 2) / 2
    assert abs(float(line) - middle) < 0.2
    assert "limit" in bars.svg
    assert "far" not in bars.svg


def test_a_drawing_asks_for_nothing_and_takes_the_colours_of_the_page():
    """The SVG has no links, and a title cannot end its attribute."""
    bars = histogram('"><script>', "tokens", FOUND)
    ET.fromstring(bars.svg)
    assert "http" not in bars.svg
    assert "<script" not in bars.svg
    assert "var(--plot-" in bars.svg
