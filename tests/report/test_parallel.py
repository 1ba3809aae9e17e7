"""Parallel coordinates over numeric, categorical and constant factors."""

from __future__ import annotations

import pytest

from mens_exp.report.study_plots import Line, parallel


def line(cell, **values):
    return Line(cell=cell, arm=f"arm {cell}", color="red", values=values)


@pytest.mark.parametrize("odd", ["nan", "inf", "-inf", "1e999"])
def test_a_factor_without_an_end_lies_apart(odd):
    """NaN and infinity have no place on the scale."""
    lines = [line(0, clip="1.0", loss=2.0), line(1, clip=odd, loss=3.0)]
    drawn = parallel(["clip", "loss"], lines, {})
    paths = [text.partition('"')[0] for text in drawn.split(' d="')[1:]]
    assert len(paths) == 2
    assert not any("nan" in text or "inf" in text for text in paths)
    assert f">{odd}</text>" in drawn
    assert ">1.0</text>" in drawn


def test_numbers_lie_to_scale():
    """5 is half-way between 0 and 10."""
    lines = [line(number, r=text, loss=1.0) for number, text in enumerate(("0", "5", "10"))]
    paths = [
        text.partition('"')[0] for text in parallel(["r", "loss"], lines, {}).split(' d="')[1:]
    ]
    low, middle, high = (float(path.split()[1].removesuffix("L")) for path in paths)
    assert middle == pytest.approx((low + high) / 2)
