"""A corpus as one self-contained HTML page with histograms: a pure function of its record."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from markupsafe import Markup, escape

from mens_exp.report import wording
from mens_exp.report.rendering import rendered

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mens_exp.artifacts.corpus_record import CorpusReport, Histogram, Share

_SIDES = ("train", "val", "heldout")
_LENGTHS = {"prompt": "Length of a prompt", "answer": "Length of an answer"}
_LIKE_ALL = 2  # sources that are worth a table
_MOST_SHARES = 12

_Table = tuple[list[str], list[list[str]]]


class _Card(NamedTuple):
    label: str
    figure: str
    note: str = ""
    absent: str = ""


class _Kinds(NamedTuple):
    """The kinds of nodes of one language; each with the share of the rows that have it."""

    language: str
    summary: str
    occurring: list[tuple[str, str]]
    absent: list[str]


def render(report: CorpusReport) -> str:
    """Render the report of a corpus.

    Args:
        report: its record; what is null there is shown as absent, with the reason.

    Returns:
        A self-contained HTML document; the same record gives the same text.
    """
    return rendered(
        "corpus.html.j2",
        headline=_headline(report),
        cards=_cards(report),
        plots=_plots(report),
        before=_before(report),
        mixes=_mixes(report),
        parsed=_parsed(report),
        kinds=_kinds(report),
        sources=_sources(report),
        tokens=_tokens(report),
        distinct=_distinct(report),
        found=_found(report),
        findings=_findings(report),
        unknown=[
            (wording.visible(name), wording.visible(why)) for name, why in report.unknown.items()
        ],
    )


def _headline(report: CorpusReport) -> str:
    rows = f"{wording.count(report.rows)} rows"
    if set(report.sides) - {"all"}:
        named = [name for name in _SIDES if name in report.sides]
        sides = ", ".join(f"{name} {wording.count(report.sides[name])}" for name in named)
        rows = f"{rows} ({sides})"
    tokens = report.tokens
    if tokens is None:
        return f"{rows}."
    about = "" if tokens["exact"] else "about "
    return (
        f"{rows} of {about}{wording.count(tokens['tokens'])} tokens, of which "
        f"{wording.percent(tokens['supervised_share'])} are learned."
    )


def _cards(report: CorpusReport) -> list[_Card]:
    why = report.unknown
    tokens, rest, diversity = report.tokens, report.duplicates, report.diversity
    checked = [one for one in report.parse.values() if one["parsed"] is not None]
    asked = sum(one["rows"] for one in checked)
    parsed = sum(one["parsed"] or 0 for one in checked)
    cards = [_Card("Rows", wording.count(report.rows))]
    if tokens is None:
        cards.append(_Card("Tokens", "", absent=why["tokens"]))
    else:
        note = (
            "counted" if tokens["exact"] else f"± {wording.count(2 * tokens['tokens_se'])} (95 %)"
        )
        lost = f"{wording.count(tokens['lost_tokens'])} tokens at {tokens['seq_len']}"
        cards += [
            _Card("Tokens", wording.count(tokens["tokens"]), note),
            _Card("Learned", wording.percent(tokens["supervised_share"]), "of the tokens"),
            _Card("Lost to truncation", wording.percent(tokens["lost_share"]), lost),
        ]
    cards.append(
        _Card(
            "Code that parses", wording.percent(parsed / asked), f"of {wording.count(asked)} rows"
        )
        if asked
        else _Card("Code that parses", "", absent="no row names a language that is parsed here")
    )
    cards.append(
        _Card("Duplicates left", "", absent=why["duplicates"])
        if rest is None
        else _Card(
            "Duplicates left",
            wording.count(rest["exact"] + rest["near"]),
            f"{wording.count(rest['exact'])} exact, {wording.count(rest['near'])} near",
        )
    )
    cards.append(
        _Card("Compression", "", absent=why["diversity"])
        if diversity is None
        else _Card("Compression", f"{diversity['compression_ratio']:.2f}", "answers, zlib")
    )
    secrets = sum(report.safety["secrets"].values())
    phrases = sum(report.safety["injections"].values())
    cards.append(
        _Card("Secrets", wording.count(secrets), f"and {wording.count(phrases)} injection phrases")
    )
    return cards


def _plots(report: CorpusReport) -> list[Bars]:
    plots = [
        histogram(title, "characters", report.lengths[name])
        for name, title in _LENGTHS.items()
        if name in report.lengths
    ]
    tokens = report.tokens
    if tokens is not None:
        marks = {"sequence length": float(tokens["seq_len"])}
        plots.append(histogram("Length of a document", "tokens", tokens["lengths"], marks))
    return plots


def _before(report: CorpusReport) -> _Table:
    rows = []
    for step in report.before:
        dropped = ", ".join(f"{reason} {count}" for reason, count in step["dropped"].items())
        counts = [wording.count(step["rows_in"]), wording.count(step["rows_out"])]
        rows.append([step["step"], *counts, wording.visible(dropped) or "nothing"])
    return ["step", "rows in", "rows out", "dropped"], rows


def _mixes(report: CorpusReport) -> list[_Table]:
    heads = ["source", "share asked for", "share", "rows", "passes"]
    return [
        (
            heads,
            [
                [
                    wording.visible(name),
                    wording.percent(one["share_asked"]),
                    wording.percent(one["share"]),
                    wording.count(one["rows"]),
                    f"{one['passes']:.2f}",
                ]
                for name, one in step["sources"].items()
            ],
        )
        for step in report.before
        if step["sources"] is not None
    ]


def _parsed(report: CorpusReport) -> _Table:
    rows = []
    for language, one in report.parse.items():
        parsed = one["parsed"]
        share = wording.percent(parsed / one["rows"]) if parsed is not None else "unknown"
        why = report.unknown.get(f"parse.{language}", "")
        name = wording.visible(language) or "none named"
        rows.append([name, wording.count(one["rows"]), share, wording.visible(why)])
    return ["language", "rows", "parse", ""], rows


def _kinds(report: CorpusReport) -> list[_Kinds]:
    return [
        _Kinds(
            language,
            f"{len(one['occurring'])} of {len(one['occurring']) + len(one['absent'])} kinds of "
            f"nodes occur in {wording.count(one['rows'])} rows",
            [
                (kind, wording.percent(count / one["rows"]))
                for kind, count in sorted(one["occurring"].items(), key=lambda it: (-it[1], it[0]))
            ],
            one["absent"],
        )
        for language, one in report.constructs.items()
    ]


def _sources(report: CorpusReport) -> list[_Table]:
    return [
        ([by, "rows", "of rows", "of characters"], [_share(one) for one in _shown(shares)])
        for by, shares in report.sources.items()
        if len(shares) >= _LIKE_ALL
    ]


def _shown(shares: list[Share]) -> list[Share]:
    """Return the largest shares, and the rest as one."""
    if len(shares) <= _MOST_SHARES:
        return shares
    rest = shares[_MOST_SHARES:]
    return [
        *shares[:_MOST_SHARES],
        {
            "name": f"{len(rest)} more",
            "rows": sum(one["rows"] for one in rest),
            "rows_share": sum(one["rows_share"] for one in rest),
            "characters": sum(one["characters"] for one in rest),
            "characters_share": sum(one["characters_share"] for one in rest),
        },
    ]


def _share(one: Share) -> list[str]:
    return [
        wording.visible(one["name"]) or "none named",
        wording.count(one["rows"]),
        wording.percent(one["rows_share"]),
        wording.percent(one["characters_share"]),
    ]


def _tokens(report: CorpusReport) -> list[tuple[str, str]]:
    """Return what is behind the counts of tokens, as labels and texts."""
    one = report.tokens
    if one is None:
        return []
    encoded = f"{wording.count(one['encoded_rows'])} of {wording.count(report.rows)} rows"
    how = "all rows" if one["exact"] else f"{encoded}, drawn evenly; totals are estimates"
    side = wording.visible(one["truncation"])
    over = f"documents over {one['seq_len']} tokens, on the {side}"
    cut = f"{wording.count(one['truncated_documents'])} {over}"
    unlearned = f"{wording.percent(one['lost_supervised_share'])} of the learned ones"
    return [
        ("Encoded", how),
        ("Objective", wording.visible(one["objective"])),
        ("Documents", wording.count(one["documents"])),
        ("Learned tokens", wording.count(one["supervised_tokens"])),
        ("Cut", cut),
        ("Kept nothing to learn", f"{wording.count(one['dropped_documents'])} documents"),
        ("Lost", f"{wording.count(one['lost_tokens'])} tokens, and {unlearned}"),
        ("Tokenizer", one["tokenizer_sha256"][:12]),
        ("Chat template", one["template_sha256"][:12]),
    ]


def _distinct(report: CorpusReport) -> _Table:
    found = {} if report.diversity is None else report.diversity["distinct"]
    rows = [
        [
            f"runs of {size}",
            wording.count(one["total"]),
            f"{'' if one['exact'] else 'about '}{wording.count(one['distinct'])}",
            wording.percent(one["share"]),
        ]
        for size, one in found.items()
    ]
    return ["tokens of the answers", "all", "distinct", "distinct-n"], rows


def _found(report: CorpusReport) -> _Table:
    safety = report.safety
    rows = [[name, "secret", wording.count(one)] for name, one in safety["secrets"].items()]
    rows += [[name, "phrase", wording.count(one)] for name, one in safety["injections"].items()]
    return ["kind", "", "found"], rows


def _findings(report: CorpusReport) -> _Table:
    rows = [
        [
            wording.visible(one["place"]) or "no place",
            one["kind"],
            one["field"],
            wording.visible(one["shown"] or ""),
        ]
        for one in report.safety["findings"]
    ]
    return ["place", "kind", "in", "begins with"], rows


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
        marks: name -> length to draw a line at, if it is in range.
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
    """Return the position of a length, in bars from the left; None outside."""
    for number, (low, high) in enumerate(pairwise(edges)):
        if low <= value < high:
            return number + (value - low) / (high - low)
    return None


def _text(x: float, y: float, text: str, anchor: str, color: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:g}" fill="{color}" text-anchor="{anchor}">{escape(text)}</text>'
    )
