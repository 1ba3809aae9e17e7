"""A histogram as an inline SVG in the colours of the page."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup, escape

from mens_exp.report import wording

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.corpus_report import Histogram

__all__ = ["Bars", "histogram"]

_WIDTH, _HEIGHT, _LEFT, _TOP, _FOOT, _RIGHT = 330, 150, 8, 20, 40, 8  # pixels
_GAP = 2
_LABEL = 42  # pixels that a label of the axis takes
_INK, _MUTED = "var(--plot-ink, #777777)", "var(--plot-muted, #808080)"
_BAR, _MARK = "var(--plot-tuned, #1f8f7d)", "var(--plot-heat, #b4471b)"


class Bars(NamedTuple):
    """One drawing, with what it shows and how to read it."""

    title: str
    caption: str
    svg: Markup


def histogram(
    title: str, unit: str, found: Histogram, marks: Mapping[str, float] | None = None
) -> Bars:
    """Draw a distribution, its lengths on a logarithmic axis.

    Args:
        title: what it shows.
        unit: of the lengths.
        found: the distribution.
        marks: name -> length to draw a line at, where it lies within.
    """
    caption = (
        f"{unit}; median {wording.count(found['p50'])}, "
        f"p90 {wording.count(found['p90'])}, longest {wording.count(found['largest'])}"
    )
    edges, counts = found["edges"], found["counts"]
    width = (_WIDTH - _LEFT - _RIGHT) / len(counts)
    floor, most = _HEIGHT - _FOOT, max(counts)
    head = f'<svg role="img" aria-label="{escape(f"{title}: {caption}")}" '
    head += f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    parts = [f'{head} fill="currentColor" font-size="11">']
    for number, count in enumerate(counts):
        high = (floor - _TOP) * count / most
        said = (
            f"{wording.count(edges[number])} to {wording.count(edges[number + 1])}: "
            f"{wording.count(count)}"
        )
        parts.append(
            f'<rect x="{_LEFT + number * width:.1f}" y="{floor - high:.1f}" '
            f'width="{max(width - _GAP, 1):.1f}" height="{high:.1f}" fill="{_BAR}">'
            f"<title>{escape(said)}</title></rect>"
        )
    every = max(1, -(-_LABEL // int(width or 1)))
    parts += [
        _text(_LEFT + number * width, floor + 15, wording.count(edges[number]), "middle", _MUTED)
        for number in range(every, len(counts), every)
    ]
    parts.append(_text(_WIDTH - _RIGHT, _HEIGHT - 6, unit, "end", _MUTED))
    for label, value in (marks or {}).items():
        place = _place(value, edges)
        if place is not None:
            x = _LEFT + place * width
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{floor}" stroke="{_MARK}" '
                'stroke-width="1.5" stroke-dasharray="4 3"></line>'
            )
            parts.append(_text(x, 10, label, "middle", _INK))
    return Bars(title, caption, Markup("".join([*parts, "</svg>"])))  # noqa: S704 - drawn here


def _place(value: float, edges: list[float]) -> float | None:
    """Return where a length lies, in bars from the left; None outside."""
    for number, (low, high) in enumerate(pairwise(edges)):
        if low <= value < high:
            return number + (value - low) / (high - low)
    return None


def _text(x: float, y: float, text: str, anchor: str, color: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
    )
